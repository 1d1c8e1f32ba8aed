"""A tier that may open after the engine has started.

All operations raise `TierError` until it is open, so the core's circuit breaker opens and retries from time to time.
Each tier is opened in its own thread, so that a tier that hangs does not delay the others.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtier.core.tier_state import RETRY_GROWTH, RETRY_SECONDS_MAX
from kvtier.errors import DamagedStoreError, TierError
from kvtier.tier.base import Figures, Read, Tier, Write
from kvtier.types import NextTurn, ObjectName

LEAVE_S = 1.0
"""How long closing waits for an attempt to open the tier, which may hang."""

NOT_OPEN = "is not open"
"""Detail of every error until the tier is open. The log gives the reason."""

logger = logging.getLogger(__name__)


class DeferredTier(Tier):
    """Forwards calls to another tier once that tier is open. `read` and `write` go through this object's batch methods.

    Args:
        name: name of the tier.
        make: opens the tier; one thread calls it until it succeeds.
        retry_s: seconds between the first two attempts; the pause doubles up to a minute.
    """

    def __init__(self, name: str, make: Callable[[], Tier], retry_s: float) -> None:
        super().__init__(name)
        self._make = make
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._tier: Tier | None = None
        self._error: Exception | None = None
        """Error of the last attempt to open the tier."""
        self._is_awaited = True
        """Whether `opened` has yet to log or raise the error."""
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvtier open {name}", daemon=True)
        self._thread.start()

    def opened(self, deadline_s: float, *, is_required: bool, waited_s: float = 0.0, is_final: bool = False) -> Tier:
        """Return the tier itself if it opens within `deadline_s` seconds, of which `waited_s` have passed.

        Otherwise log a warning, or an error if only an operator can repair the store, and return this object. If
        `is_final`, the log says that this process will not use the tier.

        Raises:
            ConfigError: a setting is wrong. Any other error of `make` that is not a `TierError` is also raised.
            TierError: the store is damaged, fails or hangs, and `is_required` is true.
        """
        self._tried.wait(max(0.0, deadline_s - waited_s))
        with self._lock:
            self._is_awaited = False
            tier = self._tier
            error = self._error or TierError(self.name, f"did not open within {deadline_s:g} s")
            is_refused = tier is None and (is_required or not isinstance(error, TierError))
            if is_refused:
                self._closing.set()  # the thread closes a tier that it opens later
        if tier is not None:
            return tier
        if is_refused:
            self._thread.join(LEAVE_S)
            raise insisting(self.name, error) if isinstance(error, TierError) else error
        when = "does not use it until kvtier is restarted" if is_final else "uses it once it can be opened"
        logger.log(_level(error), "%s; kvtier starts without this tier and %s", error, when)
        return self

    @property
    def is_open(self) -> bool:
        """Return whether the tier is open."""
        return self._tier is not None

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the tier holds it."""
        return self._live().contains(names)

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames, each from its offset into its buffer."""
        return self._live().read_many(reads)

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Store frames of different names, each atomically."""
        return self._live().write_many(writes)

    def delete(self, name: ObjectName) -> None:
        """Delete `name`, if it exists."""
        self._live().delete(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Yield the name and the frame bytes of every stored object."""
        return self._live().scan()

    def newest(self, most: int, until_s: float) -> Iterable[ObjectName]:
        """Return at most `most` names, newest first if the kind knows the order cheaply."""
        return self._live().newest(most, until_s)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read like `read_many`, but do not count it as a use if the kind can avoid that."""
        return self._live().peek_many(reads)

    def figures(self) -> Figures:
        """Return the current figures, which are empty until the tier is open."""
        return Figures() if self._tier is None else self._tier.figures()

    def note_use(self, *, is_up: bool) -> None:
        """Record whether the session uses the tier or has backed off from it."""
        if self._tier is not None:
            self._tier.note_use(is_up=is_up)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Pass a hint to the tier's eviction policy (`policy.base.Hinted`).

        The hint is lost until the tier is open, which costs only hits.
        """
        if self._tier is not None:
            self._tier.expects(conversation, next_turn)

    def close(self) -> None:
        """Release all resources. A tier that opens later is closed immediately."""
        with self._lock:
            self._closing.set()
            tier = self._tier
        self._thread.join(LEAVE_S)
        self._make = self._live  # `make` may keep host memory alive
        if tier is not None:
            tier.close()

    def _live(self) -> Tier:
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
        """Try to open the tier. Return whether it is open."""
        tier, error = None, None
        try:
            tier = self._make()
        except Exception as caught:  # noqa: BLE001 - `opened` raises the first; later attempts may succeed
            error = caught
        with self._lock:
            is_awaited, is_closing, before = self._is_awaited, self._closing.is_set(), self._error
            self._tier, self._error = tier, error
            if tier is not None:
                self.refusals, self.takes_batches = tier.refusals, tier.takes_batches
            self._tried.set()
        if tier is None:
            if not is_awaited and str(error) != str(before):
                logger.log(_level(error), "%s; kvtier will try to open it again", error)
            return False
        if is_closing:
            tier.close()
        elif not is_awaited:
            logger.info("tier %s is open now", self.name)
        return True


def insisting(tier: str, error: Exception) -> TierError:
    """Return the error that stops the start if a required tier fails with `error`."""
    kind = DamagedStoreError if isinstance(error, DamagedStoreError) else TierError
    detail = error.detail if isinstance(error, TierError) else error
    return kind(tier, f"{detail}; the start fails because this tier has required = true")


def _level(error: Exception | None) -> int:
    return logging.ERROR if isinstance(error, DamagedStoreError) else logging.WARNING
