"""Writes the requests of a running engine to a file of request lines, which `kvtier replay` reads.

Block ids are digests of chunk keys under a secret that this object draws and nobody else ever has: equal blocks have
equal ids within a file, and that is all that they tell. Whoever serves a request drops a note and goes on; a thread of
our own names the blocks and writes. What it cannot keep up with, what does not fit and what the file system refuses
is not recorded, and counted: recording never delays a request and never makes one fail.

Requests are noted when they end and written in the order in which they arrived, as far as memory for those that wait
for an earlier one allows.
"""

import heapq
import itertools
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.observe import table
from kvtier.observe.metrics import Metrics
from kvtier.types import ChunkKey, NextTurn

logger = logging.getLogger(__name__)

ID_BYTES: Final = 6
"""Of a block's id. Among ten million blocks two have the same one with a probability of one in six."""
WAITING_MAX: Final = 1024
"""Notes that the thread has not taken yet."""
WAITING_KEYS_MAX: Final = 1 << 17
"""Keys of those notes, some 10 MB that nobody else may hold any more."""
HELD_MAX: Final = 4096
HELD_BYTES_MAX: Final = 16 << 20
"""Lines that wait until an earlier request has ended."""
OPEN_DEADLINE_S: Final = 2.0
"""How long to wait for the file. A file that is made later records from then on."""
FLUSH_S: Final = 1.0
FLUSH_BYTES: Final = 1 << 18

SUFFIX: Final = ".jsonl"

_numbers = itertools.count(1)


class Served(NamedTuple):
    """One request that has ended."""

    arrived_s: float
    """On the clock of `time.monotonic`."""
    keys: Sequence[ChunkKey]
    """Of the prompt's whole chunks."""
    input_tokens: int
    output_tokens: int
    session: str | None = None
    """Whatever tells requests of one conversation from others; its name is not recorded either."""
    next_turn: NextTurn | None = None
    """Who goes on after the answer, where somebody has said."""


class Recorder:
    """One recording: a new file in a directory.

    Args:
        folder: made if it is not there.
        capacity_bytes: most bytes that the recordings in `folder` may have together, as far as can be seen now; what
            comes when this one has filled the rest is not recorded.
        chunk_tokens: tokens of a chunk.
        metrics: where requests are counted.

    Raises:
        ConfigError: the file cannot be made.
    """

    def __init__(self, folder: Path, capacity_bytes: int, chunk_tokens: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._secret = secrets.token_bytes(32)
        self._began_s = time.monotonic()
        self._notes: queue.Queue[tuple[Served, float | None] | None] = queue.Queue(WAITING_MAX)
        self._keys_put = self._keys_taken = 0
        """Each is changed by one thread only."""
        self._held: list[tuple[float, int, bytes]] = []
        self._held_bytes = 0
        self._order = itertools.count()
        self._lines: list[bytes] = []
        self._lines_bytes = self._written_bytes = 0
        self._is_full = self._is_closed = False
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        self.path = folder / f"requests-{stamp}-{os.getpid()}-{next(_numbers)}{SUFFIX}"
        self._room_bytes = capacity_bytes
        self._file = -1
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="kvtier-recorder", daemon=True)
        self._thread.start()
        try:
            opened.result(OPEN_DEADLINE_S)
        except TimeoutError:
            logger.warning("%s is not there after %g s; requests are recorded once it is", self.path, OPEN_DEADLINE_S)
        except OSError as error:
            raise ConfigError(
                f"trace.path = {str(folder)!r}: requests cannot be recorded there: {error.strerror or error}"
            ) from error
        else:
            logger.info("requests are recorded in %s", self.path)

    def served(self, request: Served, open_since_s: float | None = None) -> None:
        """Note a request that has ended. Never waits. One thread at a time.

        Args:
            request: it.
            open_since_s: when the earliest request arrived that has not ended yet; None when there is none.
        """
        keys = len(request.keys)
        if self._is_full or self._is_closed or self._keys_put - self._keys_taken + keys > WAITING_KEYS_MAX:
            self._lose()
            return
        try:
            self._notes.put_nowait((request, open_since_s))
        except queue.Full:
            self._lose()
            return
        self._keys_put += keys

    def close(self, deadline_s: float = 5.0) -> None:
        """Write what has been noted and end the thread. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + deadline_s
        try:
            self._notes.put(None, timeout=deadline_s)
        except queue.Full:
            return  # a file system that hangs; the thread is a daemon
        self._thread.join(max(0.0, until_s - time.monotonic()))

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self, opened: Future[None]) -> None:
        try:
            self._open()
        except OSError as error:
            self._stop(error.strerror or str(error))
            opened.set_exception(error)
            return
        opened.set_result(None)
        flush_s = time.monotonic() + FLUSH_S
        while True:
            try:
                note = self._notes.get(timeout=max(0.0, flush_s - time.monotonic()))
            except queue.Empty:
                self._flush()
                flush_s = time.monotonic() + FLUSH_S
                continue
            if note is None:
                break
            self._take(*note)
        while self._held:
            self._write(self._next())
        self._flush()
        os.close(self._file)

    def _open(self) -> None:
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._room_bytes -= sum(it.stat().st_size for it in folder.glob(f"requests-*{SUFFIX}"))
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _take(self, request: Served, open_since_s: float | None) -> None:
        line = self._line(request)
        self._keys_taken += len(request.keys)
        heapq.heappush(self._held, (request.arrived_s, next(self._order), line))
        self._held_bytes += len(line)
        while self._held and (
            open_since_s is None
            or self._held[0][0] <= open_since_s
            or len(self._held) > HELD_MAX
            or self._held_bytes > HELD_BYTES_MAX
        ):
            self._write(self._next())

    def _next(self) -> bytes:
        line = heapq.heappop(self._held)[2]
        self._held_bytes -= len(line)
        return line

    def _line(self, request: Served) -> bytes:
        told: dict[str, object] = {
            "timestamp": round((request.arrived_s - self._began_s) * 1000, 3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
        }
        if request.session is not None:
            told["session_id"] = self._named(b"session" + request.session.encode("utf-8", "surrogatepass"))
        if request.next_turn is not None:
            told["next_turn"] = request.next_turn.value
        told["hash_ids"] = [self._named(key) for key in request.keys]
        return json.dumps(told, separators=(",", ":")).encode() + b"\n"

    def _named(self, name: bytes) -> int:
        return int.from_bytes(blake2b(name, key=self._secret, digest_size=ID_BYTES).digest())

    def _write(self, line: bytes) -> None:
        if not self._written_bytes and not self._lines:
            line = f'{{"block_size":{self._chunk_tokens},'.encode() + line[1:]
        if self._is_full or self._written_bytes + self._lines_bytes + len(line) > self._room_bytes:
            self._stop("it has come to trace.capacity_bytes")
            self._lose()
            return
        self._lines.append(line)
        self._lines_bytes += len(line)
        if self._lines_bytes >= FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        lines, self._lines, self._lines_bytes = self._lines, [], 0
        if not lines:
            return
        data = b"".join(lines)
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(0, "only a part was written")  # noqa: TRY301 - one place that ends a recording
        except OSError as error:
            self._lose(len(lines))
            self._stop(error.strerror or str(error))
            self._cut()
            return
        self._written_bytes += len(data)
        self._metrics.add(table.TRACE_REQUESTS, len(lines), result="recorded")

    def _cut(self) -> None:
        """Leave whole lines only."""
        try:
            os.ftruncate(self._file, self._written_bytes)
        except OSError as error:
            logger.warning("the last line of %s is not whole: %s", self.path, error)

    def _stop(self, reason: str) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("recording in %s has stopped: %s; requests go on as before", self.path, reason)

    def _lose(self, count: int = 1) -> None:
        self._metrics.add(table.TRACE_REQUESTS, count, result="lost")
