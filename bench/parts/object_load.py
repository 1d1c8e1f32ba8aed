"""One load of objects for every backend: conversations whose turns read what they stored before, and store one more.

It needs nothing but Python, since LMCache's environment has its own. A turn of a conversation reads all objects of its
earlier turns, in order and a few at a time, and writes one object. In a conversation of 24 turns 92 % of the objects
are read. The streams are as many conversations at once. What was read and written is noted in a journal (FORMAT.md).
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

WINDOW = 4
"""Objects of one stream in flight."""
DEADLINE_S = 120.0
"""For one object."""
Way = str
"""``read`` or ``write``."""


class Moved(NamedTuple):
    """One object that was read or written."""

    stream: int
    way: Way
    number: int
    began_s: float
    """Unix seconds."""
    ended_s: float
    bytes: int
    """As the backend stores the object."""


class Backend(Protocol):
    """A place for objects."""

    def submit(self, stream: int, way: Way, numbers: Sequence[int]) -> None:
        """Begin to read or write objects; a stream has one call in flight."""
        ...

    def take(self, wait_s: float) -> Sequence[Moved]:
        """What has ended since the last call; waits for the first.

        Raises:
            Exception: an object was not read or not written.
        """
        ...


class ObjectLoad(NamedTuple):
    """What is read and written."""

    size: int
    """Payload bytes of an object."""
    streams: int
    turns: int
    conversations: int
    """Of each stream, one after the other."""

    @property
    def objects(self) -> int:
        """Objects that are written."""
        return self.streams * self.turns * self.conversations

    @property
    def read_share(self) -> float:
        """Share of reads, in per cent of objects."""
        return 100 * (self.turns - 1) / (self.turns + 1)

    def calls(self, stream: int) -> Iterator[tuple[Way, Sequence[int]]]:
        """The calls of one stream, in order."""
        for conversation in range(self.conversations):
            first = (conversation * self.streams + stream) * self.turns
            for turn in range(self.turns):
                for start in range(0, turn, WINDOW):
                    yield "read", range(first + start, first + min(start + WINDOW, turn))
                yield "write", (first + turn,)

    def arguments(self) -> list[str]:
        """For the command line of a driver."""
        return [f"--{name}={value}" for name, value in self._asdict().items()]


def drive(load: ObjectLoad, backend: Backend, tier: str, journal: Path) -> None:
    """Run the load, write the journal when it has ended, and then sync, so that the device has seen everything.

    Raises:
        TimeoutError: nothing ended for `DEADLINE_S`.
    """
    waiting = {stream: load.calls(stream) for stream in range(load.streams)}
    left = dict.fromkeys(waiting, 0)
    moved: list[Moved] = []
    began_s = time.time()
    ready = list(waiting)
    while waiting:
        for stream in ready:
            way, numbers = next(waiting[stream], ("", ()))
            if not numbers:
                del waiting[stream]
                continue
            left[stream] = len(numbers)
            backend.submit(stream, way, numbers)
        ready = []
        if not waiting:
            break
        ended = backend.take(DEADLINE_S)
        if not ended:
            raise TimeoutError(f"no object was read or written for {DEADLINE_S:g} s")
        moved += ended
        for it in ended:
            left[it.stream] -= 1
            if not left[it.stream]:
                ready.append(it.stream)
    with journal.open("w") as lines:
        lines.write(json.dumps({"kind": "journal", "version": 1, "began_s": began_s, "chunk_tokens": 256}) + "\n")
        for it in moved:
            fields = {
                "kind": "object",
                "time_s": it.ended_s,
                "seconds": it.ended_s - it.began_s,
                "way": it.way,
                "tier": tier,
                "outcome": "done",
                "bytes": it.bytes,
                "payload_bytes": load.size,
                "name": f"{it.number:016x}",
            }
            lines.write(json.dumps(fields) + "\n")
    os.sync()
