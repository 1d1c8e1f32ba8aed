"""The interface of a tier below host memory."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from kvtier.errors import TierError
from kvtier.policy.base import Held
from kvtier.tier.refusal_log import RefusalLog
from kvtier.types import Figures, ObjectName

_Answer = TypeVar("_Answer")


class About(NamedTuple):
    """Metadata of an object, for the tier's eviction policy."""

    parent: ObjectName | None = None
    """The preceding object of the prefix, same group and rank. None at the start and for groups without history."""
    depth: int = 0
    group: int = 0
    session: str | None = None

    def held(self, name: ObjectName) -> Held:
        """The policy's event: `name` entered a tier or was used there."""
        return Held(name, self.parent, self.session)


UNKNOWN = About()


def never_pinned(_name: bytes) -> bool:
    """Lower tiers pin nothing: a reader with an open file keeps its bytes after eviction."""
    return False


class Tier(Protocol):
    """Stores frames by object name. Methods block and are thread-safe.

    A buffer belongs to a call until everything that the call began has ended. kvtier reuses it when no view, slice or
    array of it is left (`tier/loan.py`). A tier whose native code keeps its address waits for that code.

    A tier may forget any object at any time, and answers may be stale. It never knowingly returns bytes that were not
    written whole under that name; the reader verifies every frame. Every method may raise `TierError`; after `close`
    all but `close` do.
    """

    name: str

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether the tier holds it. The answer may be stale. Does not count as a use.

        Sessions call it with no names once a second as a health check: `TierError` while the storage is gone.
        """
        ...

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """Read the frame from `offset` into `into`. Counts as a use.

        Returns:
            Bytes read (fewer than `into` holds at the end of the frame), or None when absent.
        """
        ...

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """Store `frame` under `name`, atomically. An existing object is not replaced.

        Returns:
            Whether the tier holds the name now, as before if it did. False when it is not admitted or does not fit.
        """
        ...

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists."""
        ...

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) held. Concurrent changes may be missing."""
        ...

    def figures(self) -> Figures:
        """The figures now. Called about once a second in a thread of the tier; after `close` it may raise."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


@runtime_checkable
class NotesUse(Protocol):
    """A tier that records for people whether the session uses it. Optional."""

    def note_use(self, *, is_up: bool) -> None:
        """The session uses the tier, or it backs off."""
        ...


@runtime_checkable
class LogsRefusals(Protocol):
    """A tier that logs why it refuses writes. Optional."""

    refusals: RefusalLog


class Read(NamedTuple):
    """One object of a batched read, from its start."""

    name: ObjectName
    into: memoryview


class Write(NamedTuple):
    """One object of a batched write."""

    name: ObjectName
    frame: memoryview
    about: About = UNKNOWN


@runtime_checkable
class BatchTier(Tier, Protocol):
    """A tier with batched reads and writes of small objects. Optional.

    Results are in the order of the arguments. An object that fails has its error in its place and does not affect the
    others; the call raises only errors that concern the whole batch.
    """

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """`read` for each of `reads`."""
        ...

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """`write` for each of `writes`, of different names."""
        ...


@runtime_checkable
class AheadTier(BatchTier, Protocol):
    """A tier whose reads run while the caller does other work. Optional."""

    def reading(self, reads: Sequence[Read]) -> Generator[None, None, list[int | TierError | None]]:
        """`read_many` in two steps on one thread: it yields once, after the reads are submitted.

        The buffers of `reads` are in use until it ends. Closing it early also waits for the device.
        """
        ...


def ended(steps: Generator[None, None, _Answer]) -> _Answer:
    """Run all steps and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


class RawClient(Protocol):
    """The client library or file system below a tier, at its best setting: what `kvtier bench tier` compares with.

    Methods block, are thread-safe and may raise any error. Names are those of the benchmark's objects.
    """

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Store `frame`, visible as a whole, if the tier stores so."""
        ...

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object of as many bytes as `into` has."""
        ...

    def has(self, name: ObjectName) -> bool:
        """Whether the object exists: one request."""
        ...

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
