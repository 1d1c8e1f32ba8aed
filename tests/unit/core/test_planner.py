"""Load or compute: what is chosen, how patient a load is, when a source is left alone, and what is learned."""

from dataclasses import replace

import pytest

from kvtier.core.load_budget import LoadBudget
from kvtier.core.planner import (
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    LOSS_BUDGET_START_S,
    RISK_FACTOR,
    RISK_FACTOR_MIN,
    SLACK,
    SLACK_S_MIN,
    TRIAL_SHARE,
    LoadPlan,
    Piece,
    Planner,
)
from kvtier.core.prefill_estimator import PRIOR_PER_TOKEN_S, PRIOR_STEP_TOKENS, TOKENS_MIN, PrefillEstimator
from kvtier.types import LoadDone, LoadOption, Lookup, Presence, RequestId

PER_TOKEN_S = 1e-3
TOTAL = 1000
"""A prompt whose computing takes a second."""


def option(
    tokens: int,
    seconds: float,
    *,
    wait_s: float = 0.001,
    source: str = "disk",
    is_known: bool = True,
    chunk_tokens: int = 0,
) -> LoadOption:
    return LoadOption(tokens, source, seconds, wait_s, is_known, chunk_tokens)


def lookup_of(*options: LoadOption) -> Lookup:
    tokens = options[-1].tokens if options else 0
    return Lookup(tokens, 0, Presence.ARRIVING if options else Presence.ABSENT, (), options)


def taught() -> Planner:
    """A planner of an engine that computes a thousand tokens a second."""
    planner = Planner()
    for tokens in (100, 1000, 2000, 4000):
        planner.prefilled([Piece(tokens, 0)], tokens * PER_TOKEN_S)
    return planner


def end(planner: Planner, plan: LoadPlan, *, tokens: int, seconds: float, now_s: float, was_cut: bool = False) -> None:
    planner.begun(plan, now_s - seconds)
    planner.ended(plan, LoadDone(RequestId("r"), tokens, plan.tokens, (), (), was_cut), seconds, now_s)


def budget_of(plan: LoadPlan) -> LoadBudget:
    assert plan.budget is not None
    return plan.budget


def lose(planner: Planner, plan: LoadPlan, now_s: float) -> None:
    """The load brings nothing, and is cut as late as its budget allows."""
    end(planner, plan, tokens=0, seconds=budget_of(plan).allowance_s, now_s=now_s, was_cut=True)


# ---- what is chosen --------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_when_nothing_is_offered() -> None:
    plan = taught().plan(lookup_of(), TOTAL, now_s=0.0)
    assert (plan.tokens, plan.load_s, plan.saved_s) == (0, 0.0, 0.0)
    assert plan.compute_s == plan.recompute_s == pytest.approx(1.0, rel=0.01)


def test_the_offer_that_saves_most_is_taken() -> None:
    lookup = lookup_of(option(300, 0.01, source="host"), option(900, 0.01), option(920, 0.5, source="far"))
    plan = taught().plan(lookup, TOTAL, now_s=0.0)
    assert plan.tokens == 900
    assert plan.saved_s == pytest.approx(0.89, rel=0.01)
    assert not plan.is_trial


def test_offers_are_what_each_load_would_take_with_computing_the_rest() -> None:
    planner = taught()
    lookup = lookup_of(option(300, 0.01, source="host"), option(900, 0.01), option(920, 0.5, source="far"))
    plan = planner.plan(lookup, TOTAL, now_s=0.0)
    offers = planner.offers(lookup, plan)
    assert offers == [
        (tokens, pytest.approx(seconds, rel=0.01)) for tokens, seconds in ((300, 0.71), (900, 0.11), (920, 0.58))
    ]
    assert dict(offers)[plan.tokens] == plan.load_s + plan.compute_s
    # One that the engine holds is none.
    assert planner.offers(lookup, planner.plan(lookup, TOTAL, resident_tokens=300, now_s=0.0))[0][0] == 900


def test_a_boundary_that_the_engine_holds_already_is_no_offer() -> None:
    lookup = lookup_of(option(500, 0.0), option(900, 0.1))
    plan = taught().plan(lookup, TOTAL, resident_tokens=500, now_s=0.0)
    assert plan.tokens == 900
    assert plan.recompute_s == pytest.approx(0.5, rel=0.01)
    assert taught().plan(lookup_of(option(500, 0.0)), TOTAL, resident_tokens=500, now_s=0.0).tokens == 500


def test_an_offer_past_the_prompt_is_none() -> None:
    assert taught().plan(lookup_of(option(1024, 0.0)), TOTAL, now_s=0.0).tokens == 0


def test_what_a_load_takes_besides_counts() -> None:
    planner = taught()
    planner.record_overhead(0.5)
    assert planner.plan(lookup_of(option(400, 0.0)), TOTAL, now_s=0.0).tokens == 0
    assert planner.plan(lookup_of(option(900, 0.0)), TOTAL, now_s=0.0).tokens == 900


def test_what_loads_took_besides_is_forgotten_while_nobody_can_see_it() -> None:
    planner = taught()
    planner.record_overhead(5.0)  # once, for a reason that has gone
    lookup = lookup_of(option(900, 0.01))
    assert planner.plan(lookup, TOTAL, now_s=0.0).tokens == 0
    for _ in range(30):
        planner.prefilled([Piece(TOTAL, 0)], TOTAL * PER_TOKEN_S)
    assert planner.plan(lookup, TOTAL, now_s=30.0).tokens == 900


def test_a_load_that_is_over_before_the_engine_is_free_costs_nothing() -> None:
    planner, lookup = taught(), lookup_of(option(900, 2.0))
    assert planner.plan(lookup, TOTAL, now_s=0.0).is_trial  # too slow
    plan = planner.plan(lookup, TOTAL, ahead_s=2.0, now_s=0.0)
    assert (plan.tokens, plan.load_s, plan.is_trial) == (900, 0.0, False)


def test_switched_off_it_loads_all_there_is_to_the_end() -> None:
    planner = Planner(is_on=False)
    plan = planner.plan(lookup_of(option(300, 0.0), option(900, 50.0)), TOTAL, now_s=0.0)
    assert (plan.tokens, plan.budget) == (900, None)
    end(planner, plan, tokens=0, seconds=60.0, now_s=60.0)
    assert planner.plan(lookup_of(option(900, 50.0)), TOTAL, now_s=60.0).tokens == 900


# ---- budget --------------------------------------------------------------------------------------------------------


def test_a_load_may_lose_its_slack_and_twice_its_wait() -> None:
    plan = taught().plan(lookup_of(option(900, 0.3, wait_s=0.2)), TOTAL, now_s=0.0)
    assert budget_of(plan).allowance_s == pytest.approx(SLACK + RISK_FACTOR * 0.2, rel=0.01)
    assert budget_of(plan).saved_s(0, 900) == pytest.approx(0.9, rel=0.01)


def test_a_load_whose_first_tokens_are_cheap_to_compute_may_get_to_the_dear_ones() -> None:
    planner = Planner()
    for tokens in (100, 1000, 10_000):
        planner.prefilled([Piece(tokens, 0)], tokens * tokens / 2 * 1e-8)
    plan = planner.plan(lookup_of(option(9000, 0.27, wait_s=0.0)), 10_000, now_s=0.0)  # 30 us a token, even at 3000
    assert plan.risk_s == pytest.approx(0.045, rel=0.02)
    assert (plan.tokens, plan.is_trial) == (9000, False)


def test_the_time_in_which_the_engine_computes_for_others_is_given_to_a_load_that_knows_its_link() -> None:
    planner, lookup = taught(), lookup_of(option(900, 0.3, wait_s=0.2))
    plan = planner.plan(lookup, TOTAL, ahead_s=5.0, now_s=0.0)
    assert budget_of(plan).free_s == 5.0
    assert budget_of(plan).allowance_s == pytest.approx(SLACK + RISK_FACTOR * 0.2, rel=0.01)
    before_s = planner.snapshot()["loss_budget_s"]
    end(planner, plan, tokens=0, seconds=5.0, now_s=5.0)  # later than expected, but nothing was lost
    assert planner.snapshot()["loss_budget_s"] == before_s
    assert planner.plan(lookup, TOTAL, now_s=5.0).tokens == 900  # so the source does not rest


def test_a_prompt_is_not_computed_while_those_that_come_meanwhile_would_wait_for_it() -> None:
    planner, first = taught(), lookup_of(option(2000, 0.5))
    lookup = lookup_of(option(900, 1.1))
    assert planner.plan(lookup, TOTAL, now_s=0.0).is_trial
    plan = planner.plan(first, 2010, now_s=0.0)
    planner.begun(plan, 0.0)
    behind = planner.plan(lookup, TOTAL, now_s=0.0)
    assert (behind.tokens, behind.is_trial) == (900, False)
    assert planner.plan(lookup, TOTAL, beside_s=0.0, now_s=0.0).tokens == 0  # the engine computes both at a time
    assert planner.plan(lookup, TOTAL, now_s=0.6).tokens == 0  # the first is late, and its end is not known
    planner.dropped(plan)
    assert planner.plan(lookup, TOTAL, now_s=0.0).is_trial


@pytest.mark.parametrize(
    ("offer", "total", "allowance_s"),
    [
        pytest.param((900, 0.4, 0.3), TOTAL, SLACK + 0.5, id="no more than it may bring"),
        pytest.param((900, 0.7, 0.3), TOTAL, SLACK + RISK_FACTOR_MIN * 0.3, id="a little for one that brings little"),
        pytest.param((9, 0.0, 0.0), 10, SLACK_S_MIN, id="some milliseconds for a short prompt"),
    ],
)
def test_what_is_lent_to_a_load(offer: tuple[int, float, float], total: int, allowance_s: float) -> None:
    tokens, seconds, wait_s = offer
    plan = taught().plan(lookup_of(option(tokens, seconds, wait_s=wait_s)), total, now_s=0.0)
    assert budget_of(plan).allowance_s == pytest.approx(allowance_s, rel=0.01)


@pytest.mark.parametrize(("tokens", "first_look_s"), [(1000, 0.15), (10_000, 0.2), (100_000, 0.4)])
def test_the_first_look_at_a_link_is_given_its_share_of_the_prompt(tokens: int, first_look_s: float) -> None:
    plan = taught().plan(lookup_of(option(900, 0.0, is_known=False)), tokens, now_s=0.0)
    assert budget_of(plan).allowance_s == pytest.approx(0.03 * tokens * PER_TOKEN_S + first_look_s, rel=0.01)


def test_who_waits_behind_other_loads_may_wait_as_long_as_they_spare() -> None:
    planner, lookup = taught(), lookup_of(option(900, 0.0, is_known=False))
    first = planner.plan(lookup, TOTAL, now_s=0.0)
    planner.begun(first, 0.0)
    second = planner.plan(lookup, TOTAL, now_s=0.0)
    assert second.saved_by_loads_s == pytest.approx(0.9, rel=0.01)
    assert budget_of(second).allowance_s == pytest.approx(SLACK + 0.9, rel=0.01)
    planner.dropped(first)
    assert planner.plan(lookup, TOTAL, now_s=0.0).saved_by_loads_s == 0.0


@pytest.mark.parametrize("end", ["dropped", "ended"])
def test_a_load_is_known_by_its_plan_s_number_and_not_by_the_object(end: str) -> None:
    planner, slow = taught(), lookup_of(option(900, 1.1))
    plans = [planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=0.0) for _ in range(2)]
    assert plans[0] == plans[1]
    for plan in plans:
        planner.begun(plan, 0.0)
    for plan in map(replace, plans):  # another object with the same content
        assert not planner.plan(slow, TOTAL, now_s=0.0).is_trial
        done = LoadDone(RequestId("r"), plan.tokens, plan.tokens, (), (), was_cut=False)
        planner.dropped(plan) if end == "dropped" else planner.ended(plan, done, 0.1, 0.1)
    assert planner.plan(slow, TOTAL, now_s=0.0).is_trial


# ---- the account -----------------------------------------------------------------------------------------------------


def test_who_has_lost_too_much_lends_no_more_until_it_is_earned() -> None:
    planner = Planner()
    near, far = lookup_of(option(900, 0.1, wait_s=0.01)), lookup_of(option(900, 0.5, wait_s=0.4))
    for tokens in (100, 1000):
        planner.prefilled([Piece(tokens, 0)], tokens * PER_TOKEN_S)
    now_s = 0.0
    while planner.snapshot()["loss_budget_s"] > 0:
        plan = planner.plan(far, TOTAL, now_s=now_s)
        assert plan.tokens == 900
        lose(planner, plan, now_s)
        now_s += BACKOFF_S_MAX
    now_s += BACKOFF_S_MAX
    for _ in range(2):
        planner.prefilled([Piece(TOTAL, 0)], TOTAL * PER_TOKEN_S)
    assert planner.plan(far, TOTAL, now_s=now_s).is_trial  # within its slack, at a venture
    assert not planner.plan(near, TOTAL, now_s=now_s).is_trial
    for _ in range(40):
        planner.prefilled([Piece(1000, 0)], 1.0)
    plan = planner.plan(far, TOTAL, now_s=now_s)
    assert (plan.tokens, plan.is_trial) == (900, False)


def test_what_loads_have_saved_is_lent_in_part() -> None:
    planner = taught()
    before_s = planner.snapshot()["loss_budget_s"]
    end(planner, planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=0.0), tokens=900, seconds=0.1, now_s=0.1)
    assert planner.snapshot()["loss_budget_s"] - before_s == pytest.approx(0.08, rel=0.02)
    assert planner.snapshot()["saved_s"] == pytest.approx(0.8, rel=0.02)


def test_the_account_has_an_end() -> None:
    planner = Planner()
    assert planner.snapshot()["loss_budget_s"] == LOSS_BUDGET_START_S
    for _ in range(1000):
        planner.prefilled([Piece(1000, 0)], 1.0)
    assert planner.snapshot()["loss_budget_s"] == 10.0


# ---- rests -----------------------------------------------------------------------------------------------------------


def test_a_place_that_has_cost_a_load_rests_twice_as_long_each_time() -> None:
    planner, now_s, rests = taught(), 0.0, []
    for _ in range(8):
        plan = planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=now_s)
        assert plan.tokens == 900
        lose(planner, plan, now_s)
        later = (now_s + half / 2 for half in range(4 * int(BACKOFF_S_MAX)))
        again_s = next(at_s for at_s in later if planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=at_s).tokens)
        rests.append(again_s - now_s)
        now_s = again_s
    assert rests == [BACKOFF_S_MIN, 2, 4, 8, 16, BACKOFF_S_MAX, BACKOFF_S_MAX, BACKOFF_S_MAX]


def test_loads_that_fail_together_are_one_failure() -> None:
    planner, lookup = taught(), lookup_of(option(900, 0.1))
    plans = [planner.plan(lookup, TOTAL, now_s=0.0) for _ in range(3)]
    for plan in plans:
        lose(planner, plan, 0.0)
    assert not planner.plan(lookup, TOTAL, now_s=0.9 * BACKOFF_S_MIN).tokens
    assert planner.plan(lookup, TOTAL, now_s=BACKOFF_S_MIN).tokens


def test_a_load_that_succeeds_ends_it() -> None:
    planner, lookup = taught(), lookup_of(option(900, 0.1))
    for now_s in (0.0, BACKOFF_S_MIN):
        lose(planner, planner.plan(lookup, TOTAL, now_s=now_s), now_s)
    end(planner, planner.plan(lookup, TOTAL, now_s=9.0), tokens=900, seconds=0.1, now_s=9.0)
    lose(planner, planner.plan(lookup, TOTAL, now_s=9.0), 9.0)
    assert not planner.plan(lookup, TOTAL, now_s=9.0).tokens
    assert planner.plan(lookup, TOTAL, now_s=9.0 + BACKOFF_S_MIN).tokens


def test_who_can_afford_what_was_lost_is_not_kept_from_it() -> None:
    """A short prompt that was unlucky says nothing about a long one."""
    planner = taught()
    lose(planner, planner.plan(lookup_of(option(9, 0.001)), 10, now_s=0.0), 0.0)
    assert planner.plan(lookup_of(option(9, 0.001)), 10, now_s=0.1).tokens == 0
    assert planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=0.1).tokens == 900


def test_other_places_are_used_meanwhile() -> None:
    planner = taught()
    lose(planner, planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=0.0), 0.0)
    plan = planner.plan(lookup_of(option(300, 0.01, source="host"), option(900, 0.1)), TOTAL, now_s=0.1)
    assert (plan.tokens, plan.source) == (300, "host")


def test_a_hole_in_what_was_stored_says_nothing_about_the_link() -> None:
    planner, lookup = taught(), lookup_of(option(900, 0.1))
    end(planner, planner.plan(lookup, TOTAL, now_s=0.0), tokens=0, seconds=0.01, now_s=0.01)
    assert planner.plan(lookup, TOTAL, now_s=0.02).tokens == 900


def test_a_link_that_is_believed_slow_is_tried_now_and_then_within_the_slack() -> None:
    planner, lookup = taught(), lookup_of(option(300, 0.01, source="host"), option(900, 5.0))
    plan = planner.plan(lookup, TOTAL, now_s=0.0)
    assert (plan.tokens, plan.is_trial) == (900, True)
    assert plan.load_s == pytest.approx(0.01 + SLACK, rel=0.01)
    assert budget_of(plan).allowance_s == pytest.approx(SLACK, rel=0.01)
    planner.begun(plan, 0.0)
    assert planner.plan(lookup, TOTAL, now_s=0.01).tokens == 300  # one at a time
    planner.ended(plan, LoadDone(RequestId("r"), 300, 900, (), (), was_cut=True), 0.06, 0.06)
    assert planner.plan(lookup, TOTAL, now_s=0.5).tokens == 300
    _earn(planner, SLACK)
    assert planner.plan(lookup, TOTAL, now_s=1.5).tokens == 300  # twice as long as before
    assert planner.plan(lookup, TOTAL, now_s=2.5).is_trial


def _earn(planner: Planner, seconds: float) -> None:
    """Compute until the trial budget has at least `seconds`."""
    while planner.snapshot()["trial_budget_s"] < seconds + 0.01:
        planner.prefilled([Piece(TOTAL, 0)], TOTAL * PER_TOKEN_S)


def test_no_trial_may_lose_more_than_its_share_of_the_time_so_far() -> None:
    planner, lookup = Planner(), lookup_of(option(900, 5.0))
    for count in range(1, 6):
        planner.prefilled([Piece(TOTAL, 0)], TOTAL * PER_TOKEN_S)
        assert planner.plan(lookup, TOTAL, now_s=100.0 * count).is_trial == (count * TRIAL_SHARE >= SLACK)


def test_a_trial_pays_for_what_it_loses() -> None:
    planner, lookup = taught(), lookup_of(option(300, 0.01, source="host"), option(900, 5.0))
    before_s = planner.snapshot()["trial_budget_s"]
    plan = planner.plan(lookup, TOTAL, now_s=0.0)
    end(planner, plan, tokens=300, seconds=0.03, now_s=0.03, was_cut=True)  # 20 ms later than from host memory
    assert before_s - planner.snapshot()["trial_budget_s"] == pytest.approx(0.02, rel=0.01)
    assert planner.snapshot()["loss_budget_s"] == pytest.approx(LOSS_BUDGET_START_S + 0.142 + 0.027, rel=0.01)


def test_trials_grow_while_they_arrive_and_shrink_when_they_do_not() -> None:
    planner = taught()
    lookup = lookup_of(option(300, 0.01, source="host"), option(900, 5.0, chunk_tokens=100))
    lengths = []
    for number, comes in enumerate([True, True, True, False, False, False, False]):
        _earn(planner, SLACK)
        plan = planner.plan(lookup, TOTAL, now_s=100.0 * number)
        assert plan.is_trial
        lengths.append(plan.tokens - 300)
        tokens = plan.tokens if comes else 300
        end(planner, plan, tokens=tokens, seconds=0.03, now_s=100.0 * number + 0.03, was_cut=not comes)
    assert lengths == [100, 200, 400, 600, 400, 200, 100]


def test_a_slower_source_is_not_tried_in_place_of_a_faster_one() -> None:
    """Its load needs the faster source too, and its failure would be taken for one of the slower source."""
    planner = taught()
    lookup = lookup_of(option(300, 5.0), option(900, 9.0, source="far"))
    plan = planner.plan(lookup, TOTAL, now_s=0.0)
    assert (plan.tokens, plan.source, plan.is_trial) == (300, "disk", True)
    end(planner, plan, tokens=0, seconds=0.03, now_s=0.03, was_cut=True)
    _earn(planner, SLACK)
    assert not planner.plan(lookup, TOTAL, now_s=0.1).tokens
    assert planner.plan(lookup, TOTAL, now_s=10.0).source == "disk"


def test_a_try_that_fails_keeps_nobody_from_what_pays() -> None:
    planner = taught()
    lose(planner, planner.plan(lookup_of(option(900, 5.0)), TOTAL, now_s=0.0), 0.05)
    assert planner.plan(lookup_of(option(900, 0.1)), TOTAL, now_s=0.06).tokens == 900


def test_nothing_is_tried_where_even_a_fast_link_would_hardly_help() -> None:
    planner = taught()
    assert planner.plan(lookup_of(option(880, 0.05, source="host"), option(900, 0.1)), TOTAL, now_s=0.0).tokens == 880
    planner.record_overhead(2.0)
    assert planner.plan(lookup_of(option(900, 0.0)), TOTAL, now_s=0.0).tokens == 0


# ---- what computing takes --------------------------------------------------------------------------------------------


def test_before_anything_was_computed_a_guess_must_do() -> None:
    assert Planner().seconds(1000, 5000) == pytest.approx((1000 + PRIOR_STEP_TOKENS) * PRIOR_PER_TOKEN_S)
    assert Planner().seconds(0, 5000) == 0.0


def test_steps_tokens_and_attention_are_told_apart() -> None:
    planner = Planner(step_tokens=2000)
    for tokens in (50, 500, 2000):
        for context in (0, 10_000, 100_000):
            seconds = 0.01 + 1e-4 * tokens + 1e-9 * tokens * (context + tokens / 2)
            planner.prefilled([Piece(tokens, context)], seconds)
    figures = planner.snapshot()
    assert figures["per_step_s"] == pytest.approx(0.01, rel=0.02)
    assert figures["per_token_s"] == pytest.approx(1e-4, rel=0.02)
    assert figures["per_pair_s"] == pytest.approx(1e-9, rel=0.02)
    expected_s = 3 * 0.01 + 0.5 + 1e-9 * 5000 * 22_500
    assert planner.seconds(5000, 20_000) == pytest.approx(expected_s, rel=0.02)
    assert planner.seconds_per_token == pytest.approx(1e-4 + 0.01 / 2000, rel=0.02)


def test_one_step_alone_tells_the_speed_of_the_machine() -> None:
    """As after a hit, when only the rest of a prompt was computed."""
    planner = Planner()
    planner.prefilled([Piece(200, 8000)], 0.6)
    assert planner.snapshot()["per_token_s"] == pytest.approx(0.6 / (200 + PRIOR_STEP_TOKENS), rel=0.05)
    assert planner.seconds(8000, 0) == pytest.approx(16.2, rel=0.05)


def test_a_step_of_several_requests_counts_as_the_sum_of_its_pieces() -> None:
    apart, together = PrefillEstimator(), PrefillEstimator()
    apart.add([Piece(1000, 0)], 0.1)
    together.add([Piece(500, 250), Piece(500, 250)], 0.1)
    assert together.costs == apart.costs


def test_decoding_tells_nothing_of_prefill() -> None:
    prefill = PrefillEstimator()
    before = prefill.costs
    prefill.add([Piece(1, 50_000)] * 64, 0.05)
    prefill.add([Piece(TOKENS_MIN - 1, 0)], 0.05)
    prefill.add([Piece(1000, 0)], 0.0)
    prefill.add([], 1.0)
    assert prefill.costs == before


def test_many_small_steps_do_not_drown_a_large_one() -> None:
    planner = Planner()
    planner.prefilled([Piece(8192, 0)], 0.8)
    for _ in range(1000):
        planner.prefilled([Piece(32, 0)], 0.02)
    assert planner.seconds(8192, 0) == pytest.approx(0.8, rel=0.05)
    assert planner.seconds(32, 0) == pytest.approx(0.02, rel=0.1)


def test_an_engine_that_has_become_faster_is_believed() -> None:
    planner = Planner()
    for seconds in [1.0] * 10 + [0.5] * 40:
        planner.prefilled([Piece(1000, 0)], seconds)
    assert planner.seconds(1000, 0) == pytest.approx(0.5, rel=0.05)


def test_what_is_kept_of_the_past_has_a_limit() -> None:
    prefill = PrefillEstimator()
    for number in range(500):
        prefill.add([Piece(16 << number % 14, (number * number) << number % 16)], 0.01 + number)
    assert len(prefill._averages) <= 64
