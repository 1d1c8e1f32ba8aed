"""Guards around optional features and observers. Their errors cost a record or the feature, but no load or store.

A feature whose records do not depend on earlier ones continues after an error, and only the record is lost. A feature
that an error may leave inconsistent ends until a restart. Either way, each feature logs one line. The core is not
optional: after an error in one of its decisions, the session shuts down or restarts (`LockedCore`).
"""

import errno
import logging
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, NamedTuple, TypeVar, cast

from kvtier.errors import UnusablePathError
from kvtier.runtime.executor import Completion, Work

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 2.0
"""How long closing a session waits for each observer that writes a file."""

PASSING: Final = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""System errors that report a lack of resources, which may soon be available again."""


def ends_by_itself(error: BaseException) -> bool:
    """Return whether the error is a temporary lack of memory, threads or file descriptors, rather than a defect."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    return isinstance(error, MemoryError) or "can't start new thread" in error.args


def unless_unusable(make: Callable[[], T]) -> T | None:
    """Return the result of `make` for an optional feature. Log an ERROR and return None if its path is unusable."""
    try:
        return make()
    except (UnusablePathError, OSError) as error:
        logger.error("%s; kvtier starts without this feature", error)  # noqa: TRY400 - no defect, so no traceback
        return None


class LogLine(NamedTuple):
    """A log line. It is written once the session's lock is free, because logging may block."""

    level: int
    text: str
    values: tuple[Any, ...] = ()
    error: BaseException | None = None


class Feature(StrEnum):
    """The optional features, by their names in the log."""

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
"""Features that end with their first error, because their next output depends on earlier output."""


class Observer:
    """Watches a session or an object store. Only the methods that a subclass overrides are called.

    All methods except `close` are called under the session's lock, from any thread. `Guards` catches their exceptions.
    """

    def submitted(self, command: Work) -> None:
        """Handle a submitted command."""

    def completed(self, completion: Completion) -> None:
        """Handle a completed command."""

    def renewed(self) -> None:
        """Handle a restart with empty host memory (`Cache.renew`)."""

    def each_second(self) -> None:
        """Refresh gauges; called about once a second."""

    def close(self, deadline_s: float) -> None:
        """End within `deadline_s` seconds; called once all commands have ended."""


Watching = TypeVar("Watching", bound=Observer)


class Guards:
    """The guards and the observers of one session. Thread-safe.

    All callers share a feature's guard, so a feature that has failed in one place has failed everywhere.
    """

    def __init__(self) -> None:
        self.lines: deque[LogLine] = deque()
        """Lines that the session will write to the log."""
        self._failed: dict[Feature, object] = {}
        names = ("submitted", "completed", "renewed", "each_second", "close")
        self.watching: dict[str, list[tuple[Feature, Observer]]] = {name: [] for name in names}
        """The observers that override each method, except those ended by an error."""

    def register(self, feature: Feature, observer: Observer) -> None:
        """Let `observer` watch the session as part of `feature`."""
        for name, watching in self.watching.items():
            if getattr(type(observer), name) is not getattr(Observer, name):
                watching.append((feature, observer))

    def tell(self, what: str, *values: object) -> None:
        """Call the method `what` of each observer that overrides it. This call catches their exceptions."""
        for feature, observer in self.watching[what]:
            self.run(feature, getattr(observer, what), *values, otherwise=None)

    def close(self, deadline_s: float) -> None:
        """Close the observers within `deadline_s` seconds."""
        until_s = time.monotonic() + deadline_s
        for feature, observer in self.watching["close"]:
            self.run(feature, observer.close, min(max(0.0, until_s - time.monotonic()), CLOSE_S), otherwise=None)

    def has_ended(self, feature: Feature) -> bool:
        """Return whether an error has ended the feature until a restart."""
        return feature in ENDING and feature in self._failed

    def run(self, feature: Feature, act: Callable[..., T], *arguments: object, otherwise: T) -> T:
        """Return the result of `act`, or `otherwise` if it raises or the feature has ended."""
        if self._failed and self.has_ended(feature):
            return otherwise
        try:
            return act(*arguments)
        except Exception as error:  # noqa: BLE001 - no error may reach the session or the engine
            self.failed(feature, error)
            return otherwise

    def failed(self, feature: Feature, error: Exception) -> None:
        """Record an error of a feature. Code that runs too often to go through `run` calls this itself.

        The observers of a feature that ends are removed.
        """
        mine = object()
        if self._failed.setdefault(feature, mine) is mine:  # only one of racing threads logs
            text = "internal error in %s: %s (logged once); loads and stores go on"
            what = "kvtier goes on without it until a restart" if feature in ENDING else "one record is skipped"
            self.lines.append(LogLine(logging.ERROR, text, (feature.value, what), error))
        if feature in ENDING:
            for name, watching in self.watching.items():
                self.watching[name] = [it for it in watching if it[0] is not feature]

    def opened(self, feature: Feature, make: Callable[[], Watching]) -> Watching | None:
        """Register the result of `make` and return it guarded. Log an ERROR and return None if its path is unusable."""
        made = unless_unusable(make)
        if made is None:
            return None
        self.register(feature, made)
        return self.around(feature, made)

    def around(self, feature: Feature, part: T, **otherwise: object) -> T:
        """Wrap `part` so that its methods and properties do not raise.

        Args:
            feature: the feature to which the part belongs.
            part: any object.
            otherwise: what each method or property returns after an error, by name; None for all others.
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

        self.__dict__[name] = call  # later look-ups find it directly
        return call
