"""A tier in process memory, for tests: the reference for the behaviour of the other tiers."""

import threading
from collections.abc import Iterator, Sequence

from kvtier.errors import TierError
from kvtier.policy.base import Evictor
from kvtier.policy.lru import Lru
from kvtier.tier.base import About, Figures, OneByOneTier, never_pinned
from kvtier.types import ObjectName


class MemoryTier(OneByOneTier):
    """A dict of frames with a hard cap. One lock around everything, no I/O under it.

    Args:
        name: the tier's name in metrics and errors.
        capacity_bytes: maximum of all frames together.
        evictor: the eviction policy, not shared with another tier. Default: `Lru`.
    """

    def __init__(self, name: str = "memory", *, capacity_bytes: int, evictor: Evictor | None = None) -> None:
        super().__init__(name)
        self.capacity_bytes = capacity_bytes
        self._evictor = Lru() if evictor is None else evictor
        self._frames: dict[ObjectName, tuple[bytes, About]] = {}
        self._used_bytes = 0
        self._evictions = 0
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes that the frames take; never above `capacity_bytes`."""
        return self._used_bytes

    @property
    def object_count(self) -> int:
        """Objects held."""
        return len(self._frames)

    @property
    def evictions(self) -> int:
        """Objects evicted to make room, since the start."""
        return self._evictions

    def figures(self) -> Figures:
        """See `Tier`."""
        return Figures(self.used_bytes, self.capacity_bytes, self.evictions)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether it is held now."""
        with self._lock:
            self._check_open()
            return [name in self._frames for name in names]

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Copy the frame's bytes from `offset` on into `into`; None when absent."""
        with self._lock:
            self._check_open()
            found = self._frames.get(name)
            if found is None:
                return None
            frame, about = found
            self._evictor.touched(about.held(name))
        # The frame never changes, so it may be copied outside the lock.
        part = memoryview(frame)[offset : offset + into.nbytes]
        into.cast("B")[: part.nbytes] = part
        return part.nbytes

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Keep a copy of `frame`, evicting others where needed; False when it is larger than the whole tier."""
        with self._lock:
            self._check_open()
            found = self._frames.get(name)
            if found is not None:
                self._evictor.added(about.held(name))
                return True
            if not self._make_room(self.capacity_bytes - frame.nbytes):
                return False
            self._frames[name] = (bytes(frame), about)
            self._used_bytes += frame.nbytes
            self._evictor.added(about.held(name))
            return True

    def delete(self, name: ObjectName) -> None:
        """Forget `name`."""
        with self._lock:
            self._check_open()
            self._remove(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) held at the time of the call."""
        with self._lock:
            self._check_open()
            return iter([(name, len(frame)) for name, (frame, _) in self._frames.items()])

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._is_closed = True
            self._frames.clear()
            self._used_bytes = 0

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(self.name, "is closed")

    def _make_room(self, target_bytes: int) -> bool:
        """Evict until at most `target_bytes` are used; False when that cannot be."""
        if target_bytes < 0:
            return False
        while self._used_bytes > target_bytes:
            victim = self._evictor.victim(never_pinned)
            if victim is None or not self._remove(ObjectName(victim)):
                return False
            self._evictions += 1
        return True

    def _remove(self, name: ObjectName) -> bool:
        found = self._frames.pop(name, None)
        self._evictor.removed(name)
        if found is None:
            return False
        self._used_bytes -= len(found[0])
        return True
