"""Loads: bytes are transferred once, every wait ends, and the reported tokens are delivered."""

import pytest
from tests.core_driver import CHUNK, Driver, key, prefix_of

from kvtier.core.limits import WritePolicy
from kvtier.layout import History, Window
from kvtier.types import Direction, LoadDone, Outcome, Place, Presence, RequestId


def test_what_is_in_host_memory_is_ready_and_scattered_at_once() -> None:
    core = Driver()
    prompt = prefix_of("abc")
    core.store_and_run("a", prompt)
    answer = core.lookup("b", prompt)
    assert (answer.tokens, answer.ready_tokens, answer.presence) == (12, 12, Presence.READY)
    assert answer.sources == (("host", 12),)
    core.load("b", prompt)
    assert len(core.going(Direction.SCATTER)) == 3
    core.run()
    assert core.loaded() == [LoadDone(RequestId("b"), 12, 12, (), (("host", 12),))]


def test_one_promotion_serves_all_waiting_loads() -> None:
    core = Driver()
    prompt = prefix_of("ab")
    core.fill("disk", prompt)
    for request in "xyz":
        core.load(request, prompt)
    core.run()
    assert sum(one.direction is Direction.PROMOTE for one in core.sent) == 2
    assert sum(one.direction is Direction.SCATTER for one in core.sent) == 6
    done = core.loaded()
    assert [one.tokens for one in done] == [8, 8, 8]
    assert done[0].sources == (("disk", 8),)
    assert done[1].sources == (("host", 8),), "only one of them came from the disk"


def test_a_load_whose_gather_fails_under_it_asks_the_tiers() -> None:
    core = Driver()
    prompt = prefix_of("a")
    core.fill("disk", prompt)
    core.store("a", prompt)
    core.load("b", prompt)
    core.answer(core.going(Direction.GATHER)[0], Outcome.FAILED)
    core.run()
    assert core.stored()[0].dropped == 1
    assert core.loaded()[0].sources == (("disk", 4),)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_a_prefix_larger_than_host_memory_streams_despite_pending_writes(policy: WritePolicy) -> None:
    core = Driver(slots=4, write_policy=policy, selective_uses=1)
    core.store_and_gather("a", prefix_of("0123"))
    prompt = prefix_of("abcdefgh")
    core.fill("disk", prompt)
    core.load_and_run("b", prompt)
    assert core.loaded()[0].tokens == 8 * CHUNK


def test_loads_come_before_stores() -> None:
    core = Driver(slots=4, loads_in_flight=1)
    core.store("a", prefix_of("0123"))
    core.run(directions=[Direction.GATHER])  # every slot is owed to the disk, or being written to it
    prompt = prefix_of("ab")
    core.fill("disk", prompt)
    core.load("b", prompt)
    core.store("c", prefix_of("wxyz"))
    assert not [one for one in core.going(Direction.GATHER) if one.request == "c"][1:], (
        "the load has the first free slot"
    )
    core.run()
    assert core.loaded()[0].tokens == 8
    assert [one.stored for one in core.stored()] == [4, 4]


def test_a_starving_load_holds_back_the_stores() -> None:
    core = Driver(slots=(2, 8), groups=(History(), Window(4)), stores_in_flight=8)
    core.store("a", prefix_of("01"), (0, 0), (0, 1))
    assert len(core.going(Direction.GATHER)) == 2  # group 0 has no slot to give while these are out
    prompt = prefix_of("ab")
    core.fill("disk", prompt)
    core.load("b", prompt)
    core.store("c", prefix_of("yz"), (1, 0))
    assert len(core.going(Direction.GATHER)) == 2
    core.run()
    assert core.loaded()[0].tokens == 8
    assert core.stored()[-1].stored == 1


def test_a_chunk_that_no_tier_has_ends_the_load_short() -> None:
    core = Driver(loads_in_flight=1)
    prompt = prefix_of("abcd")
    core.fill("disk", prefix_of("ab"))
    core.load_and_run("r", prompt)
    assert core.loaded() == [LoadDone(RequestId("r"), 8, 16, ((0, 2), (0, 3)), (("disk", 8),))]
    assert key("abcd") not in {one.key for one in core.sent}, "past a hole nothing is promoted"


def test_what_is_coming_past_a_hole_is_not_scattered() -> None:
    core = Driver(slots=16)
    core.load("r", prefix_of("abc"))
    first, *others = core.going(Direction.PROMOTE)
    core.answer(first, Outcome.ABSENT)
    core.answer(others[0], Outcome.ABSENT)
    core.answer(others[1])
    assert core.loaded()[0].tokens == 0
    assert not core.going(Direction.SCATTER)


def test_a_corrupt_copy_is_dropped_and_the_next_tier_tried() -> None:
    core = Driver(tiers=("disk", "shared"))
    prompt = prefix_of("a")
    core.load("r", prompt)
    (first,) = core.going(Direction.PROMOTE)
    assert first.tier == "disk"
    core.answer(first, Outcome.CORRUPT)
    assert [(drop.tier, drop.key) for drop in core.drops] == [("disk", key("a"))]
    (second,) = core.going(Direction.PROMOTE)
    assert second.tier == "shared"
    core.answer(second)
    core.run()
    assert core.loaded()[0].sources == (("shared", 4),)
    assert core.cache.counters.corrupt == 1


def test_a_promotion_that_was_cancelled_is_not_held_against_the_tier() -> None:
    core = Driver()
    prompt = prefix_of("a")
    core.fill("disk", prompt)
    core.load("x", prompt)
    (one,) = core.going(Direction.PROMOTE)
    core.release("x")
    assert core.loaded()[0].tokens == 0
    assert core.cancelled == [one.id]
    core.load("y", prompt)  # before the cancellation is answered
    assert core.going(Direction.PROMOTE) == [one]
    core.answer(one, Outcome.CANCELLED)
    core.run()
    assert core.loaded()[0].tokens == 4


def test_a_second_release_does_not_cancel_again() -> None:
    core = Driver()
    for request in "xy":
        core.load(request, prefix_of("a"))
        core.release(request)
    assert len(core.cancelled) == 1


def test_what_came_and_went_since_the_tiers_were_asked_is_sought_below_too() -> None:
    core = Driver(slots=2)
    prompt = prefix_of("ab")
    core.lookup("r", prompt)
    core.run()  # the disk says no
    core.store_and_run("a", prompt)
    assert core.lookup("r", prompt).tokens == 8
    core.store_and_run("b", prefix_of("yz"))
    core.load_and_run("r", prompt)
    assert core.loaded()[0].tokens == 8


def test_a_load_past_its_deadline_waits_for_its_scatters() -> None:
    core = Driver(load_deadline_s=5.0, scatters=1)
    prompt = prefix_of("ab")
    core.store_and_run("a", prompt)
    core.load("r", prompt)
    (scatter,) = core.going(Direction.SCATTER)
    core.wait(5.0)
    assert not core.loaded(), "its blocks are still being written"
    assert core.cancelled == [scatter.id]
    assert core.cache.next_deadline() is None
    core.answer(scatter)
    assert core.loaded()[0].tokens == 4


def test_a_load_that_is_released_leaves_the_others_scatters_alone() -> None:
    core = Driver(scatters=1)
    prompt = prefix_of("ab")
    core.store_and_run("a", prompt)
    core.load("x", prompt)
    core.load("y", prompt)
    core.release("x")
    core.run()
    assert {one.request: one.tokens for one in core.loaded()} == {"x": 4, "y": 8}


def test_of_resident_tokens_nothing_is_asked() -> None:
    core = Driver()
    prompt = prefix_of("abc")
    core.store_and_run("a", prompt)
    core.load("r", prompt, resident_tokens=5)
    assert {one.key.decode() for one in core.going(Direction.SCATTER)} == {"ab", "abc"}
    core.run()
    assert core.loaded()[0].sources == (("host", 7),)


@pytest.mark.parametrize(
    ("tokens", "places", "resident", "message"),
    [
        (5, [], 0, "not a boundary"),
        (16, [], 0, "16 tokens are not a boundary"),
        (8, [Place(0, 0, ()), Place(0, 2, ())], 0, "outside the prefix"),
        (8, [Place(1, 0, ())], 0, "outside the prefix"),
        (4, [Place(0, 0, ()), Place(0, 1, ())], 0, "past the 4 tokens"),
        (4, [Place(0, 0, ()), Place(0, 0, (1,))], 0, "twice"),
        (8, [Place(0, 1, ())], 3, "needs chunk 0 of group 0"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused_before_anything_moves(
    tokens: int, places: list[Place], resident: int, message: str
) -> None:
    core = Driver()
    with pytest.raises(ValueError, match=message):
        core.cache.load(RequestId("r"), prefix_of("ab"), tokens, places, 0.0, resident_tokens=resident)
    assert not core.cache.take_commands()
    core.load("r", prefix_of("ab"))


def test_a_request_loads_one_thing_at_a_time() -> None:
    core = Driver()
    core.load("r", prefix_of("a"))
    with pytest.raises(ValueError, match="under way"):
        core.load("r", prefix_of("b"))


def test_an_empty_load_ends_at_once() -> None:
    core = Driver()
    core.load("r", prefix_of("ab"), 8, resident_tokens=8)
    assert core.loaded() == [LoadDone(RequestId("r"), 8, 8, ())]


def test_stop_ends_everything_and_begins_nothing() -> None:
    core = Driver(slots=2, stores_in_flight=1)
    core.fill("disk", prefix_of("ab"))
    core.load("x", prefix_of("ab"))
    core.store("y", prefix_of("yz"))
    core.store("z", prefix_of("mn"))
    begun = len(core.sent)
    core.cache.stop(0.0)
    core.run()
    assert not [one for one in core.sent[begun:] if one.direction is not Direction.DEMOTE]
    assert len(core.loaded()) == 1
    assert len(core.stored()) == 2
    assert core.cache.in_flight == 0


def test_one_load_goes_on_with_what_another_one_promotes() -> None:
    """A load whose next object waits for the tier's budget takes it from a load that got it first."""
    core = Driver(tiers=("disk", "shared"), loads_in_flight=1, slots=16)
    core.fill("shared", prefix_of("a"))
    core.fill("disk", prefix_of("b"))
    core.lookup_and_run("x", prefix_of("a"))
    core.load("p", prefix_of("b"))  # takes the disk's budget
    core.load("q", prefix_of("a"))  # without a lookup: tries the disk first, which is busy
    assert len(core.going(Direction.PROMOTE)) == 1
    core.load("x", prefix_of("a"))  # knows that it is on the shared tier
    assert {one.tier for one in core.going(Direction.PROMOTE)} == {"disk", "shared"}
    core.run()
    assert [one.tokens for one in core.loaded()] == [4, 4, 4]
    assert len([one for one in core.sent if one.direction is Direction.PROMOTE]) == 2


def test_a_load_comes_before_stores_that_wait_for_the_slot_of_what_it_loads() -> None:
    """Even if the transfer that protected the object has just ended and `advance` has not been called."""
    core, prefix = Driver(slots=2, tiers=()), prefix_of("ab")
    core.store_and_run("r", prefix)
    core.load("first", prefix)
    core.store("other", prefix_of("c"))
    for scatter in core.going(Direction.SCATTER):
        core.cache.complete(scatter.id, Outcome.DONE, core.now_s)
    core.load_and_run("second", prefix)
    assert {done.request: done.tokens for done in core.loaded()} == {"first": 2 * CHUNK, "second": 2 * CHUNK}


def test_a_lookup_says_how_far_the_history_reaches_without_the_window() -> None:
    """Where another prompt parted: the window at that point was never stored."""
    core = Driver(groups=(History(), Window(4)), slots=16, tiers=())
    first, second = prefix_of("abcde"), prefix_of("abcxy")
    core.store_and_run("a", first, *((0, chunk) for chunk in range(5)), (1, 4))
    assert core.lookup("b", first).tokens == 20
    parted = core.lookup("c", second)
    assert (parted.tokens, parted.history_tokens, parted.presence) == (0, 12, Presence.ABSENT)
    core.store_and_run("c", second, (1, 2))
    found = core.lookup("d", second)
    assert (found.tokens, found.history_tokens) == (12, 12)
    nothing = Driver(groups=(Window(4),), slots=16, tiers=()).lookup("e", first)
    assert nothing.history_tokens == 0, "where no group is of history"
