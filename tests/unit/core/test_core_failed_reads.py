"""An object whose reads fail or hang is left alone in that tier, and its next store replaces it."""

import pytest
from tests.core_driver import CHUNK, Driver, key, prefix_of

from kvtier.core.limits import TierRules
from kvtier.types import Direction, Drop, Outcome, Prefix

FAILING = ("fails", "hangs")


def read_badly(core: Driver, request: str, what: str) -> None:
    """A request whose reads of "a" fail or hang, and of everything else succeed."""
    prompt = prefix_of("ab")
    core.lookup_and_run(request, prompt)
    core.load(request, prompt)
    for one in core.going(Direction.PROMOTE):
        if one.key != key("a"):
            core.answer(one)
        elif what == "fails":
            core.answer(one, Outcome.FAILED, is_fault=True)
    core.wait(2.0)
    core.release(request)
    core.cache.clear(core.now_s)


def near(*, is_remote: bool) -> Driver:
    """A tier that holds "a" and "ab"."""
    core = Driver(
        tiers=[TierRules(name="near", is_remote=is_remote, transfer_deadline_s=2.0, failures=3, retry_s=0.5)], slots=16
    )
    core.fill("near", prefix_of("ab"))
    return core


def store_near(core: Driver, prompt: Prefix) -> None:
    """The engine has computed `prompt`."""
    core.store("store", prompt)
    core.run(keep=lambda one: one.direction is Direction.PROMOTE)
    core.cache.clear(core.now_s)


def demoted(core: Driver) -> list[str]:
    """Keys that were written, of objects that the tier may have."""
    return [one.key.decode() for one in core.sent if one.direction is Direction.DEMOTE]


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("what", FAILING)
def test_an_object_whose_read_failed_is_absent_in_that_tier_for_a_time_that_doubles(what: str, is_remote: bool) -> None:
    core = near(is_remote=is_remote)
    for number, pause_s in enumerate((5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0)):
        read_badly(core, f"r{number}", what)
        for late in core.going(Direction.PROMOTE):
            core.wait(1000.0)
            assert core.lookup(f"waits {number}", prefix_of("ab")).tokens == 0, "a read of it is stuck"
            core.run(keep=lambda one: one.direction is Direction.PROMOTE)
            core.answer(late)
        core.wait(pause_s - 2.5)
        core.lookup_and_run(f"early {number}", prefix_of("ab"))
        assert core.lookup(f"early {number}", prefix_of("ab")).tokens == 0
        core.wait(6.0)
        core.lookup_and_run(f"again {number}", prefix_of("ab"))
        assert core.lookup(f"again {number}", prefix_of("ab")).tokens == 2 * CHUNK
    assert not core.notices(), "the breaker sees the reads of other objects"


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("what", FAILING)
def test_an_object_whose_read_failed_is_replaced_by_the_next_store_and_found_again(what: str, is_remote: bool) -> None:
    core = near(is_remote=is_remote)
    read_badly(core, "r", what)
    store_near(core, prefix_of("ab"))
    assert core.drops == [Drop("near", key("a"), 0)]
    assert "a" in demoted(core)
    core.lookup_and_run("s", prefix_of("ab"))
    assert core.lookup("s", prefix_of("ab")).tokens == 2 * CHUNK


def test_a_copy_that_a_replacement_did_not_mend_is_left_alone_although_it_is_replaced_again() -> None:
    core = near(is_remote=False)
    for number in range(3):
        read_badly(core, f"r{number}", "fails")
        store_near(core, prefix_of("ab"))
    assert len(core.drops) == 2, "the third request has not read it"
    assert len([one for one in core.sent if one.direction is Direction.PROMOTE and one.key == key("a")]) == 2


def test_requests_that_have_found_an_object_do_not_wait_for_it_after_its_read_failed() -> None:
    core = near(is_remote=False)
    core.lookup_and_run("second", prefix_of("ab"))
    read_badly(core, "first", "fails")
    assert core.lookup("second", prefix_of("ab")).tokens == 0
    core.load("third", prefix_of("ab"))
    assert core.loaded()[-1].tokens == 0, "at once"


def test_a_late_read_that_never_began_says_nothing_about_its_object() -> None:
    core = near(is_remote=False)
    core.lookup_and_run("r", prefix_of("ab"))
    core.load("r", prefix_of("ab"))
    core.wait(2.0)
    for one in core.going(Direction.PROMOTE):
        core.answer(one, Outcome.CANCELLED)
    core.lookup_and_run("s", prefix_of("ab"))
    assert core.lookup("s", prefix_of("ab")).tokens == 2 * CHUNK
    store_near(core, prefix_of("ab"))
    assert not core.drops


def test_a_tier_that_was_away_is_read_again_but_for_objects_that_failed_before() -> None:
    core = near(is_remote=False)
    for number in range(2):
        read_badly(core, f"r{number}", "fails")
        core.wait(6.0)
    for number in range(3):  # and now everything fails
        core.load(f"away {number}", prefix_of("ab"))
        core.load(f"away too {number}", long_prefix(number))
        for one in core.going(Direction.PROMOTE):
            core.answer(one, Outcome.FAILED, is_fault=True)
    assert not core.notices()[-1].is_up
    core.wait(1.0)
    core.check_tiers()
    core.run()
    assert core.notices()[-1].is_up
    core.lookup_and_run("r", prefix_of("ab"))
    assert core.lookup("r", prefix_of("ab")).tokens == 0
    core.fill("near", long_prefix(1))
    core.lookup_and_run("s", long_prefix(1))
    assert core.lookup("s", long_prefix(1)).tokens == CHUNK


def long_prefix(number: int) -> Prefix:
    """One chunk of another prompt."""
    return prefix_of(str(number))


def test_a_slower_tier_delivers_what_a_faster_one_fails_to() -> None:
    core = Driver(tiers=("near", "far"), slots=16)
    for tier in core.held:
        core.fill(tier, prefix_of("a"))
    core.lookup_and_run("r", prefix_of("a"))
    core.load("r", prefix_of("a"))
    core.answer(core.going(Direction.PROMOTE, "near")[0], Outcome.FAILED, is_fault=True)
    core.run()
    core.cache.clear(core.now_s)
    core.sent.clear()
    core.lookup_and_run("s", prefix_of("a"))
    core.load_and_run("s", prefix_of("a"))
    assert core.loaded()[-1].tokens == CHUNK
    assert [one.tier for one in core.sent if one.direction is Direction.PROMOTE] == ["far"]
    assert [one.tier for one in core.sent if one.direction is Direction.DEMOTE] == ["near"], "and heals it"
