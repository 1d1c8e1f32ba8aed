"""Stores: held objects are readable, slots are freed on demand, and deadlines end the wait."""

import pytest
from tests.core_driver import CHUNK, Driver, key, prefix_of

from kvtier.core import operations
from kvtier.core.limits import WritePolicy
from kvtier.layout import History, Window
from kvtier.types import Direction, Outcome, Presence, RequestId, StoreDone


def test_what_is_there_already_is_held_without_moving() -> None:
    core = Driver()
    core.store("a", prefix_of("ab"))
    core.store("b", prefix_of("abc"))
    assert len(core.going(Direction.GATHER)) == 3, "two are on their way, one is new"
    core.run()
    core.store("c", prefix_of("abc"))
    assert [one.stored for one in core.stored()] == [2, 3, 3]


def test_an_empty_store_ends_at_once() -> None:
    core = Driver()
    core.cache.store(RequestId("a"), prefix_of("a"), [], 0.0)
    assert core.cache.take_events() == [StoreDone(RequestId("a"), 0, 0)]


def test_a_store_gathers_an_object_whose_promotion_failed() -> None:
    core = Driver()
    core.load("r", prefix_of("a"))
    core.store("a", prefix_of("a"))
    core.answer(core.going(Direction.PROMOTE)[0], Outcome.FAILED)
    core.run()
    assert core.stored() == [StoreDone(RequestId("a"), 1, 0)]


def test_after_a_failed_gather_another_store_gathers_the_object() -> None:
    core = Driver(tiers=())
    core.store("a", prefix_of("a"))
    core.store("b", prefix_of("a"))
    core.answer(core.going(Direction.GATHER)[0], Outcome.FAILED)
    assert core.stored() == [StoreDone(RequestId("a"), 0, 1)]
    (again,) = core.going(Direction.GATHER)
    assert again.request == "b"
    core.answer(again)
    assert core.stored() == [StoreDone(RequestId("b"), 1, 0)]


def test_a_joined_store_drops_the_object_when_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "WAITING_MAX", 1)
    core = Driver(tiers=(), stores_in_flight=1)
    core.store("a", prefix_of("a"))
    core.store("b", prefix_of("a"))
    core.store("c", prefix_of("z"))  # waits for the gather's budget
    core.answer(core.going(Direction.GATHER)[0], Outcome.FAILED)
    done = {one.request: (one.stored, one.dropped) for one in core.stored()}
    assert done == {"a": (0, 1), "b": (0, 1)}


def test_a_child_leaves_before_its_parent() -> None:
    core = Driver(slots=4, tiers=())
    core.store_and_run("a", prefix_of("abcd"))
    core.store_and_run("b", prefix_of("z"))
    assert core.present() == {"a", "ab", "abc", "z"}


def test_a_prompt_that_is_used_again_outlives_one_that_is_not() -> None:
    core = Driver(slots=4, tiers=())
    for text in ("ab", "mn"):
        core.store_and_run(text, prefix_of(text))
    core.load_and_run("r", prefix_of("ab"))
    core.store_and_run("c", prefix_of("yz"))
    assert core.present() == {"a", "ab", "y", "yz"}


def test_a_store_waits_for_a_slot_until_its_deadline() -> None:
    core = Driver(slots=2, tiers=(), store_deadline_s=3.0)
    core.store("a", prefix_of("ab"))
    core.store("b", prefix_of("yz"))
    assert core.cache.next_deadline() == 3.0
    core.wait(2.0)
    assert not core.stored()
    core.wait(1.0)
    assert core.stored() == [StoreDone(RequestId("b"), 0, 2)], "the other one's gathers are out, and it waits for them"
    assert core.cache.next_deadline() is None
    core.run()
    assert core.stored() == [StoreDone(RequestId("a"), 2, 0)]
    assert core.cache.counters.stores_dropped == 2


def test_an_object_that_another_operation_brought_is_held_at_the_deadline() -> None:
    core = Driver(slots=2, store_deadline_s=10)
    core.store("m", prefix_of("m"))
    core.store("n", prefix_of("n"))
    core.run(directions=[Direction.GATHER])  # both slots are kept by what the tier is still to receive
    core.store("a", prefix_of("xy"))
    core.store("b", prefix_of("x"))
    core.answer(core.going(Direction.DEMOTE)[0])
    core.answer(core.going(Direction.GATHER)[0])
    assert [one.request for one in core.stored()] == ["m", "n"]
    core.wait(10)
    assert core.stored() == [StoreDone(RequestId("a"), 1, 1), StoreDone(RequestId("b"), 1, 0)]


def test_a_group_without_room_does_not_keep_others_waiting() -> None:
    core = Driver(groups=(History(), History()), slots=(2, 3))
    core.store_and_gather("m", prefix_of("mn"))
    core.store("a", prefix_of("x"), (0, 0))
    core.store("b", prefix_of("y"), (0, 0))
    core.store("c", prefix_of("z"), (1, 0))
    assert [one.request for one in core.going(Direction.GATHER)] == ["c"]


def test_a_released_store_begins_nothing_more() -> None:
    core = Driver(stores_in_flight=1, tiers=())
    core.store("a", prefix_of("ab"))
    core.store("b", prefix_of("abc"))
    core.release("b")
    assert core.stored() == [StoreDone(RequestId("b"), 0, 3)]
    core.answer(core.going(Direction.GATHER)[0], Outcome.FAILED)
    core.run()
    assert {one.request for one in core.sent} == {"a"}


def test_a_released_store_ends_when_its_gathers_have() -> None:
    core = Driver(stores_in_flight=1, tiers=())
    core.store("a", prefix_of("xy"))
    core.release("a")
    assert not core.stored(), "the blocks are still being read"
    core.run()
    assert core.stored() == [StoreDone(RequestId("a"), 1, 1)]


def test_only_so_much_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "WAITING_MAX", 3)
    core = Driver(slots=2, tiers=())
    core.store_and_run("a", prefix_of("abcdef"))
    assert core.stored() == [StoreDone(RequestId("a"), 3, 3)]


def test_a_session_reaches_the_transfer() -> None:
    core = Driver(tiers=())
    core.store("a", prefix_of("a"), conversation="chat")
    assert core.going(Direction.GATHER)[0].conversation == "chat"


@pytest.mark.parametrize(
    ("slots", "small_objects", "promotions", "demotions"),
    [(32, 0, 2, 3), (32, 2, 2, 3), (32, 5, 5, 5), (32, 99, 8, 8), (16, 99, 4, 4)],
    ids=["none", "fewer than the counts", "by bytes", "a quarter of the slots", "of fewer slots"],
)
def test_small_objects_go_beyond_the_counts_within_their_bytes(
    slots: int, small_objects: int, promotions: int, demotions: int
) -> None:
    core = Driver(slots=slots, loads_in_flight=2, writes_in_flight=3, small_bytes_in_flight=small_objects * 4096)
    assert {group.payload_bytes for group in core.layout.groups} == {4096}
    core.store_and_gather("a", prefix_of("abcdefghijkl"))
    core.fill("disk", prefix_of("mnopqrstuvwxyz"))
    core.load("b", prefix_of("mnopqrstuvwxyz"))
    assert len(core.going(Direction.DEMOTE)) == demotions
    assert len(core.going(Direction.PROMOTE)) == promotions
    core.answer(core.going(Direction.PROMOTE)[0])
    assert len(core.going(Direction.PROMOTE)) == promotions, "what came makes room for as much"
    core.run()
    assert core.loaded()[0].tokens == 14 * CHUNK


def test_a_large_object_does_not_go_beyond_the_counts() -> None:
    core = Driver(
        groups=(History(), Window(99)),
        payloads=(4096, 16384),
        slots=64,
        writes_in_flight=2,
        small_bytes_in_flight=5 * 4096,
    )
    core.store_and_gather("a", prefix_of("abcd"), (0, 0), (0, 1), (0, 2), (1, 3), (0, 3))
    assert [one.group for one in core.going(Direction.DEMOTE)] == [0, 0, 0]
    core.answer(core.going(Direction.DEMOTE)[0])
    assert [one.group for one in core.going(Direction.DEMOTE)] == [0, 0], (
        "a small one would fit, but none passes another"
    )
    core.answer(core.going(Direction.DEMOTE)[0])
    assert [one.group for one in core.going(Direction.DEMOTE)] == [0, 1]
    core.run()
    assert core.cache.pending_count == 0


def test_write_back_lets_as_many_small_objects_leave_as_may_be_on_their_way() -> None:
    core = Driver(slots=32, writes_in_flight=2, small_bytes_in_flight=6 * 4096, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("".join(chr(65 + n) for n in range(32))))
    core.store("b", prefix_of("0123456789"))
    assert len(core.going(Direction.DEMOTE)) == 6
    core.run()
    assert core.stored()[-1] == StoreDone(RequestId("b"), 10, 0)


def test_write_through_demotes_as_soon_as_the_copy_is_ready() -> None:
    core = Driver(tiers=("disk", "shared"))
    core.store("a", prefix_of("a"))
    assert not core.going(Direction.DEMOTE)
    core.answer(core.going(Direction.GATHER)[0])
    assert [one.tier for one in core.going(Direction.DEMOTE)] == ["disk", "shared"]
    assert core.cache.pending_count == 1
    core.run()
    assert core.cache.pending_count == 0


def test_write_back_demotes_when_an_object_has_to_leave() -> None:
    core = Driver(slots=2, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("ab"))
    assert not core.held["disk"]
    core.store("b", prefix_of("z"))
    assert core.cache.presence(key("ab"), 0) is Presence.READY, "a victim can be read until it is written"
    (demotion,) = core.going(Direction.DEMOTE)
    assert demotion.key == key("ab")
    core.run()
    assert core.held["disk"] == {(key("ab"), 0)}
    assert core.present() == {"a", "z"}


def test_write_back_keeps_a_victim_that_is_wanted_again() -> None:
    core = Driver(slots=2, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("ab"))
    core.store("b", prefix_of("z"))
    core.load("c", prefix_of("ab"))
    core.run(directions=[Direction.DEMOTE])
    assert core.present() == {"a", "ab"}, "it is being read"
    core.run()
    assert core.loaded()[0].tokens == 8
    assert core.stored()[-1].stored == 1


def test_write_back_lets_go_as_many_as_are_waited_for() -> None:
    core = Driver(slots=16, writes_in_flight=3, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("abcdefghijklmnop"))
    core.store("b", prefix_of("yz"))
    assert len(core.going(Direction.DEMOTE)) == 2
    core.store("c", prefix_of("stuvw"))
    assert len(core.going(Direction.DEMOTE)) == 3, "as many as the budget allows"
    core.run()
    assert core.stored()[-1].stored == 5


def test_write_back_to_a_tier_that_is_down_makes_room_at_once() -> None:
    core = Driver(slots=2, write_policy=WritePolicy.BACK, failures=1)
    core.store_and_run("a", prefix_of("ab"))
    core.store("b", prefix_of("yz"))
    core.answer(core.going(Direction.DEMOTE)[0], Outcome.FAILED, is_fault=True)
    assert not core.notices()[0].is_up
    assert len(core.going(Direction.GATHER)) == 2
    assert core.cache.counters.demotions_dropped == 2


def test_a_victim_that_is_on_its_way_does_not_shield_its_parents() -> None:
    core = Driver(slots=8, writes_in_flight=2, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("abcdefgh"))
    core.store("b", prefix_of("yz"))
    assert {one.key.decode() for one in core.going(Direction.DEMOTE)} == {"abcdefgh", "abcdefg"}


def test_without_tiers_write_back_owes_nothing() -> None:
    core = Driver(slots=2, tiers=(), write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("ab"))
    core.store("b", prefix_of("yz"))
    assert len(core.going(Direction.GATHER)) == 2


@pytest.mark.parametrize("uses", [1, 2, 3])
def test_the_selective_policy_demotes_at_the_nth_use(uses: int) -> None:
    core = Driver(write_policy=WritePolicy.SELECTIVE, selective_uses=uses)
    prompt = prefix_of("a")
    core.store_and_run("a", prompt)
    for use in range(2, 5):
        assert bool(core.held["disk"]) == (uses < use)
        core.load_and_run(f"r{use}", prompt)
    assert core.held["disk"]


def test_a_use_before_the_copy_is_there_counts() -> None:
    core = Driver(write_policy=WritePolicy.SELECTIVE, selective_uses=2)
    core.store("a", prefix_of("a"))
    core.store_and_run("b", prefix_of("a"))
    assert core.held["disk"]


def test_flush_demotes_pending_writes_parents_first() -> None:
    core = Driver(write_policy=WritePolicy.BACK, writes_in_flight=1)
    core.store_and_run("a", prefix_of("abc"))
    assert core.cache.pending_count == 3
    core.flush()
    core.run()
    assert [one.key.decode() for one in core.sent if one.direction is Direction.DEMOTE] == ["a", "ab", "abc"]
    assert core.cache.pending_count == 0
    core.flush()
    assert not core.out


def test_a_load_does_not_wait_for_a_demotion() -> None:
    core = Driver(slots=8, writes_in_flight=1)
    core.store_and_gather("a", prefix_of("abcdefgh"))
    assert len(core.going(Direction.DEMOTE)) == 1
    core.fill("disk", prefix_of("z"))
    core.load("r", prefix_of("z"))
    assert core.going(Direction.PROMOTE), "a pending write was dropped"
    assert core.cache.counters.demotions_dropped == 1
    core.run()
    assert len(core.held["disk"]) == 8


def test_a_copy_that_is_not_new_is_not_demoted_again() -> None:
    core = Driver()
    core.fill("disk", prefix_of("a"))
    core.load_and_run("r", prefix_of("a"))
    assert not [one for one in core.sent if one.direction is Direction.DEMOTE]


@pytest.mark.parametrize(
    "name", ["stores_in_flight", "scatters", "loads_in_flight", "writes_in_flight", "failures", "selective_uses"]
)
def test_a_budget_below_one_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Driver(**{name: 0})


@pytest.mark.parametrize("slots", [(1,), (4, 4), ()])
def test_a_cache_needs_two_slots_for_each_group(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="each of the 1 groups needs at least 2 slots"):
        Driver(slots=slots)
