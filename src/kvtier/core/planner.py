"""Chooses how many tokens of a request to load and how many to compute, and bounds the cost of wrong estimates.

The core estimates what loads take (`Lookup.options`), `prefill` what computing takes. The plan is the option with the
least sum. Estimates of links may be wrong, so three rules bound the loss:

- A load is cut when it no longer pays (`load_budget`). Time in which the engine computes for other requests is free. A
  load may lose `SLACK` of the time that computing the whole prompt takes. So may a trial of a link in back-off.
- With that rule alone, a link with a latency before its first byte could never be used. So while the loss budget is
  positive, a load may lose, in addition, `RISKS` times its expected loss at its worst moment. The loss budget gains
  `COMPUTED_SHARE` of the time spent computing and `SAVED_SHARE` of the time that loads saved. Losses are charged to it.
  A wait behind other loads is not charged, up to the time that those loads save. So all requests together lose at most
  that income, the initial loss budget, and the grants of loads that were open when it ran out, whatever the links do.
  A load over a known link gets no extra time for such a wait: its option includes it, and a stalled link must not stall
  the engine.
- A link that cost a load, or is estimated to be slower than computing, goes into back-off. Then one load tries it,
  within `SLACK`. The back-off doubles with each failed trial, from a second to half a minute, and ends with a success.

Prompts that arrive together share the engine. While it computes one prompt, others wait whose loads have ended. A plan
includes the longest of these waits, up to what open loads save. So no request finishes later than without any loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from kvtier.core.load_budget import LoadBudget
from kvtier.core.prefill import Piece, PrefillEstimator
from kvtier.types import LoadDone, LoadOption, Lookup

__all__ = ["LoadPlan", "Piece", "Planner"]

SLACK = 0.03
COMPUTED_SHARE = 0.02
"""Share of what was computed that may be lost besides; with `SLACK` it is what users are promised: 5 %."""
SLACK_S_MIN = 0.005
"""Below this nobody notices, and threads wake up late."""
LOSS_BUDGET_START_S = 1.0
LOSS_BUDGET_MAX_S = 10.0
SAVED_SHARE = 0.1
"""Share of what was saved that may be lost again."""
RISKS = 2.0
"""A load may lose this many times as much on the way as it was expected to, if it would bring as much."""
LATE = 1.25
"""And so many times in any case: who is cut at the very moment at which it is due pays twice for a little noise."""
UNKNOWN_S_MIN = 0.1
UNKNOWN_S_MAX = 0.4
"""What the first look at a link may cost, once: `COMPUTED_SHARE` of computing the prompt, within these. Many links take
some tens of milliseconds before the first byte, and few more than the most."""
OVERHEAD_HALF_S = 10.0
"""After so long of computing, half of what loads took besides is forgotten: else one bad moment would keep everybody
from loading, and nobody would ever see that it has passed."""
BACKOFF_S_MIN = 1.0
BACKOFF_S_MAX = 30.0
BACKOFF_GROWTH = 2.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to do about one prompt."""

    total_tokens: int
    resident_tokens: int
    tokens: int
    """LoadOperation up to here: a valid boundary past the resident tokens, or these themselves: load nothing."""
    recompute_s: float
    """Expected time without any load."""
    compute_s: float = 0.0
    """Expected time of computing what is left."""
    load_s: float = 0.0
    """Expected time of the load, as far as the engine is not busy with others anyway."""
    budget: LoadBudget | None = None
    """For the load; None: it goes on to the end."""
    is_trial: bool = False
    """It is not expected to pay: a link that is believed slow is tried again."""
    place: str = ""
    """The slowest place that it needs."""
    risk_s: float = 0.0
    """What the load will have lost at its worst moment, if all goes as expected."""
    ahead_s: float = 0.0
    """How long the engine computes for others before it can compute for this one."""
    spared_s: float = 0.0
    """What open loads are to spare. It may wait that much longer without being later than without any loads."""

    @property
    def saved_s(self) -> float:
        """Expected gain; below zero for a trial."""
        return self.recompute_s - self.compute_s - self.load_s


@dataclass(slots=True)
class _Backoff:
    """A place that is left alone for a while."""

    until_s: float = 0.0
    seconds: float = BACKOFF_S_MIN
    lost_s: float = 0.0
    """What a load has lost on it. Who cannot afford that does not load from it; for others, only tries wait."""


class Planner:
    """The plans of one engine. It has no clock, no thread and no lock: one owner calls it.

    Args:
        step_tokens: tokens that the engine computes in one step at most; 0: all at once.
        is_on: False loads whatever there is, to the end.
    """

    def __init__(self, *, step_tokens: int = 0, is_on: bool = True) -> None:
        self._step_tokens = step_tokens
        self._is_on = is_on
        self._prefill = PrefillEstimator()
        self._loss_budget_s = LOSS_BUDGET_START_S
        self._overhead_s = 0.0
        self._open: dict[int, float] = {}
        """Of each load that has begun and not ended, by its plan's `id`: when its prompt is expected to be ready."""
        self._spared_s = 0.0
        """What computing would take that these are to spare."""
        self._backoffs: dict[str, _Backoff] = {}
        self._counts = {"loads": 0, "loads_cut": 0, "trials": 0}
        self._saved_s = 0.0

    # ---- what computing takes --------------------------------------------------------------------------------------

    def prefilled(self, pieces: Sequence[Piece], seconds: float) -> None:
        """A step of the engine that computed `pieces` took `seconds`."""
        self._prefill.add(pieces, seconds)
        self._earn(COMPUTED_SHARE * seconds)
        self._overhead_s *= 0.5 ** (seconds / OVERHEAD_HALF_S)

    def seconds(self, tokens: int, context_tokens: int) -> float:
        """Expected time of computing `tokens` behind `context_tokens`."""
        if tokens <= 0:
            return 0.0
        costs = self._prefill.costs
        steps = -(-tokens // self._step_tokens) if self._step_tokens else 1
        pairs = Piece(tokens, context_tokens).pairs
        return steps * costs.per_step_s + tokens * costs.per_token_s + pairs * costs.per_pair_s

    @property
    def seconds_per_token(self) -> float:
        """Expected time of computing one more token of a prompt, without its attention to those before it."""
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
        """What to do about a prompt. Has no effect.

        Args:
            lookup: what can be loaded, and what that takes.
            total_tokens: of the prompt.
            resident_tokens: those that the engine holds.
            ahead_s: how long the engine will compute for others before it can compute for this one.
            beside_s: how long until the engine can compute another prompt beside this one; never, by default.
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
            spared_s=self._spared_s,
        )
        options = [option for option in lookup.options if resident_tokens < option.tokens <= total_tokens]
        if not options:
            return nothing
        if not self._is_on:
            return self._loading(nothing, options[-1])
        paying = [self._with_budget(self._loading(nothing, option), option) for option in options]
        wise = [nothing, *(plan for plan in paying if self._is_wise(plan, now_s))]
        best = max(wise, key=lambda plan: plan.saved_s - self._holds_up_s(plan, now_s, beside_s))
        longest = paying[-1]
        if longest.tokens > best.tokens and self._is_worth_a_try(longest, best, now_s):
            return replace(longest, is_trial=True, budget=self._budget(_slack_s(longest), ahead_s))
        return best

    def begun(self, plan: LoadPlan, now_s: float) -> None:
        """The load of `plan` begins; `ended` or `dropped` follows."""
        self._counts["loads"] += 1
        self._open[id(plan)] = now_s + plan.ahead_s + plan.load_s
        self._spared_s += plan.recompute_s - plan.compute_s
        self._counts["trials"] += plan.is_trial
        if plan.is_trial:
            rest = self._backoffs.setdefault(plan.place, _Backoff())
            rest.until_s, rest.lost_s = now_s + rest.seconds, 0.0

    def ended(self, plan: LoadPlan, done: LoadDone, seconds: float, now_s: float) -> None:
        """The load of `plan` took `seconds`, and ended as `done` says."""
        self.dropped(plan)
        if plan.budget is None:
            return
        regret_s = plan.budget.regret_s(seconds, plan.budget.saved_s(plan.resident_tokens, done.tokens))
        lost_s = max(0.0, regret_s - plan.spared_s - _slack_s(plan))
        self._earn(SAVED_SHARE * max(0.0, -regret_s) - lost_s)
        self._saved_s -= regret_s
        self._counts["loads_cut"] += done.was_cut
        if done.was_cut or lost_s:
            self._failed(plan, regret_s, now_s)
        elif done.tokens >= plan.tokens:
            self._backoffs.pop(plan.place, None)

    def dropped(self, plan: LoadPlan) -> None:
        """Nobody waits for the load of `plan` any more; nothing is to be learned from it."""
        self._open.pop(id(plan), None)
        self._spared_s = self._spared_s - plan.recompute_s + plan.compute_s if self._open else 0.0

    def waited(self, seconds: float) -> None:
        """What a load took besides: from its end to the step that goes on, as far as nobody computed meanwhile."""
        seconds = max(0.0, seconds)
        self._overhead_s = sqrt(self._overhead_s * seconds) if self._overhead_s else seconds

    def snapshot(self) -> dict[str, float]:
        """Figures to be shown."""
        costs = self._prefill.costs
        return {
            **{f"{name}_s": value for name, value in zip(("per_step", "per_token", "per_pair"), costs, strict=True)},
            **self._counts,
            "overhead_s": self._overhead_s,
            "loss_budget_s": self._loss_budget_s,
            "saved_s": self._saved_s,
        }

    # ---- how a plan is made ----------------------------------------------------------------------------------------

    def _loading(self, nothing: LoadPlan, option: LoadOption) -> LoadPlan:
        compute_s = self.seconds(nothing.total_tokens - option.tokens, option.tokens)
        load_s = max(0.0, option.seconds - nothing.ahead_s) + self._overhead_s
        return replace(nothing, tokens=option.tokens, compute_s=compute_s, load_s=load_s, place=option.place)

    def _with_budget(self, plan: LoadPlan, option: LoadOption) -> LoadPlan:
        """With the budget for its risk, if that can be afforded."""
        risk_s = self._risk_s(plan.resident_tokens, option)
        needed_s = min(RISKS * risk_s, max(LATE * risk_s, plan.saved_s))
        if not option.is_known:
            unknown_s = min(max(UNKNOWN_S_MIN, COMPUTED_SHARE * plan.recompute_s), UNKNOWN_S_MAX)
            needed_s = max(needed_s, unknown_s, self._spared_s)
        lent_s = needed_s if self._loss_budget_s > 0 else min(needed_s, self._spared_s)
        return replace(plan, risk_s=risk_s, budget=self._budget(_slack_s(plan) + lent_s, plan.ahead_s))

    def _risk_s(self, start: int, option: LoadOption) -> float:
        """First nothing comes; then, perhaps, tokens that are cheaper to compute than to load, before the dear ones."""
        pace_s = (option.seconds - option.wait_s) / (option.tokens - start)
        cheap_s, per_pair_s = self.seconds_per_token, self._prefill.costs.per_pair_s
        if pace_s <= cheap_s + per_pair_s * start:
            return option.wait_s
        even = (pace_s - cheap_s) / per_pair_s if per_pair_s else float(option.tokens)
        worst = min(option.tokens, int(even))
        return option.wait_s + pace_s * (worst - start) - self._budget(0.0).saved_s(start, worst)

    def _budget(self, allowance_s: float, ahead_s: float = 0.0) -> LoadBudget:
        return LoadBudget(allowance_s, self.seconds_per_token, self._prefill.costs.per_pair_s, ahead_s)

    def _is_wise(self, plan: LoadPlan, now_s: float) -> bool:
        """Whether the load pays, its place does not rest, and its budget is enough for what is expected."""
        rest = self._backoffs.get(plan.place)
        is_resting = rest is not None and now_s < rest.until_s and _slack_s(plan) <= rest.lost_s
        return not is_resting and plan.budget is not None and plan.risk_s <= plan.budget.cut_s(0.0, 0.0)

    def _holds_up_s(self, plan: LoadPlan, now_s: float, beside_s: float) -> float:
        """How long the next prompt that comes waits while this one is computed, within what open loads spare."""
        begin_s = now_s + plan.ahead_s + plan.load_s
        ready_s = min((ready_s for ready_s in self._open.values() if ready_s > begin_s), default=inf)
        again_s = min(begin_s + plan.compute_s, now_s + beside_s)
        return min(max(0.0, again_s - ready_s), self._spared_s)

    def _is_worth_a_try(self, plan: LoadPlan, best: LoadPlan, now_s: float) -> bool:
        """Whether the place has rested, no load tells how it is, and it would bring more than a try may cost."""
        rest = self._backoffs.get(plan.place)
        has_rested = rest is None or now_s >= rest.until_s
        # However fast the place may be: the faster ones below it are needed, too, and take their time.
        gain_s = best.load_s + best.compute_s - plan.compute_s - max(best.load_s, self._overhead_s)
        return has_rested and not self._open and gain_s > _slack_s(plan)

    def _failed(self, plan: LoadPlan, regret_s: float, now_s: float) -> None:
        rest = self._backoffs.get(plan.place)
        if rest is None:
            rest = self._backoffs[plan.place] = _Backoff()
        elif plan.is_trial or now_s >= rest.until_s:
            rest.seconds = min(BACKOFF_GROWTH * rest.seconds, BACKOFF_S_MAX)
        rest.until_s = max(rest.until_s, now_s + rest.seconds)
        if not plan.is_trial:
            rest.lost_s = max(rest.lost_s, regret_s)

    def _earn(self, seconds: float) -> None:
        self._loss_budget_s = min(self._loss_budget_s + seconds, LOSS_BUDGET_MAX_S)


def _slack_s(plan: LoadPlan) -> float:
    return max(SLACK_S_MIN, SLACK * plan.recompute_s)
