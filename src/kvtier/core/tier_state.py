"""State of the lower tiers in the core: circuit breakers, counts of transfers in flight, remembered answers."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from kvtier.core.core_output import Output
from kvtier.core.host_residency import Item
from kvtier.core.limits import TierRules
from kvtier.types import Direction, TierNotice, Transfer, Way

# Constants for hot paths, as in `transfer_scheduler`.
DEMOTE, PROMOTE = Direction.DEMOTE, Direction.PROMOTE
WAYS: dict[Direction, Way] = {PROMOTE: "read", DEMOTE: "write"}

SUSPECT_MAX = 1 << 16
"""Maximum number of suspect objects (whose copy may be bad) per tier. Beyond that, the oldest are trusted again."""

PAUSE_S_MIN = 5.0
PAUSE_S_MAX = 300.0
"""Pauses before an object is read again: after its first failed read in a tier, and after many in a row."""

ANSWER_WEIGHT = 0.1
"""Weight of the newest answer in `TierState.hit_rate` and `TierState.answer_s`."""

REMEMBERED_MAX = 1 << 16
ABSENT_S = 5.0
"""Seconds for which a remote tier's answer "absent" is remembered. Other nodes may write the object meanwhile."""
PRESENT_S = 60.0
"""Seconds for which the answer "present" is remembered. A wrong answer costs a failed read."""

OPENING_RETRY_S = 0.5
"""Delay between trials of a tier that was never open. Such trials cost nothing, and the tier is used after the first
success.
"""

RETRY_GROWTH = 2.0
RETRY_SECONDS_MAX = 60.0


@dataclass(slots=True)
class CircuitBreaker:
    """Decides whether a tier gets operations of one kind.

    Args:
        failures_max: consecutive failures that open the breaker.
        retry_s: delay before the first trial. It doubles with each failed trial, up to a minute.
    """

    failures_max: int
    retry_s: float
    failures: int = 0
    retry_delay_s: float = 0.0
    retry_at_s: float = 0.0
    is_opening: bool = False
    """Whether no operation has succeeded since `open_now`."""
    trial: int = 0
    """The operation whose result decides whether an open breaker closes; 0 if none is under way."""

    def open_now(self) -> None:
        """Start open: the first operation is a trial, and the delay between trials does not grow until one succeeds."""
        self.retry_delay_s, self.is_opening = OPENING_RETRY_S, True

    def is_up(self) -> bool:
        """Return whether the breaker is closed."""
        return self.retry_delay_s == 0.0

    def allows(self, now_s: float) -> bool:
        """Return whether an operation may start. While the breaker is open, one trial is allowed after each delay."""
        return self.retry_delay_s == 0.0 or (not self.trial and now_s >= self.retry_at_s)

    def attempted(self, operation: int) -> None:
        """Record that an operation started. While the breaker is open, it is the trial."""
        if self.retry_delay_s != 0.0:
            self.trial = operation

    def succeeded(self) -> bool:
        """Record that an operation succeeded. Return whether that closed the breaker."""
        was_open = self.retry_delay_s != 0.0
        self.failures, self.retry_delay_s, self.trial, self.is_opening = 0, 0.0, 0, False
        return was_open

    def retry_now(self, now_s: float) -> None:
        """Allow a trial immediately."""
        self.retry_at_s = min(self.retry_at_s, now_s)

    def inconclusive(self, operation: int) -> None:
        """Record that an operation was cancelled. If it was the trial, allow another one."""
        if operation == self.trial:
            self.trial = 0

    def failed(self, now_s: float, operation: int) -> bool:
        """Record that an operation failed or was late. Return whether that opened the breaker.

        While the breaker is open, only the trial counts. Operations that began earlier show nothing about the present.
        """
        self.failures += 1
        opens = self.retry_delay_s == 0.0 and self.failures >= self.failures_max
        if opens or operation == self.trial:
            if opens:
                self.retry_delay_s = self.retry_s
            elif not self.is_opening:
                self.retry_delay_s = min(self.retry_delay_s * RETRY_GROWTH, RETRY_SECONDS_MAX)
            self.retry_at_s = now_s + self.retry_delay_s
            self.trial = 0
        return opens


@dataclass(slots=True)
class FailedReads:
    """The failed reads of one object in one tier, since the last read that the tier answered."""

    pause_s: float = 0.0
    until_s: float = 0.0
    """Time until which reads of the object are paused; infinite while a read of it is stuck."""
    is_replaced: bool = False
    """Whether a write has replaced the copy. A second write does not end the pause, so that useless writes stop."""


class TierState:
    """One lower tier: its circuit breakers, its limits, and the known state of its objects.

    Args:
        rules: its limits and properties.
        number: its position, 0 for the fastest.
        pool: all tiers, which share the slots for transfers.
        output: receives notices of the breakers' changes.
    """

    def __init__(self, rules: TierRules, number: int, pool: "TierStates", output: Output) -> None:
        self.name = rules.name
        self.rules = rules
        self.number = number
        self.breakers = {direction: CircuitBreaker(rules.failures, rules.retry_s) for direction in WAYS}
        """PROMOTE is for promotions and probes, DEMOTE for demotions: a tier on a full disk can still be read."""
        self.out = {PROMOTE: 0, DEMOTE: 0}
        self.out_bytes = {PROMOTE: 0, DEMOTE: 0}
        self.late = {PROMOTE: 0, DEMOTE: 0}
        """Overdue transfers in flight. Their threads are stuck and count against the limit."""
        self.limit = {PROMOTE: min(rules.loads_in_flight, pool.share), DEMOTE: min(rules.writes_in_flight, pool.share)}
        """Maximum number of transfers in flight. Small objects may exceed it, up to `small_bytes_in_flight`."""
        self.hit_rate = 0.5
        """Moving average of how often a remote tier has a request's first missing chunk."""
        self.answer_s = 0.0
        """Moving average of how long the tier takes to answer probes of requests."""
        self.has_doubts = False
        """Whether any object is suspect or has failed reads. It is an attribute because every promotion reads it."""
        self._suspect: dict[Item, bool] = {}
        """For each suspect object, whether the next write must drop the copy first."""
        self._failed: OrderedDict[Item, FailedReads] = OrderedDict()
        """Objects whose last read failed or was late. Beyond `SUSPECT_MAX` the oldest are forgotten."""
        self._remembered: OrderedDict[Item, tuple[bool, float]] = OrderedDict()
        """Answers of a remote tier, and when they expire."""
        self._pool = pool
        self._output = output

    def has_room(self, direction: Direction, size_bytes: int) -> bool:
        """Return whether one more transfer of `size_bytes` may start."""
        out = self.out[direction]
        if out >= self.limit[direction] and self.out_bytes[direction] + size_bytes > self.rules.small_bytes_in_flight:
            return False
        return out < self._pool.share if self._pool.is_single else self._pool.has_slot(self, direction)

    def limit_for(self, direction: Direction, size_bytes: int) -> int:
        """Return how many transfers may be in flight if each has `size_bytes`."""
        return max(self.limit[direction], min(self._pool.share, self.rules.small_bytes_in_flight // size_bytes))

    def can_read(self, now_s: float) -> bool:
        """Return whether the breaker allows a read, and stuck reads leave room for it."""
        return self.late[PROMOTE] < self.limit[PROMOTE] and self.breakers[PROMOTE].allows(now_s)

    def can_load(self) -> bool:
        """Return whether a load may wait for a read. The trials of a tier that is down are probes, never reads."""
        return self.late[PROMOTE] < self.limit[PROMOTE] and self.breakers[PROMOTE].retry_delay_s == 0.0

    def can_write(self, now_s: float) -> bool:
        """Return whether the breaker allows a write and fewer writes than the maximum are stuck."""
        return self.late[DEMOTE] < self.limit[DEMOTE] and self.breakers[DEMOTE].allows(now_s)

    def mark_suspect(self, items: Iterable[Item]) -> None:
        """Suspect the tier's copies of `items`: a read failed, or an earlier chunk of the prefix was corrupt."""
        for item in items:
            self._suspect[item] = self.has_doubts = True
            self._remembered.pop(item, None)
        while len(self._suspect) > SUSPECT_MAX:
            del self._suspect[next(iter(self._suspect))]

    def is_suspect(self, item: Item) -> bool:
        """Return whether the copy of `item` may be bad."""
        return item in self._suspect

    def was_dropped(self, item: Item) -> None:
        """Record that the copy of `item` was dropped. It stays suspect: an earlier probe may have reported it."""
        if item in self._suspect:
            self._suspect[item] = False

    def clear_suspect(self, item: Item) -> bool:
        """Trust `item` again: its copy was read or will be replaced. Return whether the copy must be dropped first."""
        return bool(self._suspect) and self._suspect.pop(item, False)

    def read_failed(self, item: Item, now_s: float, *, is_stuck: bool) -> None:
        """Suspect the copy of `item` after a failed or late read, and pause its reads for twice as long as last time.

        The breaker does not notice such reads, because reads of other objects succeed in between.
        """
        self.mark_suspect([item])
        failed = self._failed.pop(item, None) or FailedReads()
        failed.pause_s = min(max(PAUSE_S_MIN, RETRY_GROWTH * failed.pause_s), PAUSE_S_MAX)
        failed.until_s = inf if is_stuck else now_s + failed.pause_s
        self._failed[item] = failed
        if len(self._failed) > SUSPECT_MAX:
            self._failed.popitem(last=False)

    def late_read_ended(self, item: Item, now_s: float) -> None:
        """Begin the pause of `item`, because its late read has ended, whatever the result."""
        failed = self._failed.get(item)
        if failed is not None and failed.until_s == inf:
            failed.until_s = now_s + failed.pause_s

    def read_answered(self, item: Item) -> None:
        """Forget the failures of `item`.

        Either the tier answered a read in time, or a read that counted as late was cancelled before it reached the
        tier.
        """
        self._failed.pop(item, None)
        self.has_doubts = bool(self._suspect or self._failed)

    def replaced(self, item: Item) -> None:
        """Record that a write of `item` succeeded. The first such write ends the pause of its reads.

        If the copy became suspect meanwhile, it is still the old one, so the pause goes on.
        """
        failed = self._failed.get(item)
        if failed is not None and not failed.is_replaced and item not in self._suspect:
            failed.until_s, failed.is_replaced = 0.0, True

    def is_left_alone(self, item: Item, now_s: float) -> bool:
        """Return whether reads of `item` from the tier are paused, because earlier ones failed or were late."""
        failed = self._failed.get(item) if self._failed else None
        return failed is not None and now_s < failed.until_s

    def answered(self, items: Sequence[Item], present: Sequence[bool], now_s: float) -> Sequence[bool]:
        """Remember the tier's answers for `items`. Return them, with objects whose reads are paused marked absent."""
        if self.rules.is_remote:
            for item, is_there in zip(items, present, strict=True):
                self.remember(item, now_s, is_present=is_there)
        if not self._failed:
            return present
        return [it and not self.is_left_alone(item, now_s) for item, it in zip(items, present, strict=True)]

    def remember(self, item: Item, now_s: float, *, is_present: bool) -> None:
        """Keep the answer of a remote tier for other requests, for a bounded time. Other tiers are asked again.

        The answer that a suspect object is present is not kept, so that the next store replaces the object.
        """
        if self.rules.is_remote and not (is_present and item in self._suspect):
            self._remembered[item] = (is_present, now_s + (PRESENT_S if is_present else ABSENT_S))
            if len(self._remembered) > REMEMBERED_MAX:
                self._remembered.popitem(last=False)

    def forget(self, items: Iterable[Item]) -> None:
        """Forget the answers for `items`, so that lookups ask again and stores write to the tier."""
        for item in items if self._remembered else ():
            self._remembered.pop(item, None)

    def remembered(self, item: Item, now_s: float) -> bool | None:
        """Return the remembered answer for `item`, or None. An object whose reads are paused counts as absent."""
        if self.is_left_alone(item, now_s):
            return False
        answer = self._remembered.get(item)
        if answer is None:
            return None
        is_present, until_s = answer
        if until_s <= now_s:
            del self._remembered[item]
            return None
        return is_present

    def began(self, transfer: Transfer, size_bytes: int) -> None:
        """Record that a transfer of `size_bytes` starts."""
        direction = transfer.direction
        breaker = self.breakers[direction]
        if breaker.retry_delay_s != 0.0:
            breaker.attempted(transfer.id)
        self.out[direction] += 1
        self.out_bytes[direction] += size_bytes

    def overdue(self, transfer: Transfer, now_s: float) -> None:
        """Record that a transfer is overdue, which counts as a fault."""
        self.late[transfer.direction] += 1
        self.record(transfer.direction, transfer.id, now_s, is_fault=True, is_late=True)

    def ended(self, transfer: Transfer, size_bytes: int, now_s: float, *, is_late: bool, is_fault: bool | None) -> None:
        """Record that a transfer has ended. `is_fault` is None if it was cancelled, which proves nothing.

        A late transfer that ends after its deadline proves nothing more, because its lateness was already recorded.
        """
        direction = transfer.direction
        self.out[direction] -= 1
        self.out_bytes[direction] -= size_bytes
        self.late[direction] -= is_late
        if is_late and now_s >= transfer.deadline_s:
            return
        if is_fault is None:
            self.breakers[direction].inconclusive(transfer.id)
        else:
            self.record(direction, transfer.id, now_s, is_fault=is_fault)

    def record(
        self, direction: Direction, operation: int, now_s: float, *, is_fault: bool, is_late: bool = False
    ) -> None:
        """Record the result of a read (PROMOTE) or write (DEMOTE). If the breaker opens or closes, emit a notice.

        Args:
            direction: PROMOTE or DEMOTE.
            operation: number of the operation.
            now_s: the time.
            is_fault: whether it failed or is late.
            is_late: whether its deadline has passed without a result.
        """
        breaker, way = self.breakers[direction], WAYS[direction]
        if is_fault:
            if breaker.failed(now_s, operation):
                detail = (
                    f"{way}s failed {breaker.failures} times in a row{', the last by timeout' * is_late}; "
                    f"the next attempt is in {breaker.retry_delay_s:g} s"
                )
                self._output.events.append(TierNotice(self.name, way, is_up=False, detail=detail, is_late=is_late))
                self._pool.has_stopped |= direction is PROMOTE
        elif breaker.succeeded():
            self._output.events.append(TierNotice(self.name, way, is_up=True, detail=f"{way}s succeed again"))
            self._remembered.clear()  # the tier may have come back empty
            if direction is PROMOTE:
                self._end_first_pauses()
            for other in self.breakers.values():
                other.retry_now(now_s)  # the other direction may have failed for the same reason

    def _end_first_pauses(self) -> None:
        """End the pauses that follow a first failed read: it may have failed only because the tier was away.

        Longer pauses stay, and so do those of reads that still hang.
        """
        for failed in self._failed.values():
            if failed.pause_s <= PAUSE_S_MIN and failed.until_s != inf:
                failed.until_s = 0.0

    def probed_first(self, *, is_hit: bool) -> None:
        """Record the probe of a request's first missing chunk."""
        self.hit_rate += ANSWER_WEIGHT * (is_hit - self.hit_rate)

    def probe_took(self, took_s: float) -> None:
        """Record that a request's probe was answered, or failed, after `took_s`."""
        self.answer_s += ANSWER_WEIGHT * (took_s - self.answer_s)

    def check(self) -> None:
        """Assert that the limits hold.

        Raises:
            AssertionError: a limit is exceeded, which is a bug in the core.
        """
        for direction, limit in self.limit.items():
            out, out_bytes = self.out[direction], self.out_bytes[direction]
            assert self.late[direction] <= out, f"more {direction.value}s are late than in flight"
            assert out <= limit or out_bytes <= self.rules.small_bytes_in_flight, (
                f"more {direction.value}s in flight than allowed"
            )
            assert out <= self._pool.share, f"{direction.value}s use more than their share of host memory"
            assert bool(out) == bool(out_bytes), f"bytes of {direction.value}s miscounted"


class TierStates:
    """All lower tiers, fastest first.

    Promotions of all tiers share a quarter of the slots, and demotions another quarter. If all tiers hang, half of host
    memory is still usable. A tier may use the whole quarter except for the slots reserved for the others.

    Args:
        tiers: their rules, fastest first.
        slots: slots for promotions of all tiers, and as many for demotions.
        output: receives notices of the breakers' changes.
        down: tiers that are not open yet.
    """

    def __init__(self, tiers: Sequence[TierRules], slots: int, output: Output, down: Collection[str]) -> None:
        count = max(1, len(tiers))
        self._slots = max(count, slots)
        self._reserved = max(1, self._slots // (2 * count))
        self.share = self._slots - self._reserved * (count - 1)
        """Number of slots that one tier may use in each direction."""
        self.is_single = count == 1
        self.has_stopped = False
        """Whether reads of a tier have stopped while operations may still wait for them."""
        self.by_name = {rules.name: TierState(rules, number, self, output) for number, rules in enumerate(tiers)}
        self.all = tuple(self.by_name.values())
        for name in down:
            for breaker in self.by_name[name].breakers.values():
                breaker.open_now()

    def __getitem__(self, name: str) -> TierState:
        return self.by_name[name]

    def __len__(self) -> int:
        return len(self.by_name)

    def has_slot(self, tier_state: TierState, direction: Direction) -> bool:
        """Return whether one more slot for a transfer of this tier leaves the other tiers their reserve."""
        taken = tier_state.out[direction]
        for other in self.all:
            if other is not tier_state:
                taken += max(other.out[direction], self._reserved)
        return taken < self._slots

    def check(self, out: dict[Direction, int]) -> None:
        """Assert that the limits hold. `out` counts transfers in flight by direction.

        Raises:
            AssertionError: a limit is exceeded, which is a bug in the core.
        """
        for direction in (PROMOTE, DEMOTE):
            assert out[direction] == sum([tier_state.out[direction] for tier_state in self.all]), (
                f"{direction.value}s miscounted"
            )
        for tier_state in self.all:
            tier_state.check()
