"""Chooses how many tokens of a request to load and how many to compute, and bounds the cost of wrong estimates.

The core estimates how long loads take (`Lookup.options`), and `prefill_estimator` how long computing takes. The plan is
the option with the smallest sum. Estimates of links may be wrong, so these rules bound the loss:

- A load is cut when it no longer pays (`load_budget`). Time in which the engine computes for other requests is free. A
  load may lose `SLACK` of the time that computing the whole prompt takes.
- With that rule alone, a link with a latency before its first byte could never be used. So while the loss budget is
  positive, a load may also lose `RISK_FACTOR` times its expected loss at its worst moment. The loss budget gains
  `COMPUTED_SHARE` of the time spent computing and `SAVED_SHARE` of the time that loads saved. Losses reduce it. A wait
  behind other loads does not reduce it, up to the time that those loads save. So the total loss is bounded by the
  initial loss budget, its gains, and the allowances of the loads that were open when it ran out. A load over a known
  link gets no extra time for the wait: its option includes the wait, and a stalled link must not stall the engine.
- A link that made a load lose time goes into back-off. The back-off doubles with each further failure, from a second
  to half a minute.
- A link that is estimated to be slower than computing is tried when it is not in back-off. A trial may cost `SLACK`,
  if the trial budget covers that. The trial budget gains `TRIAL_SHARE` of the time spent loading and computing, and
  pays for the time that trials take beyond the best other plan. So trials cost no more than that share and one overrun,
  whatever links do. (Conservative bandits, Wu et al., ICML 2016: explore within a share of what the known choice
  gives.) Back-off alone sets no such bound. If requests are rare, each may be a trial, and `SLACK` of computing
  everything is a lot for a prompt of which little is computed. A first trial loads one chunk more than the best plan.
  Each further one is twice as long as the last if all of that one arrived, and otherwise half as long. Reads that a cut
  load has begun still occupy the link and slots.

Prompts that arrive together share the engine. While it computes one prompt, others whose loads have ended wait. A plan
includes the longest of these waits, up to the time that open loads save. So no request finishes later than without any
loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, sqrt

from kvtier.core.load_budget import LoadBudget
from kvtier.core.prefill_estimator import Piece, PrefillEstimator
from kvtier.types import LoadDone, LoadOption, Lookup

__all__ = ["LoadPlan", "Piece", "Planner"]

SLACK = 0.03
COMPUTED_SHARE = 0.02
"""Share of computing time that may be lost in addition. With `SLACK` it gives the documented bound of 5 %."""
SLACK_S_MIN = 0.005
"""Smallest allowance of a load. Smaller losses do not matter, and threads wake up late."""
LOSS_BUDGET_START_S = 1.0
LOSS_BUDGET_MAX_S = 10.0
SAVED_SHARE = 0.1
"""Share of saved time that may be lost again."""
TRIAL_SHARE = 0.01
"""Share of loading and computing time that trials may lose."""
TRIAL_CHUNKS_MAX = 1 << 20
RISK_FACTOR = 2.0
"""A load may lose this many times its expected loss, if it may save as much."""
RISK_FACTOR_MIN = 1.25
"""A load may lose this many times its expected loss in any case, so that a load about to finish is not cut."""
FIRST_LOAD_S_MIN = 0.15
FIRST_LOAD_S_MAX = 0.4
"""Bounds on the loss of the first load over an unknown link. Between them, the limit is `COMPUTED_SHARE` of computing
the prompt. Many links have a latency of tens of milliseconds, and few exceed the upper bound. A throttled control group
stops for 0.1 s (Linux's `throtl_slice`).
"""
OVERHEAD_HALF_S = 10.0
"""Computing time after which the measured overhead of loads has decayed by half. Without decay, one slow moment would
stop all loads, and its end would never be noticed.
"""
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0
BACKOFF_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The plan for one prompt."""

    total_tokens: int
    resident_tokens: int
    tokens: int
    """Boundary up to which to load. If it equals the resident tokens, nothing is loaded."""
    recompute_s: float
    """Expected time without any load."""
    compute_s: float = 0.0
    """Expected time of computing the remaining tokens."""
    load_s: float = 0.0
    """Expected time of the load, excluding time in which the engine is busy with other requests."""
    budget: LoadBudget | None = None
    """Budget of the load. Without one, the load runs to its end."""
    is_trial: bool = False
    """Whether the load tries a slow link and is not expected to pay."""
    source: str = ""
    """The slowest source (host memory or a tier) that the load requires."""
    risk_s: float = 0.0
    """Expected loss of the load at its worst moment."""
    ahead_s: float = 0.0
    """Seconds for which the engine computes for other requests before this one."""
    best_s: float = 0.0
    """For a trial, the time of loading and computing with the best other plan."""
    saved_by_loads_s: float = 0.0
    """Time that open loads save. Waiting that much longer makes the request no later than without any loads."""
    number: int = field(default=0, compare=False)
    """The planner's own number for the plan."""

    @property
    def saved_s(self) -> float:
        """Expected gain in seconds. For a trial, it assumes that the load arrives in time."""
        return self.recompute_s - self.compute_s - self.load_s


@dataclass(slots=True)
class _Backoff:
    """The back-off of a source, during which most loads avoid it."""

    until_s: float = 0.0
    seconds: float = BACKOFF_S_MIN
    lost_s: float = 0.0
    """Largest loss of a load from the source since the last trial. During the back-off, only loads that can afford to
    lose more may use the source.
    """
    trial_chunks: int = 1
    """Length of the next trial: twice the length of the last one if all of it arrived, otherwise half."""


NO_BACKOFF = _Backoff()


class Planner:
    """Plans the loads of one engine. It has no clock, thread or lock, and one owner.

    Args:
        step_tokens: maximum number of tokens that the engine computes in one step; 0 means no limit.
        is_on: whether to plan. If False, every load takes all that is available and runs to its end.
    """

    def __init__(self, *, step_tokens: int = 0, is_on: bool = True) -> None:
        self._step_tokens = step_tokens
        self._is_on = is_on
        self._prefill = PrefillEstimator()
        self._loss_budget_s = LOSS_BUDGET_START_S
        self._trial_budget_s = 0.0
        self._overhead_s = 0.0
        self._numbers = count(1)
        self._open: dict[int, float] = {}
        """Expected time at which the prompt of each open load is ready, by the plan's number."""
        self._saved_by_loads_s = 0.0
        """Computing time that open loads are expected to save."""
        self._backoffs: dict[str, _Backoff] = {}
        self._counts = {"loads": 0, "loads_cut": 0, "trials": 0}
        self._saved_s = 0.0

    # ---- computing time ---------------------------------------------------------------------------------------------

    def prefilled(self, pieces: Sequence[Piece], seconds: float) -> None:
        """Record that a step of the engine computed `pieces` in `seconds`."""
        self._prefill.add(pieces, seconds)
        self._add_to_loss_budget(COMPUTED_SHARE * seconds)
        self._add_to_trial_budget(seconds)
        self._overhead_s *= 0.5 ** (seconds / OVERHEAD_HALF_S)

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """Return the expected time of computing `tokens` after `context_tokens`."""
        if tokens <= 0:
            return 0.0
        costs = self._prefill.costs
        steps = -(-tokens // self._step_tokens) if self._step_tokens else 1
        pairs = Piece(tokens, context_tokens).pairs
        return steps * costs.per_step_s + tokens * costs.per_token_s + pairs * costs.per_pair_s

    def waits_for_s(self, tokens: int, context_tokens: int) -> float | None:
        """Return the `compute_s` to pass to `Cache.lookup`; None if there is nothing to compute or planning is off."""
        return (self.seconds(tokens, context_tokens) or None) if self._is_on else None

    @property
    def seconds_per_token(self) -> float:
        """Expected time of computing one more token, without its attention to earlier tokens."""
        costs = self._prefill.costs
        return costs.per_token_s + (costs.per_step_s / self._step_tokens if self._step_tokens else 0.0)

    # ---- plans -----------------------------------------------------------------------------------------------------

    def plan(
        self,
        lookup: Lookup,
        total_tokens: int,
        *,
        resident_tokens: int = 0,
        ahead_s: float = 0.0,
        beside_s: float = inf,
        now_s: float,
    ) -> LoadPlan:
        """Make a plan for a prompt, without side effects.

        Args:
            lookup: the possible loads and their expected times.
            total_tokens: tokens of the prompt.
            resident_tokens: leading tokens that the engine holds.
            ahead_s: seconds for which the engine computes for other requests before this one.
            beside_s: time until the engine can compute another prompt concurrently with this one; by default never.
            now_s: the time.
        """
        recompute_s = self.seconds(total_tokens - resident_tokens, resident_tokens)
        nothing = LoadPlan(
            total_tokens,
            resident_tokens,
            resident_tokens,
            recompute_s,
            recompute_s,
            ahead_s=ahead_s,
            saved_by_loads_s=self._saved_by_loads_s,
            number=next(self._numbers),
        )
        options = [option for option in lookup.options if resident_tokens < option.tokens <= total_tokens]
        if not options:
            return nothing
        if not self._is_on:
            return self._loading(nothing, options[-1])
        candidates = [self._with_budget(self._loading(nothing, option), option) for option in options]
        acceptable = [nothing, *(plan for plan in candidates if self._is_acceptable(plan, now_s))]
        best = max(acceptable, key=lambda plan: plan.saved_s - self._delay_of_next_s(plan, now_s, beside_s))
        return self._trial(candidates, options, best, now_s) or best

    def offers(self, lookup: Lookup, plan: LoadPlan) -> list[tuple[int, float]]:
        """Return the loads from which `plan` was chosen, for reports. This has no side effects.

        Each is (leading tokens, expected seconds including computing the rest).
        """
        options = (it for it in lookup.options if plan.resident_tokens < it.tokens <= plan.total_tokens)
        loads = (self._loading(plan, option) for option in options)
        return [(load.tokens, load.load_s + load.compute_s) for load in loads]

    def begun(self, plan: LoadPlan, now_s: float) -> None:
        """Record that the load of `plan` starts. `ended` or `dropped` must follow."""
        self._counts["loads"] += 1
        self._open[plan.number] = now_s + plan.ahead_s + plan.load_s
        self._saved_by_loads_s += plan.recompute_s - plan.compute_s
        self._counts["trials"] += plan.is_trial
        if plan.is_trial:
            backoff = self._backoffs.setdefault(plan.source, _Backoff())
            backoff.until_s, backoff.lost_s = now_s + backoff.seconds, 0.0

    def ended(self, plan: LoadPlan, done: LoadDone, seconds: float, now_s: float) -> None:
        """Record that the load of `plan` took `seconds` and ended with `done`."""
        self.dropped(plan)
        if plan.budget is None:
            return
        regret_s = plan.budget.regret_s(seconds, plan.budget.saved_s(plan.resident_tokens, done.tokens))
        lost_s = max(0.0, regret_s - plan.saved_by_loads_s - _slack_s(plan))
        self._add_to_loss_budget(SAVED_SHARE * max(0.0, -regret_s) - lost_s)
        self._saved_s -= regret_s
        self._counts["loads_cut"] += done.was_cut
        if plan.is_trial:
            self._tried(plan, done, seconds)
        else:
            self._add_to_trial_budget(max(0.0, seconds - plan.ahead_s))
        if done.was_cut or lost_s:
            self._failed(plan, regret_s, now_s)
        elif done.tokens >= plan.tokens and not plan.is_trial:
            self._backoffs.pop(plan.source, None)

    def dropped(self, plan: LoadPlan) -> None:
        """Record that the load of `plan` was abandoned. Nothing is learned from it."""
        self._open.pop(plan.number, None)
        self._saved_by_loads_s = self._saved_by_loads_s - plan.recompute_s + plan.compute_s if self._open else 0.0

    def record_overhead(self, seconds: float) -> None:
        """Record the time from a load's end to the request's next step, excluding time in which the engine computed."""
        seconds = max(0.0, seconds)
        self._overhead_s = sqrt(self._overhead_s * seconds) if self._overhead_s else seconds

    def snapshot(self) -> dict[str, float]:
        """Return statistics for reports."""
        costs = self._prefill.costs
        return {
            **{f"{name}_s": value for name, value in zip(("per_step", "per_token", "per_pair"), costs, strict=True)},
            **self._counts,
            "overhead_s": self._overhead_s,
            "loss_budget_s": self._loss_budget_s,
            "trial_budget_s": self._trial_budget_s,
            "saved_s": self._saved_s,
        }

    # ---- how a plan is made ----------------------------------------------------------------------------------------

    def _loading(self, nothing: LoadPlan, option: LoadOption) -> LoadPlan:
        compute_s = self.seconds(nothing.total_tokens - option.tokens, option.tokens)
        load_s = max(0.0, option.seconds - nothing.ahead_s) + self._overhead_s
        return replace(nothing, tokens=option.tokens, compute_s=compute_s, load_s=load_s, source=option.source)

    def _with_budget(self, plan: LoadPlan, option: LoadOption) -> LoadPlan:
        """Return `plan` with a budget, which covers its risk if the loss budget allows that."""
        risk_s = self._risk_s(plan.resident_tokens, option)
        needed_s = min(RISK_FACTOR * risk_s, max(RISK_FACTOR_MIN * risk_s, plan.saved_s))
        if not option.is_known:
            unknown_s = min(max(FIRST_LOAD_S_MIN, COMPUTED_SHARE * plan.recompute_s), FIRST_LOAD_S_MAX)
            needed_s = max(needed_s, unknown_s, self._saved_by_loads_s)
        granted_s = needed_s if self._loss_budget_s > 0 else min(needed_s, self._saved_by_loads_s)
        return replace(plan, risk_s=risk_s, budget=self._budget(_slack_s(plan) + granted_s, plan.ahead_s))

    def _risk_s(self, start: int, option: LoadOption) -> float:
        """Return the expected loss at the worst moment.

        This is after the wait, or after the last token that is cheaper to compute than to load.
        """
        pace_s = (option.seconds - option.wait_s) / (option.tokens - start)
        cheap_s, per_pair_s = self.seconds_per_token, self._prefill.costs.per_pair_s
        if pace_s <= cheap_s + per_pair_s * start:
            return option.wait_s
        even = (pace_s - cheap_s) / per_pair_s if per_pair_s else float(option.tokens)
        worst = min(option.tokens, int(even))
        return option.wait_s + pace_s * (worst - start) - self._budget(0.0).saved_s(start, worst)

    def _budget(self, allowance_s: float, ahead_s: float = 0.0) -> LoadBudget:
        return LoadBudget(allowance_s, self.seconds_per_token, self._prefill.costs.per_pair_s, ahead_s)

    def _is_acceptable(self, plan: LoadPlan, now_s: float) -> bool:
        """Return whether the load pays, its source is not in back-off, and its budget covers its expected loss."""
        backoff = self._backoffs.get(plan.source)
        is_backed_off = backoff is not None and now_s < backoff.until_s and _slack_s(plan) <= backoff.lost_s
        return not is_backed_off and plan.budget is not None and plan.risk_s <= plan.budget.cut_s(0.0, 0.0)

    def _delay_of_next_s(self, plan: LoadPlan, now_s: float, beside_s: float) -> float:
        """Return how long the next prompt waits while this one is computed, up to the time that open loads save."""
        begin_s = now_s + plan.ahead_s + plan.load_s
        ready_s = min((ready_s for ready_s in self._open.values() if ready_s > begin_s), default=inf)
        again_s = min(begin_s + plan.compute_s, now_s + beside_s)
        return min(max(0.0, again_s - ready_s), self._saved_by_loads_s)

    def _trial(
        self, plans: Sequence[LoadPlan], options: Sequence[LoadOption], best: LoadPlan, now_s: float
    ) -> LoadPlan | None:
        """Return a trial of the fastest source past `best`, if no load is open and the trial budget covers its loss.

        Neither a source in back-off nor a slower one is tried, because loads from slower ones may also use it.
        """
        slack_s = _slack_s(best)
        if self._open or slack_s > self._trial_budget_s:
            return None
        for plan, option in zip(plans, options, strict=True):
            if plan.tokens <= best.tokens:
                continue
            backoff = self._backoffs.get(plan.source, NO_BACKOFF)
            if now_s < backoff.until_s:
                return None
            # However fast the source is, the faster sources before it also take time.
            gain_s = best.load_s + best.compute_s - plan.compute_s - max(best.load_s, self._overhead_s)
            if gain_s > slack_s:
                tokens = plan.tokens
                if option.chunk_tokens:
                    ends = (one.tokens for one in plans if one.tokens < tokens)
                    chunks = max(ends, default=best.resident_tokens) // option.chunk_tokens + backoff.trial_chunks
                    tokens = min(tokens, chunks * option.chunk_tokens)
                return replace(
                    plan,
                    tokens=tokens,
                    compute_s=self.seconds(plan.total_tokens - tokens, tokens),
                    load_s=min(plan.load_s, best.load_s + slack_s),
                    is_trial=True,
                    budget=self._budget(slack_s, plan.ahead_s),
                    best_s=best.load_s + best.compute_s,
                )
        return None

    def _tried(self, plan: LoadPlan, done: LoadDone, seconds: float) -> None:
        """Record that the trial `plan` took `seconds` and ended with `done`."""
        loaded_s = max(0.0, seconds - plan.ahead_s)
        lost_s = loaded_s + self.seconds(plan.total_tokens - done.tokens, done.tokens) - plan.best_s
        self._trial_budget_s -= max(0.0, lost_s)
        backoff = self._backoffs.setdefault(plan.source, _Backoff())  # another load may have ended it
        if done.tokens < plan.tokens:
            backoff.trial_chunks = max(1, backoff.trial_chunks // 2)
        else:
            backoff.trial_chunks = min(2 * backoff.trial_chunks, TRIAL_CHUNKS_MAX)
            if lost_s <= 0:
                backoff.until_s, backoff.seconds = 0.0, BACKOFF_S_MIN

    def _failed(self, plan: LoadPlan, regret_s: float, now_s: float) -> None:
        backoff = self._backoffs.get(plan.source)
        if backoff is None:
            backoff = self._backoffs[plan.source] = _Backoff()
        elif plan.is_trial or now_s >= backoff.until_s:
            backoff.seconds = min(BACKOFF_GROWTH * backoff.seconds, BACKOFF_S_MAX)
        backoff.until_s = max(backoff.until_s, now_s + backoff.seconds)
        if not plan.is_trial:
            backoff.lost_s = max(backoff.lost_s, regret_s)

    def _add_to_loss_budget(self, seconds: float) -> None:
        self._loss_budget_s = min(self._loss_budget_s + seconds, LOSS_BUDGET_MAX_S)

    def _add_to_trial_budget(self, seconds: float) -> None:
        self._trial_budget_s = min(self._trial_budget_s + TRIAL_SHARE * seconds, LOSS_BUDGET_MAX_S)


def _slack_s(plan: LoadPlan) -> float:
    return max(SLACK_S_MIN, SLACK * plan.recompute_s)
