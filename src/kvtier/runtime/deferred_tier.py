"""A tier that cannot be opened when the engine starts: the engine goes on, and the tier comes in when it can.

Until then everything that is asked of it fails, as with a tier that broke on the way: the core's circuit breaker leaves
it alone and tries it now and then. One thread per tier opens it, so that a place that hangs holds up nobody else.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, TypeVar

from kvtier.core.circuit_breaker import RETRY_GROWTH, RETRY_SECONDS_MAX
from kvtier.errors import TierError
from kvtier.policy.base import Hinted
from kvtier.tier.base import UNKNOWN, About, AheadTier, Read, Tier, Write
from kvtier.types import NextTurn, ObjectName

LEAVE_S = 1.0
"""How long closing waits for a try that is under way; it may hang."""

NOT_OPEN = "is not open"
"""The detail of what is asked too early. Why it is not open has been said once, in the log."""

logger = logging.getLogger(__name__)

_Tier = TypeVar("_Tier", bound=Tier)


class DeferredTier(Generic[_Tier]):
    """A `Tier` in front of one that is still to be opened; what that tells besides can be had from here, too.

    Args:
        name: of the tier.
        make: opens it; called by one thread until it returns, which is closed here.
        retry_s: seconds between the first two tries; doubles up to a minute.
    """

    def __init__(self, name: str, make: Callable[[], _Tier], retry_s: float) -> None:
        self.name = name
        self._make = make
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._tier: _Tier | None = None
        self._trouble: Exception | None = None
        """Why the last try failed."""
        self._is_awaited = True
        """Whether somebody else will say how it went."""
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvtier open {name}", daemon=True)
        self._thread.start()

    def opened(self, deadline_s: float, *, is_required: bool) -> "_Tier | DeferredTier[_Tier]":
        """The tier itself where the first try ends well within `deadline_s` seconds; otherwise this, said in the log.

        Raises:
            ConfigError: it is set wrong, or whatever else no time can mend.
            TierError: its place fails or hangs, and it `is_required`.
        """
        self._tried.wait(deadline_s)
        with self._lock:
            self._is_awaited = False
            tier = self._tier
            trouble = self._trouble or TierError(self.name, f"did not open within {deadline_s:g} s")
            is_refused = tier is None and (is_required or not isinstance(trouble, TierError))
            if is_refused:
                self._closing.set()  # the thread that opens it closes what it may still open
        if tier is not None:
            return tier
        if is_refused:
            self._thread.join(LEAVE_S)
            raise trouble
        logger.warning("%s; the engine goes on without it, and takes it in when it can be opened", trouble)
        return self

    @property
    def is_open(self) -> bool:
        """Whether it has come in."""
        return self._tier is not None

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """See `Tier`."""
        return self._live().contains(names)

    def read(self, name: ObjectName, into: memoryview, offset: int = 0) -> int | None:
        """See `Tier`."""
        return self._live().read(name, into, offset)

    def write(self, name: ObjectName, frame: memoryview, about: About = UNKNOWN) -> bool:
        """See `Tier`."""
        return self._live().write(name, frame, about)

    def delete(self, name: ObjectName) -> None:
        """See `Tier`."""
        self._live().delete(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """See `Tier`."""
        return self._live().scan()

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """See `Hinted`; what is told too early costs hits only."""
        if isinstance(self._tier, Hinted):
            self._tier.expects(session, next_turn)

    def close(self) -> None:
        """See `Tier`. What a try that hangs opens later is closed at once."""
        with self._lock:
            self._closing.set()
            tier = self._tier
        self._thread.join(LEAVE_S)
        if tier is not None:
            tier.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the tier has
        """What the tier tells of itself beside the interface, such as how full it is."""
        if name.startswith("_") or self._tier is None:
            raise AttributeError(name)
        return getattr(self._tier, name)

    def _live(self) -> _Tier:
        if self._tier is None:
            raise TierError(self.name, NOT_OPEN)
        return self._tier

    def _run(self) -> None:
        wait_s = self._retry_s
        while not self._try():
            if self._closing.wait(wait_s):
                return
            wait_s = min(wait_s * RETRY_GROWTH, RETRY_SECONDS_MAX)

    def _try(self) -> bool:
        """Whether it is open now."""
        tier, trouble = None, None
        try:
            tier = self._make()
        except Exception as error:  # noqa: BLE001 - of the first try it is the caller's to judge, later it may pass
            trouble = error
        with self._lock:
            is_awaited, is_closing, before = self._is_awaited, self._closing.is_set(), self._trouble
            self._tier, self._trouble = tier, trouble
            self._tried.set()
        if tier is None:
            if not is_awaited and str(trouble) != str(before):
                logger.warning("%s", trouble)
            return False
        if is_closing:
            tier.close()
        elif not is_awaited:
            logger.info("tier %s is open now", self.name)
        return True


class DeferredAheadTier(DeferredTier[AheadTier]):
    """The same in front of an `AheadTier`."""

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """See `BatchTier`."""
        return self._live().read_many(reads)

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """See `BatchTier`."""
        return self._live().write_many(writes)

    def reading(self, reads: Sequence[Read]) -> Generator[None, None, list[int | TierError | None]]:
        """See `AheadTier`."""
        return (yield from self._live().reading(reads))
