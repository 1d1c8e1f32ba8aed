"""A tier in process memory, which is the reference for other tiers, and variants that are slow or misbehave."""

import random
import threading
import time
from collections.abc import Collection, Iterator, Sequence

from kvtier.errors import TierError
from kvtier.policy.base import Evictor
from kvtier.policy.lru import Lru
from kvtier.tier.base import About, Figures, OneByOneTier, never_pinned
from kvtier.types import ObjectName


class MemoryTier(OneByOneTier):
    """A dict of frames with a hard cap. One lock protects everything, with no I/O under it.

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
        """Bytes that the frames take. Never above `capacity_bytes`."""
        return self._used_bytes

    @property
    def object_count(self) -> int:
        """Number of objects in the tier."""
        return len(self._frames)

    @property
    def evictions(self) -> int:
        """Objects evicted to make room, since the start."""
        return self._evictions

    def figures(self) -> Figures:
        """Return the current figures."""
        return Figures(self.used_bytes, self.capacity_bytes, self.evictions)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the tier has it now."""
        with self._lock:
            self._check_open()
            return [name in self._frames for name in names]

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Copy the frame's bytes from `offset` on into `into`. None if absent."""
        with self._lock:
            self._check_open()
            found = self._frames.get(name)
            if found is None:
                return None
            frame, about = found
            self._evictor.touched(about.use(name))
        # The frame never changes, so it may be copied outside the lock.
        part = memoryview(frame)[offset : offset + into.nbytes]
        into.cast("B")[: part.nbytes] = part
        return part.nbytes

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Keep a copy of `frame`, and evict others if needed. False if it is larger than the whole tier."""
        with self._lock:
            self._check_open()
            found = self._frames.get(name)
            if found is not None:
                self._evictor.added(about.use(name))
                return True
            if not self._make_room(self.capacity_bytes - frame.nbytes):
                return False
            self._frames[name] = (bytes(frame), about)
            self._used_bytes += frame.nbytes
            self._evictor.added(about.use(name))
            return True

    def delete(self, name: ObjectName) -> None:
        """Forget `name`."""
        with self._lock:
            self._check_open()
            self._remove(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Return every (name, frame bytes) in the tier at the time of the call."""
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
        """Evict until at most `target_bytes` are used. False if that is impossible."""
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


class ThrottledTier(MemoryTier):
    """A tier behind a link of fixed bandwidth each way, which all threads share. Objects pass it one at a time.

    Args:
        bytes_per_s: bandwidth of each way, which may be changed.
        capacity_bytes: see `MemoryTier`.
    """

    def __init__(self, name: str, *, bytes_per_s: float, capacity_bytes: int) -> None:
        super().__init__(name, capacity_bytes=capacity_bytes)
        self.bytes_per_s = bytes_per_s
        self._free_s = {"read": 0.0, "write": 0.0}
        self._link = threading.Lock()

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read as `MemoryTier` does, at the link's bandwidth."""
        start_s = time.perf_counter()
        count = super().read_one(name, into, offset)
        self._pass("read", start_s, count or 0)
        return count

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Write as `MemoryTier` does, at the link's bandwidth."""
        self._pass("write", time.perf_counter(), frame.nbytes)
        return super().write_one(name, frame, about)

    def _pass(self, way: str, start_s: float, size_bytes: int) -> None:
        with self._link:
            self._free_s[way] = until_s = max(self._free_s[way], start_s) + size_bytes / self.bytes_per_s
        time.sleep(max(0.0, until_s - time.perf_counter()))


GATE_S = 60.0


class GatedTier(MemoryTier):
    """Hangs in the methods of `shut` until `open_again`, and fails in those of `broken`."""

    def __init__(self, name: str = "gated", capacity_bytes: int = 64 << 20, *, shut: Collection[str] = ()) -> None:
        super().__init__(name, capacity_bytes=capacity_bytes)
        self.shut = set(shut)
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self.gate, self.hangs = threading.Event(), threading.Event()
        self.writes = 0

    def enter(self, method: str) -> None:
        """Hang or fail as `method` should."""
        if method in self.shut:
            self.hanging.add(method)
            self.hangs.set()
            self.gate.wait(GATE_S)
        if method in self.broken:
            raise TierError(self.name, f"no {method}")

    def open_again(self) -> None:
        """Stop hanging and failing."""
        self.shut.clear()
        self.broken.clear()
        self.gate.set()

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Look up names, unless it hangs or fails."""
        self.enter("contains")
        return super().contains(names)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read an object, unless it hangs or fails."""
        self.enter("read")
        return super().read_one(name, into, offset)

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Write an object, unless it hangs or fails."""
        self.enter("write")
        self.writes += 1
        return super().write_one(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        """Delete an object, unless it hangs or fails."""
        self.enter("delete")
        super().delete(name)


class MischievousTier(MemoryTier):
    """Forgets, refuses, fails, delays, and returns damaged, short and foreign bytes, drawn from a seed."""

    def __init__(self, name: str, seed: int, capacity_bytes: int = 30 * 20_480, delay_s: float = 0.02) -> None:
        super().__init__(name, capacity_bytes=capacity_bytes)
        self.chance, self.is_calm, self.delay_s = random.Random(seed), False, delay_s
        self._seen: list[ObjectName] = []

    def _odd(self) -> float:
        roll = 1.0 if self.is_calm else self.chance.random()
        if roll < 0.05:
            raise TierError(self.name, "mischief")
        if roll < 0.08:
            time.sleep(self.delay_s)
        return roll

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Look up names, and sometimes answer the opposite."""
        answers = super().contains(names)
        return [not it for it in answers] if 0.08 <= self._odd() < 0.15 else answers

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read an object, and sometimes return other bytes."""
        roll = self._odd()
        count = super().read_one(name, into, offset)
        if count is None and 0.1 <= roll < 0.2:
            return into.nbytes  # the slot keeps an earlier object's bytes
        if count and 0.2 <= roll < 0.3:
            into[self.chance.randrange(count)] ^= 1 << self.chance.randrange(8)
        if count and 0.3 <= roll < 0.35:
            return self.chance.randrange(count)
        if count and 0.35 <= roll < 0.4 and self._seen:
            return super().read_one(self.chance.choice(self._seen), into, 0)
        return count

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Write an object, but sometimes only half of its bytes or none."""
        roll = self._odd()
        if 0.08 <= roll < 0.15:
            return False
        self._seen.append(name)
        return super().write_one(name, frame if roll > 0.2 else frame[: len(frame) // 2], about)
