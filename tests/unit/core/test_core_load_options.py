"""Load options before a load, and the cut of a load that no longer pays."""

import pytest
from tests.core_driver import CHUNK, Driver, prefix_of

from kvtier.core.link_estimates import DEFAULT_BYTES_PER_S, PAUSE_KEPT, SAMPLE_S, LinkEstimator
from kvtier.core.load_budget import LoadBudget
from kvtier.core.prefix import needed_chunks
from kvtier.layout import ALIGNMENT, History, State, Window
from kvtier.types import Direction, LoadDone, LoadOption, Outcome, Place, Prefix, Presence, RequestId

MB = 1 << 20


def known(first_s: float, bytes_per_s: float, first_bytes: int = MB) -> LinkEstimator:
    return LinkEstimator(first_s=first_s, bytes_per_s=bytes_per_s, first_bytes=first_bytes, is_known=True)


# ---- estimators ------------------------------------------------------------------------------------------------------


def test_an_unused_link_counts_as_fast() -> None:
    first_s, all_s = LinkEstimator().seconds(100 * MB, 0, 0.0)
    assert all_s == pytest.approx(first_s + 100 * MB / DEFAULT_BYTES_PER_S)
    assert not LinkEstimator().is_known


def test_latency_and_bandwidth_are_estimated_separately() -> None:
    estimator = LinkEstimator()
    for _ in range(10):
        estimator.began(MB, 0.0)
    for number in range(10):
        estimator.ended(MB, 0.1 + 0.02 * number, is_moved=True)
    assert estimator.first_s == pytest.approx(0.1)
    assert estimator.first_bytes == 3 * MB  # came within half of the wait after the first one
    first_s, all_s = estimator.seconds(103 * MB, 0, 9.0)
    assert (first_s, all_s) == (pytest.approx(0.1), pytest.approx(0.1 + 100 * 0.18 / 7, rel=0.01))


def test_what_travels_side_by_side_is_no_flow() -> None:
    estimator = LinkEstimator()
    for start_s in (0.0, 1.0):
        for _ in range(4):
            estimator.began(MB, start_s)
        for _ in range(4):
            estimator.ended(MB, start_s + 0.1, is_moved=True)
    assert estimator.seconds(4 * MB, 0, 9.0)[1] == pytest.approx(0.1)
    assert estimator.seconds(8 * MB, 0, 9.0)[1] == pytest.approx(0.2)


def test_bad_news_is_believed_at_once_and_good_news_by_half() -> None:
    estimator = known(0.01, 100 * MB)
    estimator.began(MB, 0.0)
    estimator.ended(MB, 1.0, is_moved=True)
    assert estimator.first_s == pytest.approx(1.0)
    estimator.began(MB, 2.0)
    estimator.ended(MB, 2.01, is_moved=True)
    assert estimator.first_s == pytest.approx(0.1)


def _loaded(estimator: LinkEstimator, now_s: float, took_s: list[float]) -> tuple[float, float]:
    """Objects come one after the other, each `took_s` after the one before; expected and actual seconds."""
    expected_s, start_s = estimator.seconds(len(took_s) * MB, 0, now_s)[1], now_s
    for _ in took_s[:4]:
        estimator.began(MB, now_s)
    for number, seconds in enumerate(took_s):
        now_s += seconds
        estimator.ended(MB, now_s, is_moved=True)
        if number + 4 < len(took_s):
            estimator.began(MB, now_s)
    return expected_s, now_s - start_s


def test_a_mix_of_raw_and_coded_objects_is_expected_as_it_comes() -> None:
    raw_s, coded_s = 0.01, 0.0074
    mixed = LinkEstimator()
    for load in range(20):
        loads = [raw_s if (number * 7 + load) % 3 else coded_s for number in range(48)]
        expected_s, actual_s = _loaded(mixed, float(load), loads)
        if load:
            assert expected_s == pytest.approx(actual_s, rel=0.1)
    before_s, actual_s = _loaded(mixed, 30.0, [coded_s] * 48)
    assert before_s > 1.1 * actual_s  # negative control: the first load after all objects became coded
    for load in range(31, 40):
        expected_s, actual_s = _loaded(mixed, float(load), [coded_s] * 48)
    assert expected_s == pytest.approx(actual_s, rel=0.1)


def test_a_link_that_is_never_idle_is_looked_at_all_the_same() -> None:
    estimator = known(0.001, 1000 * MB)
    for number in range(200):
        estimator.began(MB, number * 0.01)
        if number:
            estimator.ended(MB, number * 0.01, is_moved=True)
    assert estimator.out == 1
    assert estimator.bytes_per_s == pytest.approx(100 * MB, rel=0.1)
    assert 4 * SAMPLE_S < 200 * 0.01


def test_what_does_not_come_is_not_expected_to_come_soon() -> None:
    estimator = known(0.01, 100 * MB)
    estimator.began(MB, 0.0)
    assert estimator.seconds(MB, 0, 3.0)[0] == pytest.approx(3.0)
    estimator.ended(MB, 4.0, is_moved=False)  # given up
    assert estimator.seconds(MB, 0, 9.0)[0] == pytest.approx(4.0)
    estimator.began(MB, 10.0)
    estimator.ended(MB, 10.001, is_moved=False)  # cancelled before it could tell anything
    assert estimator.seconds(MB, 0, 11.0)[0] == pytest.approx(4.0)


def test_what_is_on_its_way_comes_first() -> None:
    estimator = known(0.01, 100 * MB)
    assert estimator.seconds(MB, 50 * MB, 0.0)[0] == pytest.approx(0.51)


def test_a_load_may_have_to_wait_for_its_first_chunk_while_others_come() -> None:
    estimator = known(0.01, 100 * MB)
    estimator.record_lead(0.3, has_come=True)
    assert estimator.seconds(MB, 0, 0.0) == (pytest.approx(0.3), pytest.approx(0.3))
    assert estimator.seconds(101 * MB, 0, 0.0) == (pytest.approx(0.3), pytest.approx(1.01))
    estimator.record_lead(0.1, has_come=False)  # given up sooner than it usually comes
    assert estimator.lead_s == pytest.approx(0.3)
    estimator.record_lead(0.5, has_come=False)
    assert estimator.lead_s == pytest.approx(0.5)
    estimator.record_lead(0.02, has_come=True)
    assert estimator.lead_s == pytest.approx(0.1)


# ---- options ---------------------------------------------------------------------------------------------------------


def paced(core: Driver, *, host_s: float = 1e-6, **tiers: float) -> None:
    """Set the seconds per object of each link; objects are transferred one by one."""
    for place, seconds in {"host": host_s, **tiers}.items():
        core.cache._estimators[place] = estimator = core.cache._estimators[place]
        estimator.first_s, estimator.first_bytes, estimator.bytes_per_s = seconds, ALIGNMENT, ALIGNMENT / seconds
        estimator.is_known, estimator._has_bandwidth = True, True


def options(core: Driver, request: str, prefix: Prefix, resident_tokens: int = 0) -> list[tuple[int, str, float]]:
    core.lookup(request, prefix)
    while core.probes:  # the answer of one tier makes the core ask the next
        probe = next(iter(core.probes.values()))
        core.tell(probe, [item in core.held[probe.tier] for item in probe.objects])
    found = core.cache.lookup(RequestId(request), prefix, core.now_s, resident_tokens=resident_tokens)
    assert found.presence is not Presence.PROBING
    return [(option.tokens, option.source, round(option.seconds, 4)) for option in found.options]


@pytest.mark.parametrize("count", range(8, 30))
def test_objects_that_arrive_in_rounds_are_sampled_by_whole_rounds(count: int) -> None:
    """Four threads read one object each in 0.1 s; the last round may not be whole."""
    estimator = LinkEstimator()
    for _ in range(count):
        estimator.began(MB, 0.0)
    for number in range(count):
        estimator.ended(MB, 0.1 * (1 + number // 4), is_moved=True)
    assert estimator.bytes_per_s == pytest.approx(40 * MB)


def _quota(estimator: LinkEstimator, *passed: int) -> None:
    """A burst: each 0.1 s these objects pass, the first at once."""
    start_s = 10.0 * round(estimator._moved_s / 10 + 1)
    for _ in range(sum(passed)):
        estimator.began(MB, start_s)
    for number, count in enumerate(passed):
        for _ in range(count):
            estimator.ended(MB, start_s + 0.01 + 0.1 * number, is_moved=True)


def test_the_longest_pause_of_a_link_is_measured() -> None:
    """A worse measurement replaces the estimate; a better one counts as the geometric mean of both."""
    estimator = LinkEstimator()
    _quota(estimator, 3, 3, 3, 3)
    assert estimator.pause_s == pytest.approx(0.1)
    for _ in range(4):
        estimator.began(MB, 50.0)
    for number in range(4):
        estimator.ended(MB, 50.01 + 0.025 * number, is_moved=True)
    assert estimator.pause_s == pytest.approx((PAUSE_KEPT * 0.1 * 0.025) ** 0.5)
    for number in range(20):  # bursts that are too small for a sample
        estimator.began(MB, 60.0 + number)
        estimator.ended(MB, 60.01 + number, is_moved=True)
    assert estimator.pause_s < 0.01


def test_a_sample_that_is_mostly_one_pause_does_not_make_a_link_slower() -> None:
    estimator = LinkEstimator()
    _quota(estimator, 2, 3, 3, 3, 3)
    assert estimator.bytes_per_s == pytest.approx(30 * MB)
    _quota(estimator, 2, 2)
    assert estimator.bytes_per_s == pytest.approx(30 * MB)
    _quota(estimator, 2, 2, 2, 2, 2)
    assert estimator.bytes_per_s == pytest.approx(20 * MB)


def test_the_end_of_a_burst_does_not_replace_what_was_measured_before_it() -> None:
    estimator = LinkEstimator()
    _quota(estimator, 3, 3, 3, 3, 0, 3, 3, 3)
    assert estimator.bytes_per_s == pytest.approx(30 * MB)


def test_a_burst_that_was_too_short_for_a_sample_is_an_upper_limit_of_the_bandwidth() -> None:
    estimator = LinkEstimator()
    _quota(estimator, 8, 2)
    assert estimator.bytes_per_s == pytest.approx(100 * MB)  # 2, and 8 more about to arrive


@pytest.mark.parametrize("last_is_moved", [True, False])
def test_one_hiccup_does_not_make_a_link_slow_but_the_second_does(last_is_moved: bool) -> None:
    estimator = LinkEstimator()
    for _ in range(3):
        _quota(estimator, 1, *[5] * 8)
    before = estimator.bytes_per_s
    after: list[float] = []
    for start_s in (1000.0, 2000.0):
        for _ in range(12):
            estimator.began(MB, start_s)
        for number in range(12):
            arrival_s = start_s + 0.01 * (1 + number) + (5.0 if number > 6 else 0.0)
            estimator.ended(MB, arrival_s, is_moved=number < 11 or last_is_moved)
        after.append(estimator.bytes_per_s)
    assert after[0] > 0.25 * before
    assert after[1] < 0.1 * before


def test_a_load_may_have_to_wait_for_a_pause_of_the_link_but_not_longer_than_for_all_of_it() -> None:
    core, prefix = Driver(slots=64), prefix_of("abcdef")
    core.fill("disk", prefix)
    paced(core, disk=0.1)
    for pause_s, wait_s in ((0.0, 0.1), (0.3, 0.3), (5.0, 0.6)):
        core.cache._estimators["disk"].pause_s = pause_s
        assert len(options(core, "r", prefix)) == 1
        (option,) = core.cache.lookup(RequestId("r"), prefix, core.now_s).options
        assert option.wait_s == pytest.approx(wait_s)


def test_host_memory_and_a_tier_are_two_offers() -> None:
    core, prefix = Driver(slots=64), prefix_of("abcdef")
    core.fill("disk", prefix)
    core.store_and_run("s", prefix_of("ab"))
    paced(core, host_s=0.001, disk=0.1)
    assert options(core, "r", prefix) == [(2 * CHUNK, "host", 0.002), (6 * CHUNK, "disk", 0.401)]
    assert core.cache.lookup(RequestId("r"), prefix, 0.0).options[-1] == LoadOption(
        6 * CHUNK, "disk", 0.401, 0.1, is_known=True, chunk_tokens=CHUNK
    )


def test_what_the_engine_holds_costs_nothing() -> None:
    core, prefix = Driver(slots=64), prefix_of("abcdef")
    core.fill("disk", prefix)
    paced(core, disk=0.1)
    assert options(core, "r", prefix, 4 * CHUNK) == [(6 * CHUNK, "disk", 0.2)]
    assert options(core, "r", prefix, 4 * CHUNK + 1) == [(6 * CHUNK, "disk", 0.2)]
    assert options(core, "r", prefix, 6 * CHUNK) == []


def test_copies_to_the_engine_that_wait_for_their_turn_come_first() -> None:
    core, first, second = Driver(slots=64, scatters=2), prefix_of("abcdef"), prefix_of("xyz")
    for prefix in (first, second):
        core.store_and_run("s", prefix)
    paced(core, host_s=0.01)
    core.load("other", first)
    assert len(core.going(Direction.SCATTER)) == 2
    assert options(core, "r", second) == [(3 * CHUNK, "host", 0.09)]


def test_while_a_tier_is_asked_there_is_no_offer() -> None:
    core, prefix = Driver(slots=64), prefix_of("ab")
    core.store_and_run("s", prefix_of("a"))
    found = core.lookup("r", prefix)
    assert (found.presence, found.ready_tokens, found.options) == (Presence.PROBING, CHUNK, ())


def test_each_tier_that_can_be_done_without_makes_an_offer() -> None:
    core, prefix = Driver(slots=64, tiers=("disk", "shared", "far")), prefix_of("abcdef")
    core.fill("disk", prefix_of("ab"))
    core.fill("shared", prefix_of("abcd"))
    core.fill("far", prefix)
    paced(core, disk=0.01, shared=0.1, far=1.0)
    expected = [(2 * CHUNK, "disk", 0.02), (4 * CHUNK, "shared", 0.22), (6 * CHUNK, "far", 2.22)]
    assert options(core, "r", prefix) == expected


def test_a_load_waits_for_earlier_loads() -> None:
    core, first, second = Driver(slots=64), prefix_of("abcdef"), prefix_of("uvw")
    core.fill("disk", first)
    core.fill("disk", second)
    paced(core, disk=0.1)
    options(core, "a", first)
    core.load("a", first)
    assert options(core, "b", second) == [(3 * CHUNK, "disk", 0.9)]


def test_a_load_of_a_shared_prefix_waits_for_the_open_load_only() -> None:
    core, first, second = Driver(slots=12), prefix_of("abcdef"), prefix_of("abcdeg")
    core.fill("disk", first)
    core.fill("disk", second)
    paced(core, disk=0.1)
    options(core, "a", first)
    core.load("a", first)
    assert len(core.going(Direction.PROMOTE)) == 3  # the others wait for their turn
    assert options(core, "b", first) == [(6 * CHUNK, "disk", 0.7)]  # and the pace of the first, which is under way
    assert options(core, "c", second) == [(6 * CHUNK, "disk", 0.7)]


def test_a_window_and_a_state_are_loaded_for_the_end_only() -> None:
    core, prefix = Driver(slots=64, groups=(History(), Window(CHUNK), State())), prefix_of("abcd")
    core.fill("disk", prefix)
    paced(core, disk=0.1)
    assert options(core, "r", prefix) == [(4 * CHUNK, "disk", 0.6)]
    (option,) = core.cache.lookup(RequestId("r"), prefix, core.now_s).options
    assert option.wait_s == option.seconds  # a part of it is worth nothing


def test_every_promotion_and_scatter_is_measured() -> None:
    core, prefix = Driver(slots=64), prefix_of("ab")
    core.fill("disk", prefix)
    options(core, "r", prefix)
    core.load("r", prefix)
    core.wait(0.5)
    core.run(directions=[Direction.PROMOTE])
    core.wait(0.25)
    core.run()
    estimators = core.cache._estimators
    assert (estimators["disk"].first_s, estimators["host"].first_s) == (pytest.approx(0.5), pytest.approx(0.25))
    assert not any(estimator.out for estimator in estimators.values())


# ---- budget --------------------------------------------------------------------------------------------------------


def load(core: Driver, prefix: Prefix, budget: LoadBudget, *, resident_tokens: int = 0) -> None:
    tokens = len(prefix.keys) * CHUNK
    options(core, "r", prefix)
    places = [
        Place(index, chunk, (chunk,))
        for index, group in enumerate(core.layout.groups)
        for chunk in needed_chunks(group, prefix, tokens)
        if (chunk + 1) * prefix.chunk_tokens > resident_tokens
    ]
    core.cache.load(RequestId("r"), prefix, tokens, places, core.now_s, resident_tokens=resident_tokens, budget=budget)
    core._take()


def promote(core: Driver, count: int) -> None:
    """The next `count` objects come, and are scattered."""
    for transfer in core.going(Direction.PROMOTE)[:count]:
        core.answer(transfer)
    core.run(directions=[Direction.SCATTER])


def filled(text: str, **rest: object) -> tuple[Driver, Prefix]:
    core, prefix = Driver(slots=64, **rest), prefix_of(text)
    core.fill("disk", prefix)
    return core, prefix


def test_a_load_of_which_nothing_comes_is_cut() -> None:
    core, prefix = filled("abcd")
    load(core, prefix, LoadBudget(1.0, 0.25))
    assert core.cache.next_deadline() == pytest.approx(1.0)
    core.wait(0.99)
    assert core.loaded() == []
    core.wait(0.01)
    (done,) = core.loaded()
    assert (done.tokens, done.wanted_tokens, done.was_cut) == (0, 4 * CHUNK, True)
    assert len(core.cancelled) == 4


def test_each_chunk_that_comes_is_worth_some_time() -> None:
    core, prefix = filled("abcd")
    load(core, prefix, LoadBudget(1.0, 0.25))  # a chunk of four tokens spares a second
    core.wait(0.5)
    promote(core, 1)
    assert core.cache.next_deadline() == pytest.approx(1.5)  # half a second was gained: the lowest regret is -0.5
    core.wait(0.9)
    promote(core, 1)
    assert core.cache.next_deadline() == pytest.approx(1.4 + 1.0)
    core.wait(1.0)
    assert core.loaded() == [LoadDone(RequestId("r"), 8, 16, ((0, 2), (0, 3)), (("disk", 8),), was_cut=True)]


def test_what_waiting_for_the_first_chunk_takes_is_remembered() -> None:
    core, prefix = filled("abcd")
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.wait(0.3)
    for transfer in core.going(Direction.PROMOTE)[1:]:
        core.answer(transfer)
    core.run(directions=[Direction.SCATTER])
    core.wait(0.4)
    promote(core, 1)
    assert (core.cache._estimators["disk"].first_s, core.cache._estimators["disk"].lead_s) == (
        pytest.approx(0.3),
        pytest.approx(0.7),
    )


def test_a_load_that_was_cut_before_anything_came_tells_that_it_takes_longer() -> None:
    core, prefix = filled("abcd")
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.wait(1.0)
    assert core.cache._estimators["disk"].lead_s == pytest.approx(1.0)


def test_a_load_that_was_cut_after_its_first_chunk_does_not_measure_it_again() -> None:
    core, prefix = filled("abcd")
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.wait(0.3)
    promote(core, 1)
    core.wait(2.0)
    assert core.loaded()[0].was_cut
    assert core.cache._estimators["disk"].lead_s == pytest.approx(0.3)
    assert core.cache._estimators["host"].lead_s == 0.0


def test_a_load_behind_others_does_not_measure_the_link() -> None:
    core, prefix = filled("abcd")
    core.fill("disk", prefix_of("xy"))
    options(core, "other", prefix_of("xy"))
    core.load("other", prefix_of("xy"))
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.wait(1.0)
    assert core.cache._estimators["disk"].lead_s == 0.0


def test_a_cut_waits_for_the_copies_into_the_engine() -> None:
    core, prefix = filled("ab")
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.answer(core.going(Direction.PROMOTE)[0])
    core.wait(1.0)
    assert core.loaded() == []
    core.run(directions=[Direction.SCATTER])
    (done,) = core.loaded()
    assert (done.tokens, done.was_cut) == (CHUNK, True)


def test_what_arrives_after_a_cut_is_kept() -> None:
    core, prefix = filled("ab")
    load(core, prefix, LoadBudget(1.0, 0.25))
    core.wait(1.0)
    for transfer in core.going(Direction.PROMOTE):
        core.answer(transfer, Outcome.DONE)
    assert core.lookup("again", prefix).ready_tokens == 2 * CHUNK
