"""The interface of a place below host memory."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from kvtier.errors import TierError
from kvtier.types import Hint, ObjectName

_Answer = TypeVar("_Answer")


class About(NamedTuple):
    """What a tier's policy may know of an object that is written."""

    parent: ObjectName | None = None
    """The object before it in its prefix, same group and rank; None at the start and for other than history groups."""
    depth: int = 0
    group: int = 0
    tokens: int = 0
    hint: Hint = Hint()


UNKNOWN = About()


class Tier(Protocol):
    """A place that keeps frames by object name. Blocking; every method may be called from several threads at once.

    A tier may forget anything at any time and its answers may be stale. It must never give bytes under a name that were
    not written whole under that name, as far as it can tell; the reader verifies the frame in any case.
    Every method may raise `TierError`; after `close` all but `close` do.
    """

    name: str

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether the tier holds it: a hint, not a promise. Counts as no use.

        Sessions ask about no names once a second, to know the tier's health: `TierError` while its place is gone.
        """
        ...

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """Read the frame's bytes from `offset` on into `into`; counts as a use.

        Returns:
            How many bytes were read (fewer than `into` holds when the frame ends before), or None when absent.
        """
        ...

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """Keep `frame` under `name`, visible whole or not at all. A name that is there already is left as it is.

        Returns:
            Whether the tier holds the name now. False when it is not admitted or larger than the place.
        """
        ...

    def delete(self, name: ObjectName) -> None:
        """Forget `name`; absent is fine."""
        ...

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) held; concurrent changes may or may not show."""
        ...

    def close(self) -> None:
        """Give everything back; twice is fine."""
        ...


class Read(NamedTuple):
    """One object of a batch that is read from its start on."""

    name: ObjectName
    into: memoryview


class Write(NamedTuple):
    """One object of a batch that is written."""

    name: ObjectName
    frame: memoryview
    about: About = UNKNOWN


@runtime_checkable
class BatchTier(Tier, Protocol):
    """A tier to which several small objects at once are less work than one after the other. Nobody has to be one.

    Each answer stands where its question stood. An object that fails has its error there, and costs the others nothing;
    the call raises only what concerns all of them.
    """

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """`read` for each of `reads`."""
        ...

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """`write` for each of `writes`, of different names."""
        ...


@runtime_checkable
class AheadTier(BatchTier, Protocol):
    """A tier that can read while its caller does something else. Nobody has to be one."""

    def reading(self, reads: Sequence[Read]) -> Generator[None, None, list[int | TierError | None]]:
        """`read_many` in two steps, both in one thread: it yields once, when the device has been asked.

        Until it has ended the memory of `reads` is in use; closing it early waits for the device, too.
        """
        ...


def ended(steps: Generator[None, None, _Answer]) -> _Answer:
    """Go through all steps; what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value
