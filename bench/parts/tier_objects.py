"""Drives a tier of kvtier with the load of `object_load`, in a process of its own.

    python bench/parts/tier_objects.py --kind disk --root DIR --journal FILE --threads N --size BYTES ...

The tier is full when the load begins, so that every write replaces a victim. Frames are made and verified as in use.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
from bench.parts.object_load import DEADLINE_S, WINDOW, Moved, ObjectLoad, Way, drive

from kvtier.codec.frame import frame_bytes
from kvtier.errors import KvError
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion
from kvtier.runtime.mover import Mover, Threads
from kvtier.testing.host_copier import HostCopier
from kvtier.tools.bench.io_harness import FINGERPRINT, chunk_key, layout_of, open_trial, taken
from kvtier.types import Direction, Outcome, Transfer

DIRECTIONS = {"read": Direction.PROMOTE, "write": Direction.DEMOTE}


class TierBackend:
    """A tier below a mover, with `WINDOW` slots for each stream.

    Args:
        kind: of the tier.
        root: of its store.
        load: what will be read and written.
        threads: of the tier, for reads and as many for writes.
    """

    def __init__(self, kind: str, root: Path, load: ObjectLoad, threads: int) -> None:
        self.layout = layout = layout_of(load.size)
        slots = load.streams * WINDOW
        self._load = load
        # A victim is never an object of the load: there is room for a quarter more.
        self._room = load.objects + load.objects // 4 + threads
        self._tier = open_trial(kind, root, self._room, frame_bytes(layout.groups[0]))
        self._arena = Arena(layout, (slots,), populate=True)
        for slot in range(slots):
            payload = np.frombuffer(self._arena.payload(0, slot), np.uint8)
            payload[:] = np.random.default_rng(slot).integers(0, 256, len(payload), np.uint8)
        self._mover = Mover(
            CommandRunner(
                layout=layout,
                model=FINGERPRINT[:16],
                arena=self._arena,
                copier=HostCopier(layout, [[np.zeros((1, size), np.uint8) for size in layout.groups[0].layer_bytes]]),
                tiers={self._tier.name: self._tier},
            ),
            threads=Threads(read=threads, write=threads),
        )
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._mover.complete_to(self._completions.put)
        self._streams: dict[int, tuple[int, Way]] = {}
        """Stream and way of each command in flight."""
        self._numbers: dict[int, int] = {}
        self._commands = 0

    def fill(self) -> None:
        """Write other objects until the tier is full."""
        first = self._load.objects
        for start in range(first, first + self._room, WINDOW):
            self.submit(0, "write", range(start, min(start + WINDOW, first + self._room)))
            while self._streams:
                self.take(DEADLINE_S)

    def submit(self, stream: int, way: Way, numbers: Sequence[int]) -> None:
        """See `Backend`."""
        deadline_s = time.monotonic() + DEADLINE_S
        transfers: list[Transfer] = []
        for at, number in enumerate(numbers):
            self._commands += 1
            self._streams[self._commands] = stream, way
            self._numbers[self._commands] = number
            slot = stream * WINDOW + at
            transfers.append(
                Transfer(
                    self._commands, DIRECTIONS[way], chunk_key(number), 0, slot, self._tier.name, None, (), None, at,
                    deadline_s, None,
                )
            )  # fmt: skip
        self._mover.submit(*transfers)

    def take(self, wait_s: float) -> list[Moved]:
        """See `Backend`."""
        found: list[Moved] = []
        for completion in taken(self._completions, wait_s):
            command = completion.command
            assert isinstance(command, Transfer)
            stream, way = self._streams.pop(command.id)
            number = self._numbers.pop(command.id)
            if completion.outcome is not Outcome.DONE:
                raise KvError(f"the {way} of object {number} ended {completion.outcome.value}: {completion.detail}")
            now_s = time.time()
            found.append(Moved(stream, way, number, now_s - completion.seconds, now_s, completion.size_bytes))
        return found

    def close(self) -> None:
        """Close the mover, the arena and the tier."""
        self._mover.close(DEADLINE_S)
        self._arena.close()
        self._tier.close()


def main() -> None:
    """Fill the tier and run the load."""
    parser = argparse.ArgumentParser()
    for name in ("--kind", "--root", "--journal"):
        parser.add_argument(name, required=True)
    for name in ("--threads", *(f"--{field}" for field in ObjectLoad._fields)):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    load = ObjectLoad(*(getattr(given, field) for field in ObjectLoad._fields))
    backend = TierBackend(given.kind, Path(given.root), load, given.threads)
    try:
        backend.fill()
        drive(load, backend, given.kind, Path(given.journal))
    finally:
        backend.close()


if __name__ == "__main__":
    main()
