"""The interface of a tier below host memory."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from kvtier.errors import ConfigError, TierError
from kvtier.policy.base import Held
from kvtier.tier.loan import clear_frames
from kvtier.tier.refusal_log import RefusalLog
from kvtier.types import Figures, NextTurn, ObjectName

_Answer = TypeVar("_Answer")
_Found = TypeVar("_Found")


class About(NamedTuple):
    """Metadata of an object, for the tier's eviction policy."""

    parent: ObjectName | None = None
    """The preceding object of the prefix, same group and rank. None at the start and for groups without history."""
    depth: int = 0
    group: int = 0
    conversation: str | None = None

    def held(self, name: ObjectName) -> Held:
        """The policy's event: `name` entered a tier or was used there."""
        return Held(name, self.parent, self.conversation)


UNKNOWN = About()


def never_pinned(_name: bytes) -> bool:
    """Lower tiers pin nothing: a reader with an open file keeps its bytes after eviction."""
    return False


class Read(NamedTuple):
    """One object of a batched read."""

    name: ObjectName
    into: memoryview
    offset: int = 0
    """Bytes of the frame before the first one that is read."""


class Write(NamedTuple):
    """One object of a batched write."""

    name: ObjectName
    frame: memoryview
    about: About = UNKNOWN


class Tier(ABC):
    """Stores frames by object name. Methods block and are thread-safe.

    A batch is the interface. Its results are in the order of its objects. An object that fails has its error in its
    place and does not affect the others; a call raises only errors that concern the whole batch. `read` and `write` are
    batches of one object. A kind whose storage has no batches inherits from `OneByOneTier`.

    A buffer belongs to a call until everything that the call began has ended. kvtier reuses it when no view, slice or
    array of it is left (`tier/loan.py`). A tier whose native code keeps its address waits for that code.

    A tier may forget any object at any time, and answers may be stale. It never knowingly returns bytes that were not
    written whole under that name; the reader verifies every frame. Every method may raise `TierError`; after `close`
    all but `close` do. A write for which there is no room fails with `NoRoomError`, or with an `OSError` or cause of
    ENOSPC or EDQUOT: it is logged once and opens no circuit breaker.

    Args:
        name: the tier's name in metrics and errors.
    """

    takes_batches = True
    """Whether a batch costs less than its objects one by one. Otherwise the mover's threads share the objects."""

    name: str
    refusals: RefusalLog

    def __new__(cls, *given: Any, **named: Any) -> Self:  # noqa: ANN401  # pyright: ignore[reportInconsistentConstructor]
        """Refuse a class that lacks methods, such as one for an older release of kvtier.

        Raises:
            ConfigError: it lacks some. Python's own error would look like one of the storage, which may end by itself.
        """
        if cls.__abstractmethods__:
            raise ConfigError(
                f"tier class {cls.__module__}.{cls.__qualname__} is for another release of kvtier: "
                f"{__name__}.Tier needs {', '.join(sorted(cls.__abstractmethods__))}"
            )
        new: Callable[..., Self] = super().__new__
        return new(cls) if new is object.__new__ else new(cls, *given, **named)

    def __init__(self, name: str) -> None:
        self.name = name
        self.refusals = RefusalLog(name)
        """Logs why the tier refuses writes. The mover logs a tier that does not say why."""

    @abstractmethod
    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """For each name, whether the tier holds it. The answer may be stale. Does not count as a use.

        Sessions call it once a second as a health check, with no names, or with some that were published to routers:
        `TierError` while the storage is gone.
        """

    @abstractmethod
    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer. Counts as a use.

        Returns:
            For each, the bytes read (fewer than the buffer holds at the end of the frame), or None when absent.
        """

    @abstractmethod
    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Store frames of different names, each atomically. An existing object is not replaced.

        Returns:
            For each, whether the tier holds the name now, as before if it did. False when it is not admitted or does
            not fit.
        """

    @abstractmethod
    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists. It must not depend on a read of the object, which may be what fails.

        To replace an object, kvtier deletes it and writes it. A name has one content, so that another writer between
        the two writes the same, and a reader in between has a miss; with a replacement that is conditional on the old
        copy, a writer that comes second would fail, and not every kind of storage has it.
        """

    @abstractmethod
    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) held. Concurrent changes may be missing."""

    def newest(self, most: int, until_s: float) -> Iterable[ObjectName]:
        """At most `most` names, newest first where the kind knows an order at little cost.

        By default what `scan` yields first. It ends at `until_s` of `time.monotonic` with what was found by then.
        """
        return islice(within(until_s, (name for name, _ in self.scan())), most)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """`read_many` that does not count as a use where the kind can avoid it. For heads of frames."""
        return self.read_many(reads)

    @abstractmethod
    def figures(self) -> Figures:
        """The figures now. Called about once a second in a thread of the tier; after `close` it may raise."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def note_use(self, *, is_up: bool) -> None:  # noqa: B027 - most kinds have no use for it
        """The session uses the tier, or it backs off. A kind may record it for people."""

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:  # noqa: B027 - as above
        """A hint for the tier's eviction policy, see `policy.base.Hinted`. Without effect in most kinds."""

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """`read_many` of one object.

        Raises:
            TierError: as for the batch, and the object's own; a negative offset.
        """
        if offset < 0:
            raise TierError(self.name, f"cannot read at offset {offset}: it must not be negative")
        return _only(self.read_many([Read(name, into, offset)]))

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """`write_many` of one object.

        Raises:
            TierError: as for the batch, and the object's own.
        """
        return _only(self.write_many([Write(name, frame, about)]))


class OneByOneTier(Tier):
    """A tier whose storage takes one object at a time. A kind has `read_one` and `write_one` in place of batches."""

    takes_batches = False

    @abstractmethod
    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """One object of `read_many`."""

    @abstractmethod
    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """One object of `write_many`."""

    def read_many(self, reads: Sequence[Read], *, is_use: bool = True) -> list[int | TierError | None]:
        """`read_one` for each of `reads`, or `peek_one`."""
        read_one = self.read_one if is_use else self.peek_one
        answers: list[int | TierError | None] = []
        for each in reads:
            try:
                answers.append(read_one(*each))
            except TierError as error:
                clear_frames(error)  # they refer to the buffers
                answers.append(error.with_traceback(None))  # the frame of this method refers to `answers`
        return answers

    def peek_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """One object of `peek_many`."""
        return self.read_one(name, into, offset)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """`peek_one` for each of `reads`."""
        return OneByOneTier.read_many(self, reads, is_use=False)  # a subclass may have a `read_many` of its own

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """`write_one` for each of `writes`."""
        answers: list[bool | TierError] = []
        for each in writes:
            try:
                answers.append(self.write_one(*each))
            except TierError as error:
                clear_frames(error)  # as in `read_many`
                answers.append(error.with_traceback(None))
        return answers


def within(until_s: float, found: Iterable[_Found]) -> Iterator[_Found]:
    """`found`, until `until_s` of `time.monotonic`."""
    return takewhile(lambda _: time.monotonic() < until_s, found)


def _only(answers: list[_Answer | TierError]) -> _Answer:
    """The only answer, or raise it. An error that its own frames refer to would keep the caller's memory in use."""
    answer = answers.pop()
    try:
        if isinstance(answer, TierError):
            raise answer
        return answer
    finally:
        del answer


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
