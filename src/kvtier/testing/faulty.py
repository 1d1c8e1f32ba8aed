"""A tier around a tier that fails, hangs, delays, lies or forgets on purpose, at the operations it is told to."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.errors import TierError
from kvtier.tier.base import UNKNOWN, About, Tier
from kvtier.types import ObjectName

EVENT_DEADLINE_S = 30.0
"""A hang or delay that nobody ends turns into a `TierError` after this, so that no test waits for ever."""


@dataclass(frozen=True)
class Fail:
    """Raise a `TierError`; the inner tier is not asked."""

    detail: str = "failed on purpose"


@dataclass(frozen=True)
class Hang:
    """Wait until `released` is set, then raise a `TierError` without asking the inner tier: a device that is stuck."""

    released: threading.Event
    deadline_s: float = EVENT_DEADLINE_S


@dataclass(frozen=True)
class Delay:
    """Wait until `released` is set, then go on as if nothing had happened."""

    released: threading.Event
    deadline_s: float = EVENT_DEADLINE_S


@dataclass(frozen=True)
class Truncate:
    """A read gives `byte_count` bytes at most. Other operations go on as usual."""

    byte_count: int


@dataclass(frozen=True)
class FlipBit:
    """A read gives its bytes with this bit turned (counted from the start, modulo what was read)."""

    bit: int


@dataclass(frozen=True)
class Vanish:
    """A read, a write or a question is answered as if the tier had never heard of the name."""


Fault = Fail | Hang | Delay | Truncate | FlipBit | Vanish


class Operation(NamedTuple):
    """One call, as a plan sees it."""

    number: int
    """Counted from 1 over all operations."""
    kind: str
    """The method: contains, read, write, delete or scan. (`close` is never disturbed.)"""
    kind_number: int
    """Counted from 1 over the operations of this kind."""
    name: ObjectName | None
    """Of read, write and delete."""


Plan = Mapping[int, Fault] | Callable[[Operation], Fault | None]
"""Operation number to fault, or a function that is asked for each."""


class FaultyTier:
    """`inner`, disturbed by `plan`, which may be replaced at any time: `tier.plan = {}` heals it.

    Args:
        inner: the tier that does the work.
        plan: which operations go wrong, and how.

    Attributes:
        counts: how many operations of each kind were begun.
    """

    def __init__(self, inner: Tier, plan: Plan | None = None) -> None:
        self.name = inner.name
        self.inner = inner
        self.plan: Plan = {} if plan is None else plan
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def operation_count(self) -> int:
        """Operations begun, of all kinds."""
        return sum(self.counts.values())

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """As `inner`, unless the plan says otherwise."""
        if isinstance(self._disturb("contains"), Vanish):
            return [False] * len(names)
        return self.inner.contains(names)

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """As `inner`, unless the plan says otherwise."""
        fault = self._disturb("read", name)
        if isinstance(fault, Vanish):
            return None
        count = self.inner.read(name, into, offset)
        if isinstance(fault, Truncate) and count is not None:
            return min(count, fault.byte_count)
        if isinstance(fault, FlipBit) and count:
            position = fault.bit % (8 * count)
            into.cast("B")[position // 8] ^= 1 << position % 8
        return count

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """As `inner`, unless the plan says otherwise."""
        if isinstance(self._disturb("write", name), Vanish):
            return False
        return self.inner.write(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        """As `inner`, unless the plan says otherwise."""
        self._disturb("delete", name)
        self.inner.delete(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """As `inner`, unless the plan says otherwise."""
        self._disturb("scan")
        return self.inner.scan()

    def close(self) -> None:
        """As `inner`, always."""
        self.inner.close()

    def _disturb(self, kind: str, name: ObjectName | None = None) -> Fault | None:
        with self._lock:
            self.counts[kind] += 1
            operation = Operation(self.operation_count, kind, self.counts[kind], name)
            plan = self.plan
            fault = plan(operation) if callable(plan) else plan.get(operation.number)
        if isinstance(fault, Fail):
            raise TierError(self.name, fault.detail)
        if isinstance(fault, Hang | Delay):
            was_released = fault.released.wait(fault.deadline_s)
            if isinstance(fault, Hang) or not was_released:
                raise TierError(self.name, "hung on purpose" if was_released else "hung until the test's own deadline")
        return fault
