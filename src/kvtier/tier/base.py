"""The interface of a tier below host memory."""

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from kvtier.errors import ConfigError, TierError
from kvtier.policy.base import Use
from kvtier.tier.refusal_log import RefusalLog
from kvtier.types import Figures, NextTurn, ObjectName

_Answer = TypeVar("_Answer")
_Found = TypeVar("_Found")


class About(NamedTuple):
    """Metadata of an object, for the tier's eviction policy."""

    parent: ObjectName | None = None
    """The preceding object of the prefix, in the same group and rank. None at the start and in groups without
    history."""
    depth: int = 0
    group: int = 0
    conversation: str | None = None

    def use(self, name: ObjectName) -> Use:
        """Return the use of `name` that a tier reports to its policy."""
        return Use(name, self.parent, self.conversation)


UNKNOWN = About()


def never_pinned(_name: bytes) -> bool:
    """Return False: lower tiers pin nothing, because a reader with an open file keeps its bytes after eviction."""
    return False


class Read(NamedTuple):
    """One object of a batched read."""

    name: ObjectName
    into: memoryview
    offset: int = 0
    """Position in the frame where the read starts."""


class Write(NamedTuple):
    """One object of a batched write."""

    name: ObjectName
    frame: memoryview
    about: About = UNKNOWN


class Tier(ABC):
    """Keeps frames under object names. Methods block and are thread-safe.

    The interface takes batches. Results are in the order of the objects. The result of an object that fails is its
    error, and the other objects are not affected. A call raises only errors that concern the whole batch. `read` and
    `write` are batches of one object. A kind whose storage has no batches inherits from `OneByOneTier`.

    A buffer belongs to a call until everything that the call started has ended. kvtier reuses it when no view, slice or
    array of it remains (`tier/buffer_loans.py`). A tier whose native code keeps the address must wait for that
    code.

    A tier may forget any object at any time, and answers may be stale. It never knowingly returns bytes that were not
    written whole under that name; the reader verifies every frame. Every method may raise `TierError`; after `close`,
    all methods but `close` do. A write without room fails with `NoRoomError`, or with an `OSError` of ENOSPC or EDQUOT
    as the error or its cause. Such a failure is logged once and opens no circuit breaker.

    Args:
        name: the tier's name in metrics and errors.
    """

    takes_batches = True
    """Whether a batch costs less than its objects one by one. If not, the mover divides batches among its threads."""

    name: str
    refusals: RefusalLog

    def __new__(cls, *given: Any, **named: Any) -> Self:  # noqa: ANN401  # pyright: ignore[reportInconsistentConstructor]
        """Refuse a class that lacks methods, such as one written for an older release of kvtier.

        Raises:
            ConfigError: methods are missing. Python's own error would look like a temporary storage error.
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
        """Logs why the tier refuses writes. The mover logs the refusals if the tier gives no reason."""

    @abstractmethod
    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the tier holds it. The answer may be stale. This does not count as a use.

        Sessions call it once a second as a health check, without names or with names that were published to routers. It
        raises `TierError` while the storage is gone.
        """

    @abstractmethod
    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer. This counts as a use.

        Returns:
            For each frame, the number of bytes read, which is less than the buffer's size if the frame ends first; None
            if the tier does not hold the frame.
        """

    @abstractmethod
    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Write frames of different names, each atomically. An existing object is not replaced.

        Returns:
            For each frame, whether the tier now holds the name, even if from an earlier write. False if the frame is
            not admitted or does not fit.
        """

    @abstractmethod
    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists. This must not depend on reading the object, because the read may be what fails.

        To replace an object, kvtier deletes it and then writes it. Another writer may come in between, but a name has
        only one content, so it writes the same bytes. A reader in between has a miss. Writes conditional on the
        old copy are not used: the second writer would fail, and not every storage offers them.
        """

    @abstractmethod
    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Yield the name and the frame's size in bytes of every object. Concurrent changes may be missing."""

    def newest(self, most: int, until_s: float) -> Iterable[ObjectName]:
        """Return at most `most` names, newest first if the kind can tell the order cheaply.

        By default, these are the first names that `scan` yields. The search ends at `until_s` (`time.monotonic`) with
        the names found by then.
        """
        return islice(within(until_s, (name for name, _ in self.scan())), most)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read the starts of frames like `read_many`, without counting this as a use if the kind can avoid it."""
        return self.read_many(reads)

    @abstractmethod
    def figures(self) -> Figures:
        """Return the current figures. A thread calls this about once a second. It may raise after `close`."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. Idempotent."""

    def note_use(self, *, is_up: bool) -> None:  # noqa: B027 - most kinds have no use for it
        """Record whether the session uses the tier or backs off from it. A kind may record it for operators."""

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:  # noqa: B027 - as above
        """Give the tier's eviction policy a hint (`policy.base.Hinted`). Most kinds ignore it."""

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """Read one object with `read_many`.

        Raises:
            TierError: the batch or the object failed, or the offset is negative.
        """
        if offset < 0:
            raise TierError(self.name, f"cannot read at offset {offset}: it must not be negative")
        return _only(self.read_many([Read(name, into, offset)]))

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """Write one object with `write_many`.

        Raises:
            TierError: the batch or the object failed.
        """
        return _only(self.write_many([Write(name, frame, about)]))


class OneByOneTier(Tier):
    """A tier whose storage takes one object at a time. A kind implements `read_one` and `write_one`, not batches."""

    takes_batches = False

    @abstractmethod
    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read one object of `read_many`."""

    @abstractmethod
    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """Write one object of `write_many`."""

    def read_many(self, reads: Sequence[Read], *, is_use: bool = True) -> list[int | TierError | None]:
        """Call `read_one` for each of `reads`, or `peek_one` if it is not a use."""
        read_one = self.read_one if is_use else self.peek_one
        answers: list[int | TierError | None] = []
        for each in reads:
            try:
                answers.append(read_one(*each))
            except TierError as error:
                clear_frames(error)  # its stack frames refer to the buffers
                answers.append(error.with_traceback(None))  # the frame of this method refers to `answers`
        return answers

    def peek_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read one object of `peek_many`."""
        return self.read_one(name, into, offset)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Call `peek_one` for each of `reads`."""
        return OneByOneTier.read_many(self, reads, is_use=False)  # a subclass may override `read_many`

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Call `write_one` for each of `writes`."""
        answers: list[bool | TierError] = []
        for each in writes:
            try:
                answers.append(self.write_one(*each))
            except TierError as error:
                clear_frames(error)  # as in `read_many`
                answers.append(error.with_traceback(None))
        return answers


def within(until_s: float, found: Iterable[_Found]) -> Iterator[_Found]:
    """Yield from `found` until `until_s` (`time.monotonic`)."""
    return takewhile(lambda _: time.monotonic() < until_s, found)


def clear_frames(error: BaseException) -> None:
    """Clear the variables in the tracebacks of `error` and its causes, which would keep buffers in use.

    The causes lose their tracebacks, because a frame refers to its callers, whose variables may be these buffers.
    """
    errors = [error]
    for each in errors:
        traceback.clear_frames(each.__traceback__)
        if each is not error:
            each.__traceback__ = None
        grouped: Sequence[BaseException] = getattr(each, "exceptions", ())  # the members of an exception group
        errors += [it for it in (each.__cause__, each.__context__, *grouped) if it is not None and it not in errors]


def _only(answers: list[_Answer | TierError]) -> _Answer:
    """Return or raise the only answer. An error that its own stack frame refers to would keep memory in use."""
    answer = answers.pop()
    try:
        if isinstance(answer, TierError):
            raise answer
        return answer
    finally:
        del answer


class RawClient(Protocol):
    """The client library or file system below a tier, used directly. `kvtier bench tier` compares the tier with it.

    Methods block, are thread-safe and may raise any error. The names are those of the benchmark's objects.
    """

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        ...

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        ...

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        ...

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
