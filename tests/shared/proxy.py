"""A TCP proxy between a client and a server of loopback: the network that a test can break."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple, Self

_CHUNK_BYTES = 1 << 18
_CHUNKS_MAX = 256
"""Chunks on the way in one direction of a connection; with a delay this is the line's capacity."""
_START_DEADLINE_S = 10.0


class _Chunk(NamedTuple):
    data: bytes
    due_s: float


class Proxy:
    """Forwards `port` of loopback to `target_port`. A context manager."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.delay_s = 0.0
        """What every byte takes longer, in each direction."""
        self.swallows: Callable[[bytes], bool] = lambda _sent: False
        """Whether a connection stops, and stays open, at these bytes of the client."""
        self._answer_bytes: int | None = None
        self._is_refusing = False
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(_START_DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_START_DEADLINE_S)

    def partition(self) -> None:
        """Bytes stop in both directions and connections stay open, as when a cable is pulled."""
        self._call(self._passes.clear)

    def cut(self) -> None:
        """Reset all connections and refuse new ones, as when the server's machine restarts."""
        self._is_refusing = True
        self._call(self._reset)

    def cut_answers_after(self, answer_bytes: int) -> None:
        """Close each connection once the server has sent `answer_bytes` through it."""
        self._answer_bytes = answer_bytes

    def heal(self) -> None:
        """Forward everything at once again."""
        self.delay_s, self._answer_bytes, self._is_refusing = 0.0, None, False
        self._call(self._passes.set)

    def _call(self, function) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(_START_DEADLINE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._end, self._passes = asyncio.Event(), asyncio.Event()
        self._passes.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._end.wait()
        server.close()
        self._reset()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if not self._is_refusing:
                await self._passes.wait()
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
                self._writers.add(far_writer)
                try:
                    await asyncio.gather(
                        self._forward(reader, far_writer, None, self.swallows),
                        self._forward(far_reader, writer, self._answer_bytes),
                    )
                finally:
                    self._abort(far_writer)
        self._abort(writer)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bytes_left: int | None,
        swallows: Callable[[bytes], bool] = lambda _sent: False,
    ) -> None:
        """Forward until an end; the connection ends with its first direction."""
        line: asyncio.Queue[_Chunk] = asyncio.Queue(_CHUNKS_MAX)
        now = self._loop.time

        async def take() -> None:
            while True:
                data = await reader.read(_CHUNK_BYTES)
                await line.put(_Chunk(data, now() + self.delay_s))
                if not data:
                    return

        taking = asyncio.ensure_future(take())
        try:
            while (chunk := await line.get()).data:
                if chunk.due_s > now():
                    await asyncio.sleep(chunk.due_s - now())
                await self._passes.wait()
                if swallows(chunk.data):
                    await asyncio.Event().wait()
                data = chunk.data if bytes_left is None else chunk.data[:bytes_left]
                writer.write(data)
                await writer.drain()
                if bytes_left is not None:
                    bytes_left -= len(data)
                    if bytes_left == 0:
                        break
            writer.close()
        finally:
            taking.cancel()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await taking

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    def _reset(self) -> None:
        for writer in list(self._writers):
            self._abort(writer)
