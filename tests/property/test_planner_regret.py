"""A plan may be wrong, but never costs more than it may: against computing everything and the best boundary."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core_driver import CHUNK, Driver, prefix_of
from tests.planner_world import CHUNK as CHUNK_TOKENS
from tests.planner_world import STEP_TOKENS, Speed, World

from kvtier.core import planner as planner_module
from kvtier.core.load_budget import LoadBudget
from kvtier.core.planner import (
    BACKOFF_S_MAX,
    COMPUTED_SHARE,
    LOSS_BUDGET_START_S,
    SAVED_SHARE,
    SLACK,
    SLACK_S_MIN,
    TRIAL_SHARE,
    Planner,
)
from kvtier.core.prefill_estimator import Piece, PrefillCosts, PrefillEstimator
from kvtier.core.prefix import needed_chunks
from kvtier.layout import History, State, Validity, Window
from kvtier.types import Direction, LoadDone, LoadOption, Lookup, Place, Presence, RequestId

EPSILON_S = 1e-6
CUT_S = 0.003
"""A cut waits for copies into the engine that are under way."""
FIT = 0.02
"""The planner sees times only, and fits three costs to them."""


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of any size between two."""
    return st.floats(0, 1).map(lambda share: low * (high / low) ** share)


costs = st.builds(PrefillCosts, powers(1e-3, 3e-2), powers(2e-5, 5e-4), st.one_of(st.just(0.0), powers(1e-10, 1e-8)))
prompts = st.lists(st.tuples(powers(512, 30_000).map(int), st.floats(0, 2)), min_size=1, max_size=12)
groups = st.sampled_from([(History(),), (History(), Window(1024)), (History(), State())])
threads = st.sampled_from([1, 4, 16])


@st.composite
def changing(draw: st.DrawFn, slowest: float = 0.01) -> list[Speed]:
    """A tier that is fast, slow, far away or as good as gone, and another one soon."""
    since_s, speeds = 0.0, list[Speed]()
    for _ in range(draw(st.integers(1, 8))):
        speeds.append(Speed(since_s, draw(powers(1e-4, 0.3)), draw(powers(slowest, 3000))))
        since_s += draw(powers(0.5, 20))
    return speeds


# ---- one load --------------------------------------------------------------------------------------------------------


@given(
    arrivals=st.lists(st.floats(0, 4), min_size=1, max_size=10),
    allowance_s=st.floats(0, 1),
    per_token_s=st.floats(0, 0.2),
    per_pair_s=st.floats(0, 0.01),
    resident=st.integers(0, 12),
    free_s=st.sampled_from([0.0, 0.5, 3.0]),
)
def test_a_load_costs_no_more_than_the_best_moment_to_stop_it(
    arrivals: Sequence[float],
    allowance_s: float,
    per_token_s: float,
    per_pair_s: float,
    resident: int,
    free_s: float,
) -> None:
    """Whatever comes when: against all moments, the one before it began among them."""
    budget = LoadBudget(allowance_s, per_token_s, per_pair_s, free_s)
    core, prefix = Driver(slots=64), prefix_of("abcdefghij"[: len(arrivals)])
    tokens = len(arrivals) * CHUNK
    resident = min(resident, tokens - 1)
    core.fill("disk", prefix)
    core.lookup("r", prefix)
    core.run()
    (group,) = core.layout.groups
    places = [Place(0, chunk, (chunk,)) for chunk in needed_chunks(group, prefix, tokens)]
    places = [place for place in places if (place.chunk + 1) * prefix.chunk_tokens > resident]
    core.cache.load(RequestId("r"), prefix, tokens, places, core.now_s, resident_tokens=resident, budget=budget)
    core._take()
    best_s = free_s + budget.saved_s(resident, tokens)  # what computing everything would take, after the others
    here = set(range(resident // CHUNK))
    due = sorted((arrivals[place.chunk], prefix.keys[place.chunk], place.chunk) for place in places)
    while not (done := core.loaded()):
        cut_s = core.cache.next_deadline()
        assert cut_s is not None
        if due and due[0][0] < cut_s:
            core.now_s, key, chunk = due.pop(0)
            core.answer(next(one for one in core.going(Direction.PROMOTE) if one.key == key))
            core.run(directions=[Direction.SCATTER])
            here.add(chunk)
            reached = next(number for number in range(len(arrivals) + 1) if number not in here) * CHUNK
            best_s = min(best_s, max(core.now_s, free_s) + budget.saved_s(max(reached, resident), tokens))
        else:
            core.now_s = cut_s
            core.cache.tick(cut_s)
            core._take()
    took_s = max(core.now_s, free_s) + budget.saved_s(max(done[0].tokens, resident), tokens)
    assert took_s <= best_s + allowance_s + EPSILON_S
    assert done[0].was_cut == (done[0].tokens < tokens)


# ---- many requests ---------------------------------------------------------------------------------------------------


@given(costs, changing(), prompts, groups, threads)
def test_a_tier_that_changes_costs_what_was_set_aside_at_most(
    engine: PrefillCosts,
    speeds: Sequence[Speed],
    asked: Sequence[tuple[int, float]],
    kinds: Sequence[Validity],
    count: int,
) -> None:
    world = World(engine, speeds, groups=kinds, threads=count)
    world.teach()
    before_s = world.planner.snapshot()["loss_budget_s"]
    for tokens, pause_s in asked:
        world.ask(tokens)
        world.wait(pause_s)
    lost_s = saved_s = set_aside_s = overdraft_s = 0.0
    for answer in world.answers:
        slack_s = max(SLACK_S_MIN, SLACK * answer.recompute_s)
        # What a step costs besides its tokens counts by tokens, but is spared or not as a whole.
        error_s = CUT_S + FIT * answer.recompute_s + engine.per_step_s
        allowance_s = answer.plan.budget.allowance_s if answer.plan.budget is not None else 0.0
        assert answer.regret_s <= allowance_s + error_s, answer
        lost_s += max(0.0, answer.regret_s - slack_s - error_s)
        saved_s += max(0.0, -answer.regret_s)
        set_aside_s += SLACK * world.compute_s(answer.tokens - answer.loaded, answer.loaded)
        overdraft_s = max(overdraft_s, allowance_s)
    assert lost_s <= before_s + LOSS_BUDGET_START_S + SAVED_SHARE * saved_s + set_aside_s + overdraft_s + EPSILON_S


bursts = st.lists(
    st.tuples(st.lists(powers(512, 30_000).map(int), min_size=1, max_size=8), st.floats(0, 20)), min_size=1, max_size=6
)


@given(costs, changing(), bursts, threads)
def test_an_engine_that_computes_all_prompts_is_kept_waiting_no_longer_than_was_set_aside(
    engine: PrefillCosts, speeds: Sequence[Speed], asked: Sequence[tuple[Sequence[int], float]], count: int
) -> None:
    """Prompts arrive together. Links stall in the middle, get slower or come back; loads fail together."""
    world = World(engine, speeds, threads=count, slots=512, is_one=True)
    world.teach()
    set_aside_s = world.planner.snapshot()["loss_budget_s"] + LOSS_BUDGET_START_S
    overdraft_s = 0.0  # of any load so far: a later burst may have no load, because the budget is overdrawn
    for together, pause_s in asked:
        world.ask(*together)
        world.wait(pause_s)
        for answer in world.answers[-len(together) :]:
            recompute_s = world.compute_s(answer.tokens, 0)
            budget = answer.plan.budget
            set_aside_s += (SLACK + COMPUTED_SHARE + FIT) * recompute_s + CUT_S + engine.per_step_s
            set_aside_s += SAVED_SHARE * (recompute_s - world.compute_s(answer.tokens - answer.loaded, answer.loaded))
            overdraft_s = max(overdraft_s, budget.allowance_s if budget is not None else 0.0)
        lost_s = max(0.0, world.free_s - world.free_without_s)
        assert lost_s <= set_aside_s + overdraft_s + EPSILON_S


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_whoever_decides_how_loads_end_takes_no_more_than_was_set_aside(seed: int, good: float) -> None:
    dice = Random(seed)
    planner = Planner()
    for tokens in (100, 1000, 10_000):
        planner.prefilled([Piece(tokens, 0)], tokens * 1e-3)
    loss_budget_s = planner.snapshot()["loss_budget_s"]
    lost_s = saved_s = computed_s = most_s = now_s = 0.0
    for _ in range(60):
        now_s += BACKOFF_S_MAX
        tokens, comes = int(100 * 100 ** dice.random()), dice.random() < good
        load_s = dice.random() * tokens * 1e-3
        option = LoadOption(tokens, "disk", load_s, dice.random() * load_s, is_known=True)
        plan = planner.plan(Lookup(tokens, 0, Presence.ARRIVING, (), (option,)), tokens, now_s=now_s)
        if plan.budget is not None:
            took_s = min(load_s, plan.budget.allowance_s) if comes else plan.budget.allowance_s
            done = LoadDone(RequestId("r"), tokens if comes else 0, tokens, (), (), was_cut=not comes)
            planner.begun(plan, now_s)
            planner.ended(plan, done, took_s, now_s)
            slack_s = max(SLACK_S_MIN, SLACK * plan.recompute_s)
            lost_s += 0.0 if comes else took_s - slack_s
            saved_s += plan.budget.saved_s(0, tokens) - took_s if comes else 0.0
            most_s = max(most_s, took_s)
        if not (plan.budget is not None and comes):
            planner.prefilled([Piece(tokens, 0)], tokens * 1e-3)
            computed_s += tokens * 1e-3
    assert lost_s <= loss_budget_s + SAVED_SHARE * saved_s + SLACK * computed_s + most_s + EPSILON_S


def _trials(seed: int, good: float) -> tuple[float, float, float]:
    """Seconds that trials lost against the best other plan, the largest such loss, and the time of all requests."""
    dice, planner = Random(seed), Planner()
    for tokens in (100, 1000, 10_000):
        planner.prefilled([Piece(tokens, 0)], tokens * 1e-3)
    lost_s, most_s, time_s, now_s = 0.0, 0.0, 11.1, 0.0
    for _ in range(200):
        now_s += 2 * BACKOFF_S_MAX * dice.random()
        total = int(100 * 100 ** dice.random())
        near, end = int(total * dice.random() ** 0.3), total - 1
        near_s, far_s = 1e-5 * near, (2 + 10 * dice.random()) * total * 1e-3
        options = LoadOption(near, "host", near_s, 0.0, True, 1), LoadOption(end, "far", far_s, 0.0, True, 1)
        plan = planner.plan(Lookup(end, near, Presence.ARRIVING, (), options), total, now_s=now_s)
        took_s, tokens = near_s, min(plan.tokens, near)
        if plan.is_trial and plan.budget is not None:
            comes = dice.random() < good
            took_s += plan.budget.allowance_s * (dice.random() if comes else 1.0)
            tokens = plan.tokens if comes else near
        if plan.budget is not None:
            planner.begun(plan, now_s)
            done = LoadDone(RequestId("r"), tokens, plan.tokens, (), (), was_cut=tokens < plan.tokens)
            planner.ended(plan, done, took_s, now_s)
        compute_s = (total - tokens) * 1e-3
        planner.prefilled([Piece(total - tokens, tokens)], compute_s)
        time_s += took_s + compute_s
        if plan.is_trial:
            loss_s = max(0.0, took_s + compute_s - min(total * 1e-3, near_s + (total - near) * 1e-3))
            lost_s, most_s = lost_s + loss_s, max(most_s, loss_s)
    return lost_s, most_s, time_s


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_trials_lose_no_more_than_their_share_of_the_time(seed: int, good: float) -> None:
    lost_s, most_s, time_s = _trials(seed, good)
    assert lost_s <= TRIAL_SHARE * time_s + FIT * most_s + EPSILON_S


def test_trials_without_a_budget_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "TRIAL_SHARE", 1.0)
    lost_s, most_s, time_s = _trials(seed=1, good=0.0)
    assert lost_s > 2 * (TRIAL_SHARE * time_s + FIT * most_s)


@given(costs, powers(1e-4, 0.05), powers(20, 2000), prompts, st.sampled_from([1, 4]))
def test_a_steady_tier_is_used_as_well_as_by_trying_every_boundary(
    engine: PrefillCosts, first_s: float, chunks_per_s: float, asked: Sequence[tuple[int, float]], count: int
) -> None:
    world = World(engine, [Speed(0, first_s, chunks_per_s)], threads=count, slots=256)
    world.teach()
    for tokens in (40_000, 40_000, 10_000):
        world.ask(tokens)
        world.wait(BACKOFF_S_MAX)
    world.answers.clear()
    for tokens, _ in asked:
        world.ask(tokens)
        world.wait(BACKOFF_S_MAX)
    # One more round of the tier's threads: the link's two numbers do not tell a round from a share of one.
    round_s = first_s + count / chunks_per_s
    for answer in world.answers:
        # What a step costs besides its tokens counts by tokens, but is spared or not as a whole.
        slack_s = max(SLACK_S_MIN, (SLACK + FIT) * answer.recompute_s) + engine.per_step_s
        assert answer.ttft_s <= answer.best_s + slack_s + 2 * round_s + CUT_S, answer


def _with_quota(tokens: int, share: float, threads: int, periods: int) -> World:
    """After six requests. The tier passes some objects in each period, and then none until the next one.

    It needs `periods` of them for a prompt, in `share` of the time of computing it.
    """
    engine = PrefillCosts(1e-3, 1e-4, 1e-9)
    period_s = share * World(engine, []).compute_s(tokens, 0) / periods
    quota = -(-tokens // CHUNK_TOKENS // periods)
    speed = Speed(0, 1e-3, 100 * quota / period_s, quota, period_s)
    world = World(engine, [speed], slots=256, threads=threads)
    world.teach()
    for _ in range(6):
        world.ask(tokens)
        world.wait(BACKOFF_S_MAX)
    return world


@given(powers(8_000, 40_000).map(int), st.floats(0.1, 0.35), threads, st.integers(3, 8))
def test_a_load_is_not_cut_while_the_quota_of_its_link_is_spent(
    tokens: int, share: float, count: int, periods: int
) -> None:
    """The first loads measure the pauses."""
    later = _with_quota(tokens, share, count, periods).answers[2:]
    assert all(answer.loaded == answer.plan.tokens > 0 for answer in later), later


@given(costs, changing(slowest=2.0), st.integers(4_000, 20_000), groups)
def test_a_tier_that_has_recovered_is_used_again(
    engine: PrefillCosts, speeds: Sequence[Speed], tokens: int, kinds: Sequence[Validity]
) -> None:
    """As soon as a rest is over, and what it had cost is earned again."""
    end_s = speeds[-1].since_s + 20.0
    recompute_s = World(engine, speeds).compute_s(tokens, 0)
    world = World(engine, [*speeds, Speed(end_s, recompute_s / 200, 4000 / recompute_s)], groups=kinds, slots=512)
    while world.now_s < end_s:
        world.ask(tokens)
        world.wait(1.0)
    lost_s = sum(max(0.0, answer.regret_s) for answer in world.answers)
    requests = 4 + int(lost_s / (COMPUTED_SHARE * recompute_s))
    assert any(_is_used(world, tokens) for _ in range(requests))


def _is_used(world: World, tokens: int) -> bool:
    world.wait(BACKOFF_S_MAX)
    (answer,) = world.ask(tokens)
    return answer.ttft_s < 0.5 * answer.recompute_s


# ---- what it rests on ------------------------------------------------------------------------------------------------


@given(costs, powers(1e-6, 1e-2), powers(1e-6, 1e-2), st.floats(0, 1), st.integers(1, 60), st.integers(0, 60))
def test_no_boundary_within_a_place_beats_its_ends(
    engine: PrefillCosts, host_s: float, below_s: float, first_s: float, chunks: int, ready: int
) -> None:
    """So a plan need not try them. Seconds for each chunk: `host_s` up to `ready`, `below_s` after that."""
    ready = min(ready, chunks)

    def total_s(number: int) -> float:
        behind = chunks - number
        compute_s = behind * engine.per_token_s + (chunks**2 - number**2) / 2 * engine.per_pair_s * 1e6
        below = max(0, number - ready)
        return compute_s + min(number, ready) * host_s + (first_s + below * below_s if below else 0.0)

    best_s = min(total_s(number) for number in range(chunks + 1))
    assert min(total_s(number) for number in (0, ready, chunks)) <= best_s + EPSILON_S


@given(costs, st.integers(0, 2**32))
def test_the_cost_of_computing_is_found(engine: PrefillCosts, seed: int) -> None:
    """From exact times of steps of several sizes; one step of each twenty takes ten times as long."""
    prefill, dice = PrefillEstimator(), Random(seed)

    def took_s(piece: Piece) -> float:
        return engine.per_step_s + piece.tokens * engine.per_token_s + piece.pairs * engine.per_pair_s

    sizes = [Piece(tokens, context) for tokens in (64, 500, STEP_TOKENS) for context in (0, 3_000, 60_000)]
    for number in range(200):
        piece = sizes[number % len(sizes)]
        prefill.add([piece], took_s(piece) * (10 if number > 20 and dice.random() < 0.05 else 1))
    for piece in sizes:
        found = prefill.costs
        guess_s = found.per_step_s + piece.tokens * found.per_token_s + piece.pairs * found.per_pair_s
        assert 0.6 * took_s(piece) <= guess_s <= 2.5 * took_s(piece)
