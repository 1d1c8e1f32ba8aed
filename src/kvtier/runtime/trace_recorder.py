"""Records the requests of a running engine in a file of request lines, which `kvtier replay` reads.

Block ids are digests of chunk keys under a secret that only this object has. They show which blocks of a file are
equal, and nothing else. The engine's thread only queues a request; a thread of the recorder computes ids and writes.
Requests that exceed the queue, the capacity or the file system's space are counted as lost: recording neither delays
requests nor makes them fail.

Requests are queued when they end and written in order of arrival, as far as the memory for waiting lines allows.
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
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.types import ChunkKey, NextTurn

logger = logging.getLogger(__name__)

ID_BYTES: Final = 6
"""Bytes of a block's id. Two of ten million blocks have the same id with a probability of one in six."""
WAITING_MAX: Final = 1024
"""Most queued requests."""
WAITING_KEYS_MAX: Final = 1 << 17
"""Most keys of queued requests, about 10 MB of memory."""
HELD_MAX: Final = 4096
HELD_BYTES_MAX: Final = 16 << 20
"""Most lines, and bytes of lines, that wait for an earlier request to end."""
OPEN_DEADLINE_S: Final = 2.0
"""How long opening waits for the file. A file that is created later records from then on."""
FLUSH_S: Final = 1.0
FLUSH_BYTES: Final = 1 << 18

SUFFIX: Final = ".jsonl"

_numbers = itertools.count(1)


class Served(NamedTuple):
    """One request that has ended."""

    arrived_s: float
    """Arrival on the clock of `time.monotonic`."""
    keys: Sequence[ChunkKey]
    """Keys of the prompt's full chunks."""
    input_tokens: int
    output_tokens: int
    session: str | None = None
    """Name of the conversation; a digest of it is recorded."""
    next_turn: NextTurn | None = None
    """What continues the conversation, if declared."""


class Recorder:
    """One recording: a new file in a directory.

    Args:
        folder: created if missing.
        capacity_bytes: most bytes of all recordings in `folder`, which are summed up at the start.
        chunk_tokens: tokens of a chunk.
        metrics: counts recorded and lost requests.

    Raises:
        ConfigError: the file cannot be created.
    """

    def __init__(self, folder: Path, capacity_bytes: int, chunk_tokens: int, metrics: Metrics) -> None:
        self._metrics = metrics
        self._chunk_tokens = chunk_tokens
        self._secret = secrets.token_bytes(32)
        self._began_s = time.monotonic()
        self._notes: queue.Queue[tuple[Served, float | None] | None] = queue.Queue(WAITING_MAX)
        self._keys_put = self._keys_taken = 0
        """Each is changed by one thread."""
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
            logger.warning(
                "%s could not be created within %g s; kvtier records requests once it is", self.path, OPEN_DEADLINE_S
            )
        except OSError as error:
            raise ConfigError(
                f"trace.path = {str(folder)!r}: no recording can be created: {error.strerror or error}"
            ) from error
        else:
            logger.info("requests are recorded in %s", self.path)

    def served(self, request: Served, open_since_s: float | None = None) -> None:
        """Queue a request that has ended. Never blocks. One thread at a time.

        Args:
            request: the request.
            open_since_s: arrival of the oldest request that has not ended; None if there is none.
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
        """Write the queued requests and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        until_s = time.monotonic() + deadline_s
        try:
            self._notes.put(None, timeout=deadline_s)
        except queue.Full:
            return  # the file system hangs; the thread is a daemon
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
        line: dict[str, object] = {
            "timestamp": round((request.arrived_s - self._began_s) * 1000, 3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
        }
        if request.session is not None:
            line["session_id"] = self._named(b"session" + request.session.encode("utf-8", "surrogatepass"))
        if request.next_turn is not None:
            line["next_turn"] = request.next_turn.value
        line["hash_ids"] = [self._named(key) for key in request.keys]
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _named(self, name: bytes) -> int:
        return int.from_bytes(blake2b(name, key=self._secret, digest_size=ID_BYTES).digest())

    def _write(self, line: bytes) -> None:
        if not self._written_bytes and not self._lines:
            line = f'{{"block_size":{self._chunk_tokens},'.encode() + line[1:]
        if self._is_full or self._written_bytes + self._lines_bytes + len(line) > self._room_bytes:
            self._stop("trace.capacity_bytes is reached")
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
                raise OSError(0, "partial write")  # noqa: TRY301 - one place that ends a recording
        except OSError as error:
            self._lose(len(lines))
            self._stop(error.strerror or str(error))
            self._cut()
            return
        self._written_bytes += len(data)
        self._metrics.add(table.TRACE_REQUESTS, len(lines), result="recorded")

    def _cut(self) -> None:
        """Remove an incomplete last line."""
        try:
            os.ftruncate(self._file, self._written_bytes)
        except OSError as error:
            logger.warning("the last line of %s is incomplete and could not be removed: %s", self.path, error)

    def _stop(self, reason: str) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("recording in %s has stopped: %s; requests are served as before", self.path, reason)

    def _lose(self, count: int = 1) -> None:
        self._metrics.add(table.TRACE_REQUESTS, count, result="lost")
