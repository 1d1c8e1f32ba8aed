"""Hints about a prefix: what is retained stays, what is lowered goes first, a prefetch brings objects back by a time.

Each of them is bounded, and none changes what a load delivers.
"""

from collections import Counter
from functools import partial

import pytest
from tests.core_driver import LONG_S, Driver, key, prefix_of

from kvtier.core import hint_scheduler
from kvtier.core.limits import Limits, WritePolicy
from kvtier.layout import History, State
from kvtier.policy.registry import EVICTORS, make_evictor
from kvtier.types import Direction, Outcome, Priority

DOCUMENT, OTHER = prefix_of("abc"), prefix_of("xyz")


def scan(core: Driver, count: int = 30) -> None:
    """Store many other prompts."""
    for number in range(count):
        core.store_and_run(f"scan {number}", prefix_of(chr(1000 + number)))
        core.release(f"scan {number}")


def stored(**options) -> Driver:
    core = Driver(**options)
    core.store_and_run("r", DOCUMENT)
    return core


# ---- retain ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evictor", [partial(make_evictor, name) for name in EVICTORS], ids=EVICTORS)
@pytest.mark.parametrize("is_retained", [True, False])
def test_a_retained_prefix_survives_a_scan_until_its_time(evictor, is_retained):
    core = stored(evictor=evictor, tiers=())
    if is_retained:
        core.retain(DOCUMENT, 10.0)
    scan(core)
    assert ({"a", "ab", "abc"} <= core.present()) is is_retained
    core.wait(10.0)
    scan(core)
    assert not {"a", "ab", "abc"} & core.present()


def test_at_most_a_share_is_retained_the_start_of_a_prefix_first_and_the_oldest_ends():
    core = stored(slots=8, retained_share=0.5, tiers=())
    core.store_and_run("long", prefix_of("123456"))
    core.retain(DOCUMENT, 10.0)
    core.retain(prefix_of("123456"), 5.0)
    scan(core)
    assert core.present() >= {"1", "12", "123", "1234"}, "the new one has the whole share"
    assert not {"a", "12345"} & core.present()


def test_a_longer_retention_of_the_same_objects_counts():
    core = stored(tiers=())
    core.retain(DOCUMENT, 2.0)
    core.retain(prefix_of("ab"), 10.0)
    core.retain(DOCUMENT, 1.0)
    core.wait(5.0)
    scan(core)
    assert {"a", "ab"} <= core.present()
    assert "abc" not in core.present()


def test_a_longer_prompt_with_a_shorter_time_ends_nothing_of_itself():
    core = Driver(slots=8, retained_share=0.5, tiers=())
    core.store_and_run("r", prefix_of("abcdef"))
    core.retain(prefix_of("abcd"), 600.0)
    core.retain(prefix_of("abcdef"), 300.0)
    scan(core)
    assert core.present() >= {"a", "ab", "abc", "abcd"}


def test_what_several_retain_ends_after_what_one_of_them_retains():
    core = Driver(slots=10, retained_share=0.5, tiers=())
    for number, prompt in enumerate(("abcd", "abx", "pq")):
        core.store_and_run(f"r{number}", prefix_of(prompt))
    core.retain(prefix_of("abcd"), 600.0)
    core.retain(prefix_of("abx"), 300.0)
    core.retain(prefix_of("pq"), 500.0)
    scan(core)
    assert core.present() >= {"a", "ab", "abx", "p", "pq"}
    assert not {"abc", "abcd"} & core.present()


def test_high_priority_outlasts_the_others():
    core = stored(slots=8, tiers=())
    core.store_and_run("other", OTHER)
    core.retain(DOCUMENT, 10.0, Priority.HIGH)
    core.retain(OTHER, 10.0)
    scan(core)
    assert core.present() >= {"a", "ab", "abc", "x"}, "four slots are retained"
    assert "xy" not in core.present()
    core.store_and_run("more", prefix_of("pqrs"))
    core.retain(prefix_of("pqrs"), 9.0, Priority.HIGH)
    scan(core)
    assert core.present() >= {"p", "pq", "pqr", "pqrs"}
    assert not {"a", "x"} & core.present()


def test_one_hint_retains_at_most_its_share_and_the_operator_all_that_may_be_retained():
    core = stored(slots=8, hint_share=0.25, tiers=())
    for number in range(2):
        core.retain(DOCUMENT, 10.0)
        assert core.cache.hints.retention.counts == [2]
        assert core.cache.counters.refused_hints == Counter({"retained": number + 1})
    core.store_and_run("long", prefix_of("123456"))
    core.retain(prefix_of("123456"), 10.0, Priority.OPERATOR)
    scan(core)
    assert {it for it in core.present() if it.startswith("1")} == {"1", "12", "123", "1234"}
    assert core.cache.counters.refused_hints == Counter({"retained": 2}), "the operator's is no hint of a request"
    core.store_and_run("short", prefix_of("p"))
    core.cache.hints.end(prefix_of("1234"))
    core.retain(prefix_of("p"), 10.0)
    assert core.cache.counters.refused_hints == Counter({"retained": 2}), "the control: all of it is retained"


@pytest.mark.parametrize("share", [0.01, 0.25])
def test_a_small_host_memory_retains_one_object_of_a_hint(share):
    core = stored(slots=4, hint_share=share, tiers=())
    core.retain(DOCUMENT, 10.0)
    assert core.cache.hints.retention.counts == [1]


def test_what_the_operator_retains_outlasts_a_high_priority():
    core = stored(slots=8, tiers=())
    core.retain(DOCUMENT, 10.0, Priority.OPERATOR)
    core.store_and_run("other", OTHER)
    core.retain(OTHER, 10.0, Priority.HIGH)
    core.retain(DOCUMENT, 10.0, Priority.HIGH)  # a request names the same prompt
    scan(core)
    assert core.present() >= {"a", "ab", "abc", "x"}
    assert "xy" not in core.present()


@pytest.mark.parametrize("longer", Priority)
@pytest.mark.parametrize("priority", Priority)
def test_the_end_of_the_highest_priority_counts(priority, longer):
    core = stored(tiers=())
    core.retain(DOCUMENT, 10.0, priority)
    core.retain(DOCUMENT, 100.0, longer)
    core.retain(DOCUMENT, 1.0, longer)
    core.wait(10.0)
    scan(core)
    assert ({"a", "ab", "abc"} <= core.present()) is (longer >= priority)


def test_a_retention_is_no_longer_than_the_limit():
    core = stored(retain_s=3.0, tiers=())
    core.retain(DOCUMENT, 1e9)
    core.wait(3.0)
    scan(core)
    assert not {"a", "ab", "abc"} & core.present()


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_of_everything_is_refused(share):
    with pytest.raises(ValueError, match="retained_share must be at least 0 and less than 1"):
        Limits(retained_share=share)


def test_nothing_is_retained_without_a_share():
    core = stored(retained_share=0.0, tiers=())
    core.retain(DOCUMENT, 10.0)
    scan(core)
    assert "a" not in core.present()


def test_a_store_and_a_load_find_room_while_half_of_a_small_host_memory_is_retained():
    core = stored(slots=2)
    core.retain(DOCUMENT, LONG_S)
    core.fill("disk", OTHER)
    core.lookup_and_run("l", OTHER)
    core.load_and_run("l", OTHER)
    assert [done.tokens for done in core.loaded()] == [OTHER.tokens]
    core.stored()
    core.store_and_run("s", prefix_of("pq"))
    assert [done.stored for done in core.stored()] == [2]


@pytest.mark.parametrize("policy", [WritePolicy.BACK, WritePolicy.SELECTIVE])
def test_retained_objects_are_written_whatever_the_write_policy(policy):
    core = stored(write_policy=policy)
    assert not core.held["disk"]
    core.retain(DOCUMENT, 10.0)
    core.run()
    assert core.held["disk"] == {(name, 0) for name in DOCUMENT.keys}


@pytest.mark.parametrize("policy", [WritePolicy.BACK, WritePolicy.SELECTIVE])
def test_what_leaves_for_a_prefetch_is_written_and_what_is_only_lowered_is_not(policy):
    core = stored(write_policy=policy)
    core.lower(DOCUMENT)
    core.run()
    assert not core.held["disk"]
    core.prefetch("p", DOCUMENT, 100.0)
    core.run()
    assert core.held["disk"] == {(name, 0) for name in DOCUMENT.keys}


def test_a_hint_waits_for_the_open_stores_of_its_prefix():
    core = Driver(tiers=())
    core.store("r", DOCUMENT)
    core.retain(prefix_of("abcd"), 10.0)
    core.run()
    scan(core)
    assert {"a", "ab", "abc"} <= core.present()


def test_hints_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(hint_scheduler, "WAITING_HINTS_MAX", 2)
    core = Driver(tiers=(), slots=12)
    prompts = [prefix_of(letter) for letter in "abc"]
    for number, prompt in enumerate(prompts):
        core.store(f"r{number}", prompt)
        core.retain(prompt, 10.0)
    core.run()
    scan(core)
    assert {"b", "c"} <= core.present()
    assert "a" not in core.present()
    assert core.cache.counters.refused_hints == Counter({"waiting": 1})


def test_the_operators_hints_wait_longer_than_those_of_clients(monkeypatch):
    monkeypatch.setattr(hint_scheduler, "WAITING_HINTS_MAX", 2)
    core = Driver(tiers=(), slots=12)
    for letter in "abc":
        core.store(letter, prefix_of(letter))
        core.retain(prefix_of(letter), 10.0, Priority.OPERATOR if letter == "a" else Priority.NORMAL)
    core.run()
    scan(core)
    assert {"a", "c"} <= core.present()
    assert "b" not in core.present()


def test_an_object_that_leaves_is_wanted_again_when_it_is_retained():
    core = Driver(write_policy=WritePolicy.BACK, slots=2)
    core.store_and_run("r", prefix_of("ab"))
    core.store("other", prefix_of("x"))
    assert core.going(Direction.DEMOTE), "the victim is written"
    core.retain(prefix_of("ab"), 10.0)
    core.run()
    assert {"a"} <= core.present()


def test_all_hints_end_at_once():
    core = stored()
    core.retain(DOCUMENT, 10.0)
    core.prefetch("p", OTHER, 100.0)
    core.cache.forget_hints()
    core.wait(0)
    scan(core)
    assert not {"a", "ab", "abc"} & core.present()
    core.wait(200.0)
    assert not core.going(Direction.PROMOTE)
    assert core.cache.next_deadline() is None


# ---- lower -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evictor", [partial(make_evictor, name) for name in EVICTORS], ids=EVICTORS)
@pytest.mark.parametrize("is_over", [True, False])
def test_what_an_ended_conversation_used_alone_goes_first(evictor, is_over):
    core = Driver(slots=8, tiers=(), evictor=evictor)
    core.store_and_run("main", prefix_of("ab"), conversation="main")
    core.store_and_run("other", OTHER, conversation="other")
    core.store_and_run("sub", prefix_of("abcd"), conversation="sub")  # uses the other's start
    if is_over:
        core.lower(prefix_of("abcd"), "sub")
    core.store_and_run("next", prefix_of("pqr"))
    gone = {"a", "ab", "abc", "abcd", "x", "xy", "xyz"} - core.present()
    assert (gone == {"abc", "abcd"}) is is_over


def test_without_a_conversation_only_what_was_used_once_goes_first():
    core = Driver(slots=6, tiers=())
    core.store_and_run("other", prefix_of("xy"))
    core.store_and_run("first", prefix_of("ab"))
    core.store_and_run("second", prefix_of("abcd"))
    core.lower(prefix_of("abcd"))
    core.store_and_run("next", prefix_of("pqrs"))
    assert core.present() == {"a", "ab", "p", "pq", "pqr", "pqrs"}


def test_what_another_conversation_has_used_since_is_not_lowered():
    core = Driver(slots=6, tiers=())
    core.store_and_run("other", prefix_of("xy"), conversation="other")
    core.store_and_run("first", prefix_of("abcd"), conversation="first")
    core.load_and_run("second", prefix_of("ab"), conversation="second")
    core.lower(prefix_of("abcd"), "first")
    core.store_and_run("next", prefix_of("pqrs"))
    assert core.present() == {"a", "ab", "p", "pq", "pqr", "pqrs"}


def test_the_next_use_takes_the_hint_back():
    core = Driver(slots=5, tiers=())
    core.store_and_run("sub", prefix_of("ab"), conversation="sub")
    core.store_and_run("other", OTHER)
    core.lower(prefix_of("ab"), "sub")
    core.load_and_run("again", prefix_of("ab"), conversation="sub")
    core.store_and_run("next", prefix_of("p"))
    assert core.present() == {"a", "ab", "x", "xy", "p"}


def test_what_is_lowered_can_be_retained_and_the_other_way_round():
    core = stored(tiers=())
    core.lower(DOCUMENT)
    core.retain(DOCUMENT, 10.0)
    core.lower(DOCUMENT)
    scan(core)
    assert {"a", "ab", "abc"} <= core.present()


# ---- prefetch ----------------------------------------------------------------------------------------------------


def test_a_prefetch_brings_the_leading_chunks_from_a_tier_and_says_nothing():
    core = Driver(groups=(History(), State()))
    core.fill("disk", prefix_of("abc"))
    core.prefetch("p", prefix_of("abcd"))
    core.run()
    assert core.present() == {"a", "ab", "abc"}
    assert core.cache.host.readable[1] == {key("abc")}, "of states the last"
    assert core.events == []
    assert not core.cache._probes._answers
    assert core.lookup("r", prefix_of("abcd")).ready_tokens == prefix_of("abc").tokens
    core.load_and_run("r", prefix_of("abc"))
    assert [done.sources for done in core.loaded()] == [(("host", prefix_of("abc").tokens),)]


def test_prefetched_objects_stay_for_a_while():
    core = Driver()
    core.fill("disk", DOCUMENT)
    core.prefetch("p", DOCUMENT)
    core.run()
    scan(core)
    assert {"a", "ab", "abc"} <= core.present()
    core.wait(hint_scheduler.KEEP_S)
    scan(core)
    assert not {"a", "ab", "abc"} & core.present()


def test_a_conversation_that_waits_leaves_and_is_back_at_its_time():
    core = Driver(slots=8)
    core.store_and_run("turn", DOCUMENT, conversation="c")
    core.store_and_run("other", OTHER, conversation="other")
    core.prefetch("p", DOCUMENT, 20.0, "c")
    core.store_and_run("more", prefix_of("pqrs"))
    assert core.present() >= {"x", "xy", "xyz"}, "the waiting conversation goes first"
    assert "abc" not in core.present()
    core.wait(18.0)
    assert not core.going(Direction.PROMOTE)
    core.wait(1.5)
    core.run()
    assert {"a", "ab", "abc"} <= core.present()


def test_a_prefetch_yields_to_loads():
    core = Driver(loads_in_flight=1, slots=24)
    core.fill("disk", DOCUMENT)
    core.fill("disk", OTHER)
    core.prefetch("p", DOCUMENT)
    core.lookup("l", OTHER)
    core.run(directions=[])
    core.load("l", OTHER)
    while not core.loaded():
        core.run(directions=[Direction.SCATTER])
        for promote in core.going(Direction.PROMOTE):
            core.answer(promote)
    order = [one.key.decode() for one in core.sent if one.direction is Direction.PROMOTE]
    assert order == ["a", "x", "xy", "xyz", "ab", "abc"]


def test_a_prefetch_from_another_tier_yields_to_loads_as_well():
    core = Driver(tiers=("disk", "far"), loads_in_flight=1, slots=24)
    core.fill("disk", OTHER)
    core.fill("far", DOCUMENT)
    core.lookup_and_run("l", OTHER)
    core.load("l", OTHER)
    core.prefetch("p", DOCUMENT)
    core.run(directions=[])
    assert [one.key for one in core.going(Direction.PROMOTE)] == [key("x")]
    while not core.loaded():
        core.run(directions=[Direction.SCATTER])
        for promote in core.going(Direction.PROMOTE, "disk"):
            core.answer(promote)
    core.run()
    assert {"a", "ab", "abc"} <= core.present()


def test_a_load_uses_what_a_prefetch_is_bringing():
    core = Driver(slots=40)
    core.fill("disk", DOCUMENT)
    core.prefetch("p", DOCUMENT)
    core.run(directions=[])
    assert len(core.going(Direction.PROMOTE)) == len(DOCUMENT.keys)
    core.lookup("l", DOCUMENT)
    core.load_and_run("l", DOCUMENT)
    assert [done.tokens for done in core.loaded()] == [DOCUMENT.tokens]
    assert len([one for one in core.sent if one.direction is Direction.PROMOTE]) == len(DOCUMENT.keys)


def test_a_prefetch_takes_half_of_what_a_tier_may_have_in_flight():
    core = Driver(loads_in_flight=4, slots=40)
    core.fill("disk", prefix_of("abcdefgh"))
    core.prefetch("p", prefix_of("abcdefgh"))
    core.run(directions=[])
    assert len(core.going(Direction.PROMOTE)) == 2


def test_a_prefetch_is_no_longer_than_the_retained_share():
    core = Driver(slots=8)
    core.fill("disk", prefix_of("abcdefgh"))
    core.prefetch("p", prefix_of("abcdefgh"))
    core.run()
    assert core.present() == {"a", "ab", "abc", "abcd"}


@pytest.mark.parametrize("how", ["release", "deadline"])
def test_a_prefetch_that_hangs_is_cancelled(how):
    core = Driver(loads_in_flight=2)
    core.fill("disk", DOCUMENT)
    core.prefetch("p", DOCUMENT)
    core.run(directions=[])
    (promote,) = core.going(Direction.PROMOTE)
    if how == "release":
        core.release("p")
    else:
        core.wait(hint_scheduler.KEEP_S)
    assert core.cancelled == [promote.id]
    core.answer(promote, Outcome.CANCELLED)
    assert core.cache.next_deadline() is None
    assert core.events == []


def test_a_prefetch_brings_what_is_before_a_hole():
    core = Driver()
    core.fill("disk", prefix_of("abcd"))
    core.held["disk"].discard((key("abc"), 0))
    core.prefetch("p", prefix_of("abcd"))
    core.run()
    assert core.present() == {"a", "ab"}


def test_a_prefetch_of_what_has_gone_since_the_answer_ends():
    core = Driver()
    core.fill("disk", DOCUMENT)
    core.prefetch("p", DOCUMENT)
    core.run(directions=[])
    core.held["disk"].discard((key("ab"), 0))
    core.run()
    assert core.present() == {"a"}
    assert not core.cache._operations.prefetches
    assert core.events == []


def test_prefetches_are_bounded(monkeypatch):
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 1)
    core = Driver()
    core.fill("disk", DOCUMENT)
    core.fill("disk", OTHER)
    core.prefetch("p", OTHER)
    core.prefetch("q", DOCUMENT)
    core.run()
    assert core.present() == {"x", "xy", "xyz"}
    assert core.cache.counters.refused_hints == Counter({"prefetches": 1})


def prefetched(core: Driver) -> set[str]:
    """Prompts that have been asked for."""
    return {one.key.decode() for one in core.sent if one.direction is Direction.PROMOTE}


def test_the_prefetch_that_is_due_latest_gives_up_its_place(monkeypatch):
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 2)
    core = Driver(slots=24)
    for letter in "abcde":
        core.fill("disk", prefix_of(letter))
    core.prefetch("a", prefix_of("a"), 1800.0)
    core.prefetch("b", prefix_of("b"), 3600.0)
    core.prefetch("c", prefix_of("c"), 20.0)  # in place of b
    core.prefetch("d", prefix_of("d"), 3600.0)  # too late
    core.prefetch("e", prefix_of("e"), 1800.0)  # no earlier
    assert core.cache.counters.refused_hints == Counter({"prefetches": 3})
    core.wait(19.5)
    core.run()
    assert prefetched(core) == {"c"}
    core.wait(1780.0)
    core.run()
    core.wait(3600.0)
    core.run()
    assert prefetched(core) == {"a", "c"}
    assert core.cache.next_deadline() is None


def test_a_prefetch_whose_tiers_are_asked_gives_up_its_place(monkeypatch):
    """Nothing of it is left, and its answer comes to nobody."""
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 1)
    core = Driver(slots=24)
    core.fill("disk", DOCUMENT)
    core.fill("disk", OTHER)
    core.prefetch("p", DOCUMENT, 0.9)
    assert core.probes
    core.prefetch("q", OTHER)
    core.run()
    assert prefetched(core) == {"x", "xy", "xyz"}
    assert not core.cache._probes._answers


@pytest.mark.parametrize("priority", Priority)
def test_the_operators_prefetches_have_places_of_their_own_and_come_first(monkeypatch, priority):
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 1)
    core = Driver(slots=40, loads_in_flight=2)
    core.fill("disk", prefix_of("abcdefgh"))
    core.fill("disk", OTHER)
    core.prefetch("p", prefix_of("abcdefgh"))
    core.run(directions=[])
    assert len(core.going(Direction.PROMOTE)) == 1
    core.prefetch("q", OTHER, priority=priority)
    core.run()
    order = [one.key.decode() for one in core.sent if one.direction is Direction.PROMOTE]
    is_operators = priority is Priority.OPERATOR
    assert order[1:4] == (["x", "xy", "xyz"] if is_operators else ["ab", "abc", "abcd"])
    assert core.cache.counters.refused_hints == Counter({} if is_operators else {"prefetches": 1})


def test_a_prefetch_of_a_client_is_no_longer_than_the_share_of_a_hint():
    core = Driver(slots=8, hint_share=0.25)
    core.fill("disk", prefix_of("abcdefgh"))
    core.prefetch("p", prefix_of("abcdefgh"))
    core.run()
    assert core.present() == {"a", "ab"}
    assert core.cache.counters.refused_hints == Counter({"retained": 1})
    core.prefetch("q", prefix_of("abcdefgh"), priority=Priority.OPERATOR)
    core.run()
    assert core.present() == {"a", "ab", "abc", "abcd"}
    core.prefetch("r", prefix_of("ab"))
    core.run()
    assert core.cache.counters.refused_hints == Counter({"retained": 1}), "the control: it is not cut"


def test_the_operators_hints_are_not_counted_with_those_of_requests(monkeypatch):
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 1)
    monkeypatch.setattr(hint_scheduler, "WAITING_HINTS_MAX", 1)
    for priority in (Priority.OPERATOR, Priority.HIGH):
        core = Driver(slots=8, retained_share=0.25)
        core.store("r", DOCUMENT)
        for name in "pq":
            core.prefetch(name, prefix_of("v"), priority=priority)
            core.retain(DOCUMENT, 10.0, priority)
        core.run()
        refused = (
            Counter() if priority is Priority.OPERATOR else Counter({"prefetches": 1, "waiting": 1, "retained": 1})
        )
        assert core.cache.counters.refused_hints == refused


@pytest.mark.parametrize("in_s", [0.0, 1800.0])
def test_a_prefetch_that_is_late_holds_its_place_for_a_short_while(monkeypatch, in_s):
    monkeypatch.setattr(hint_scheduler, "PREFETCHES_MAX", 1)
    core = Driver(slots=24)
    core.fill("disk", DOCUMENT)
    core.fill("disk", OTHER)
    core.prefetch("slow", DOCUMENT, in_s)
    core.wait(in_s)
    core.run(directions=[])
    core.prefetch("q", OTHER)
    assert core.cache.counters.refused_hints == Counter({"prefetches": 1}), "the control: its place is held"
    core.wait(hint_scheduler.KEEP_S)
    for promote in core.going(Direction.PROMOTE):
        core.answer(promote, Outcome.CANCELLED)
    core.prefetch("q", OTHER)
    core.run()
    assert {"x", "xy", "xyz"} <= core.present()


def test_what_a_prefetch_has_brought_stays_as_long_again_as_it_was_given():
    core = Driver()
    core.fill("disk", DOCUMENT)
    core.prefetch("p", DOCUMENT, 100.0)
    core.wait(99.5)
    core.run()
    core.wait(100.0)
    scan(core)
    assert {"a", "ab", "abc"} <= core.present()
