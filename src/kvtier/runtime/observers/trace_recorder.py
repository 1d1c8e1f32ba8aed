"""Records the requests of a running engine in a file of request lines, which `kvtier replay` reads.

Block ids are digests of chunk keys under a secret that only this object has. They reveal only which blocks of a file
are equal. The engine's thread only queues a request; the thread of a `LineFile` computes ids and writes lines.

Requests are queued when they end, and written in order of arrival if the waiting lines fit in memory.
"""

import heapq
import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.observers.guards import Observer
from kvtier.runtime.observers.line_file import SUFFIX, LineFile, new_path
from kvtier.types import ChunkKey, NextTurn

ID_BYTES: Final = 6
"""Bytes of a block's id. Among ten million blocks, two share an id with a probability of one in six."""
WAITING_MAX: Final = 1024
"""Maximum number of queued requests."""
WAITING_KEYS_MAX: Final = 1 << 17
"""Maximum number of keys in queued requests, about 10 MB of memory."""
HELD_MAX: Final = 4096
HELD_BYTES_MAX: Final = 16 << 20
"""Maximum number and bytes of lines that wait for an earlier request to end."""


class Served(NamedTuple):
    """One request that has ended."""

    arrived_s: float
    """Arrival on the clock of `time.monotonic`."""
    keys: Sequence[ChunkKey]
    """Keys of the prompt's full chunks."""
    input_tokens: int
    output_tokens: int
    conversation: str | None = None
    """Name of the conversation; only its digest is recorded."""
    next_turn: NextTurn | None = None
    """The declared next turn of the conversation, if any."""


class Recorder(Observer):
    """One recording: a new file in a directory.

    Args:
        folder: the directory, created if missing.
        capacity_bytes: limit for all recordings in `folder`, whose sizes are summed at the start.
        chunk_tokens: number of tokens per chunk.
        metrics: counts recorded and lost requests.

    Raises:
        UnusablePathError: the file cannot be created.
    """

    def __init__(self, folder: Path, capacity_bytes: int, chunk_tokens: int, metrics: Metrics) -> None:
        self._secret = secrets.token_bytes(32)
        self._began_s = time.monotonic()
        self._keys_put = self._keys_taken = 0
        """Keys queued and keys taken from the queue. Each count is changed by only one thread."""
        self._held: list[tuple[float, int, bytes]] = []
        self._held_bytes = 0
        self._order = itertools.count()
        block_size = f'{{"block_size":{chunk_tokens},'.encode()
        self._file: LineFile[tuple[Served, float | None]] = LineFile(
            new_path(folder, "requests"),
            capacity_bytes=capacity_bytes,
            siblings=f"requests-*{SUFFIX}",
            setting="trace.path",
            lines=self._lines,
            rest=self._rest,
            first=lambda line: block_size + line[1:],
            waiting_max=WAITING_MAX,
            metrics=metrics,
            metric=table.TRACE_REQUESTS,
        )
        self.path = self._file.path

    def served(self, request: Served, open_since_s: float | None = None) -> None:
        """Queue a request that has ended. Never block. Only one thread at a time may call this.

        Args:
            request: the request.
            open_since_s: arrival of the oldest request that has not ended; None if there is none.
        """
        keys = len(request.keys)
        if self._keys_put - self._keys_taken + keys > WAITING_KEYS_MAX:
            self._file.lose()
        elif self._file.put((request, open_since_s)):
            self._keys_put += keys

    def close(self, deadline_s: float = 5.0) -> None:
        """Write the queued requests and end the thread. Idempotent."""
        self._file.close(deadline_s)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _lines(self, note: tuple[Served, float | None]) -> Iterator[bytes]:
        request, open_since_s = note
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
            yield self._next()

    def _rest(self) -> Iterator[bytes]:
        while self._held:
            yield self._next()

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
        if request.conversation is not None:
            line["session_id"] = self._named(b"session" + request.conversation.encode("utf-8", "surrogatepass"))
        if request.next_turn is not None:
            line["next_turn"] = request.next_turn.value
        line["hash_ids"] = [self._named(key) for key in request.keys]
        return json.dumps(line, separators=(",", ":")).encode() + b"\n"

    def _named(self, name: bytes) -> int:
        return int.from_bytes(blake2b(name, key=self._secret, digest_size=ID_BYTES).digest())
