"""Guards before what is optional: an error there costs a record, or that feature, and no load or store.

What can be repeated without its past goes on after an error, and only the record is lost. What an error leaves half
changed ends until a restart. Either way there is one line in the log for each feature. The core is not optional: after
an error in a decision of it the session shuts, or begins anew (`LockedCore`).
"""

import errno
import logging
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar, cast

from kvtier.errors import UnusablePathError

logger = logging.getLogger(__name__)

T = TypeVar("T")


PASSING: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Errors of the system for want of something that a moment later may be there."""


def ends_by_itself(error: BaseException) -> bool:
    """Whether the error is a moment without memory, threads or file descriptors, rather than a defect."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    return isinstance(error, MemoryError) or "can't start new thread" in error.args


def unless_unusable(make: Callable[[], T]) -> T | None:
    """What `make` opens for an optional feature; None, with an ERROR in the log, if its path cannot be used."""
    try:
        return make()
    except (UnusablePathError, OSError) as error:
        logger.error("%s; kvtier starts without it", error)  # noqa: TRY400 - no defect, so no traceback
        return None


class LogLine(NamedTuple):
    """A line for the log, written once the session's lock is free, because a log may block."""

    level: int
    text: str
    values: tuple[Any, ...] = ()
    error: BaseException | None = None


class Feature(StrEnum):
    """The optional features, as the log names them."""

    EVENTS = "KV events"
    RECALL = "the recall of chunks"
    JOURNAL = "the journal"
    RECORDER = "the recording of requests"
    HISTORY = "the history of requests"
    HINTS = "hints"
    METRICS = "metrics"
    EXPORT = "the export of metrics"
    HEALTH = "the record of faults"
    IDLE_STEPS = "steps of an idle engine"


ENDING: Final = frozenset({Feature.EVENTS, Feature.RECALL, Feature.EXPORT})
"""Features that end with their first error: what they say next depends on what they have said."""


class Guards:
    """The guards of one session. Any thread.

    A feature that has failed in one place has failed in all: its guard is the same for every caller.
    """

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque()
        """For the log. The session writes them."""
        self._failed: dict[Feature, object] = {}

    def has_ended(self, feature: Feature) -> bool:
        """Whether an error has ended the feature until a restart."""
        return feature in ENDING and feature in self._failed

    def run(self, feature: Feature, act: Callable[..., T], *arguments: object, otherwise: T) -> T:
        """The result of `act`; `otherwise` if it raises, or if the feature has ended."""
        if self._failed and self.has_ended(feature):
            return otherwise
        try:
            return act(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not reach the session or the engine
            self.failed(feature, error)
            return otherwise

    def failed(self, feature: Feature, error: Exception) -> None:
        """Note an error of a feature, for code that runs too often for `run`."""
        mine = object()
        if self._failed.setdefault(feature, mine) is mine:  # of racing threads one logs
            text = "internal error in %s: %s (logged once); loads and stores go on"
            what = "kvtier goes on without until a restart" if feature in ENDING else "one record is skipped"
            self.lines.append(LogLine(logging.ERROR, text, (feature.value, what), error))

    def opened(self, feature: Feature, make: Callable[[], T]) -> T | None:
        """What `make` opens, guarded; None, with an ERROR in the log, if what is at its path cannot be used."""
        made = unless_unusable(make)
        return None if made is None else self.around(feature, made)

    def around(self, feature: Feature, part: T, **otherwise: object) -> T:
        """`part`, whose methods and properties do not raise.

        Args:
            feature: that the part belongs to.
            part: any object.
            otherwise: what a method or property gives after an error, by name; of others None.
        """
        return cast("T", _Guarded(self, feature, part, otherwise))


class _Guarded:
    def __init__(self, guards: Guards, feature: Feature, part: object, otherwise: dict[str, object]) -> None:
        self._guards, self._feature, self._part, self._otherwise = guards, feature, part, otherwise

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any object
        run, feature, part, otherwise = self._guards.run, self._feature, self._part, self._otherwise.get(name)
        if not callable(getattr(type(part), name, None)):
            return run(feature, getattr, part, name, otherwise=otherwise)

        def call(*arguments: object, **named: object) -> object:
            return run(feature, lambda: getattr(part, name)(*arguments, **named), otherwise=otherwise)

        self.__dict__[name] = call  # found at once the next time
        return call
