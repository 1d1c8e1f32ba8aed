"""Lower tiers: a probe answer is only a hint, a failure is a miss, and a hanging tier does not delay others."""

import pytest
from tests.core_driver import CHUNK, LONG_S, Driver, key, prefix_of

from kvtier.core import tier_searches, tier_state
from kvtier.core.limits import TierRules, WritePolicy
from kvtier.layout import History, Window
from kvtier.types import Direction, Drop, Outcome, Presence, RequestId, StoreDone

# ---- probes ----------------------------------------------------------------------------------------------------------


def test_a_lookup_asks_each_tier_once_for_what_is_not_here() -> None:
    core = Driver(tiers=("disk", "shared"))
    core.store_and_run("a", prefix_of("a"))
    prompt = prefix_of("ab")
    answer = core.lookup("r", prompt)
    assert (answer.tokens, answer.presence) == (4, Presence.PROBING)
    core.lookup("r", prompt)
    core.lookup("r", prefix_of("ab"))
    assert [(probe.tier, probe.objects) for probe in core.probes.values()] == [("disk", ((key("ab"), 0),))]
    core.tell(next(iter(core.probes.values())), [False])
    assert core.lookup("r", prompt).presence is Presence.PROBING
    (second,) = core.probes.values()
    assert (second.tier, second.objects) == ("shared", ((key("ab"), 0),)), "asked for what the disk lacks"
    core.tell(second, [True])
    answer = core.lookup("r", prompt)
    assert (answer.tokens, answer.ready_tokens, answer.presence) == (8, 4, Presence.ARRIVING)
    assert answer.sources == (("host", 4), ("shared", 4))


def test_a_tier_that_no_request_asks_gets_health_checks() -> None:
    core = Driver(tiers=("disk", "shared"), failures=2)
    core.lookup("r", prefix_of("a"))
    (asked,) = core.probes.values()
    for round_ in range(3):
        core.check_tiers()
        (check,) = (it for it in core.probes.values() if it is not asked)
        assert (check.tier, check.objects) == ("shared", ())
        core.check_tiers()  # one probe is open
        assert len(core.probes) == 2
        core.tell(check, None if round_ else [])
    assert not core.cache.is_up("shared"), "two failures in a row"
    assert core.cache.is_up("disk")


def test_a_tier_that_requests_keep_busy_is_asked_for_watched_objects_all_the_same() -> None:
    """Otherwise KV events of what it has evicted would stand as long as it is busy."""
    core, watched = Driver(), (key("z"), 0)
    core.lookup("r", prefix_of("a"))
    (asked,) = core.probes.values()
    core.check_tiers()
    assert [*core.probes.values()] == [asked]
    for _ in range(2):
        core.check_tiers(watched)
        (check,) = (it for it in core.probes.values() if it is not asked)
        assert check.objects == (watched,)
        core.check_tiers(watched)  # one check is open
        assert len(core.probes) == 2
        core.tell(check, [False])


def test_a_longer_prompt_of_the_same_request_asks_only_for_what_is_new() -> None:
    core = Driver()
    core.lookup("r", prefix_of("a"))
    core.lookup("r", prefix_of("ab"))
    assert [probe.objects for probe in core.probes.values()] == [((key("a"), 0),), ((key("ab"), 0),)]


def test_what_left_host_memory_between_two_lookups_is_asked_for() -> None:
    core = Driver(slots=2)
    prompt = prefix_of("abc")
    core.store_and_run("a", prefix_of("ab"))
    core.lookup_and_run("r", prompt)
    core.store_and_run("b", prefix_of("yz"))
    assert core.lookup("r", prompt).presence is Presence.PROBING
    core.run()
    assert core.lookup("r", prompt).tokens == 8


def test_what_was_stored_and_left_host_memory_since_the_first_lookup_is_asked_for_once_more() -> None:
    """A queued request, whose first lookup found nothing. Another one has computed its beginning since."""
    core = Driver(slots=2)
    prompt = prefix_of("abc")
    core.lookup_and_run("r", prompt)
    assert core.lookup("r", prompt).tokens == 0
    core.store_and_run("a", prefix_of("ab"))
    core.store_and_run("b", prefix_of("yz"))
    asked = core.asked["disk"]
    core.lookup_and_run("r", prompt)
    assert core.lookup("r", prompt).tokens == 8
    assert core.asked["disk"] == asked + 1
    core.store_and_run("c", prefix_of("wx"))
    core.lookup_and_run("r", prompt)
    assert core.asked["disk"] == asked + 1, "what left since is of no use to this request"
    core.store_and_run("d", prefix_of("ab"))
    core.store_and_run("e", prefix_of("uv"))
    core.lookup_and_run("r", prompt)
    assert core.asked["disk"] == asked + 1, "the disk is known to have it"


def test_a_lookup_is_not_probing_when_nothing_could_be_added() -> None:
    core = Driver(groups=(History(), Window(4)))
    prompt = prefix_of("abc")
    core.store_and_run("a", prompt, (0, 0), (0, 1), (0, 2), (1, 2))
    answer = core.lookup("r", prompt)
    assert (answer.tokens, answer.presence) == (12, Presence.READY)
    assert core.probes, "the window's older chunks may be of use to a shorter prompt"


def test_an_unanswered_probe_means_absent_after_its_deadline() -> None:
    core = Driver(probe_deadline_s=2.0, failures=1)
    prompt = prefix_of("a")
    core.lookup("r", prompt)
    (probe,) = core.probes.values()
    assert core.cache.next_deadline() == 2.0
    core.wait(2.0)
    assert core.lookup("r", prompt).presence is Presence.ABSENT
    assert [notice.is_up for notice in core.notices()] == [False]
    core.tell(probe, [True])
    assert core.lookup("r", prompt).tokens == 0, "an answer without a waiter"
    assert core.cache.next_deadline() is None


def test_only_so_many_requests_are_kept_in_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_searches, "REQUESTS_MAX", 1)
    core = Driver()
    core.lookup("a", prefix_of("a"))
    assert core.lookup("b", prefix_of("b")).presence is Presence.ABSENT
    core.release("a")
    assert core.lookup("b", prefix_of("b")).presence is Presence.PROBING


def test_a_tier_that_is_down_is_neither_probed_nor_believed() -> None:
    core = Driver(tiers=("disk", "shared"), failures=1)
    core.fill("disk", prefix_of("a"))
    core.lookup_and_run("a", prefix_of("a"))
    assert core.lookup("a", prefix_of("a")).sources == (("disk", 4),)
    core.lookup("b", prefix_of("b"))
    core.tell(next(iter(core.probes.values())), None)
    assert core.lookup("a", prefix_of("a")).presence is Presence.ABSENT
    core.lookup("c", prefix_of("c"))
    assert {probe.tier for probe in core.probes.values()} == {"shared"}


def test_what_a_load_did_not_read_behind_a_bad_copy_is_replaced_when_it_is_stored() -> None:
    core = Driver(slots=32, loads_in_flight=2)
    prompt = prefix_of("abcdef")
    core.fill("disk", prompt)
    core.lookup_and_run("r", prompt)
    core.load("r", prompt)
    first, second = core.going(Direction.PROMOTE)
    core.answer(first, Outcome.CORRUPT)
    assert core.drops == [Drop("disk", key("a"), 0)]
    core.answer(second)
    core.run()
    core.drops.clear()
    core.store_and_gather("r", prompt)
    assert core.drops == [Drop("disk", key(text), 0) for text in ("abc", "abcd", "abcde", "abcdef")], "`ab` was good"
    order = [one.key for one in core.sent if one.direction is Direction.DEMOTE]
    assert order[0] == key("a"), "what was dropped already is only written"
    core.run()
    core.drops.clear()
    core.lookup("s", prefix_of("abcdefg"))
    core.store_and_run("s", prefix_of("abcdefg"))
    assert not core.drops, "once"


def test_a_doubt_ends_when_the_copy_is_read_and_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_state, "SUSPECT_MAX", 2)
    core = Driver(slots=16, loads_in_flight=1)
    core.fill("disk", prefix_of("abcde"))
    core.load("r", prefix_of("abcde"))
    core.answer(core.going(Direction.PROMOTE)[0], Outcome.CORRUPT)  # `ab` and `abc` are trusted again at once
    core.load_and_run("d", prefix_of("abcd"), resident_tokens=3 * CHUNK)
    core.drops.clear()
    core.wait(1.0)
    for text in ("x", "y", "z") * 6:
        core.store(text, prefix_of(text + str(len(core.sent))))  # `abcd` leaves host memory
        core.run()
    core.store_and_run("s", prefix_of("abcde"))
    assert core.drops == [Drop("disk", key("abcde"), 0)]


def test_a_doubt_outlives_a_read_that_was_cancelled() -> None:
    core = Driver(slots=16, loads_in_flight=1)
    core.fill("disk", prefix_of("ab"))
    core.load("r", prefix_of("ab"))
    core.answer(core.going(Direction.PROMOTE)[0], Outcome.CORRUPT)
    core.load("s", prefix_of("ab"), resident_tokens=CHUNK)
    (reading,) = core.going(Direction.PROMOTE)
    core.cache.release(RequestId("s"), core.now_s)
    core.answer(reading, Outcome.CANCELLED)
    core.run()
    core.drops.clear()
    core.store_and_run("r", prefix_of("ab"))
    assert core.drops == [Drop("disk", key("ab"), 0)]


def test_a_copy_that_cannot_be_read_is_replaced_when_it_is_stored() -> None:
    """A tier has the name of an object in a bad block, so it would keep that copy, and each load would end there."""
    core = Driver(slots=16)
    prompt = prefix_of("abc")
    core.fill("disk", prompt)
    core.load("r", prompt)
    for one in core.going(Direction.PROMOTE):
        core.answer(one, Outcome.FAILED if one.key == key("ab") else Outcome.DONE, is_fault=one.key == key("ab"))
    core.run()
    assert not core.drops, "it may be read the next time"
    core.store_and_run("r", prompt)
    assert core.drops == [Drop("disk", key("ab"), 0)]


# ---- failing, hanging and coming back --------------------------------------------------------------------------------


def fail_promotions(core: Driver, count: int) -> None:
    for number in range(count):
        core.load(f"f{number}", prefix_of(f"{number}"))
        core.answer(core.going(Direction.PROMOTE)[-1], Outcome.FAILED, is_fault=True)


def fail_demotions(core: Driver, count: int) -> None:
    for _ in range(count):
        core.store_and_gather("d", prefix_of(chr(0x391 + len(core.sent))))
        core.answer(core.going(Direction.DEMOTE)[-1], Outcome.FAILED, is_fault=True)


def test_writes_that_fail_or_hang_do_not_stop_reads() -> None:
    core = Driver(slots=16, failures=2, retry_s=5.0, transfer_deadline_s=2.0)
    core.fill("disk", prefix_of("abcdef"))
    fail_demotions(core, 2)
    assert [(notice.way, notice.is_up) for notice in core.notices()] == [("write", False)]
    for text in ("a", "abc", "abcdef"):
        core.lookup_and_run(text, prefix_of(text))
        assert core.lookup(text, prefix_of(text)).tokens == len(text) * CHUNK
        core.load_and_run(text, prefix_of(text))
        assert core.loaded()[-1].tokens == len(text) * CHUNK
    core.wait(5.0)
    core.store_and_gather("x", prefix_of("xy"))
    assert len(core.going(Direction.DEMOTE)) == 1, "one trial at a time"
    core.wait(2.0)
    core.lookup("z", prefix_of("z"))
    assert core.probes, "the trial hangs, and the tier is asked"
    assert not core.notices()


def test_reads_that_succeed_do_not_hide_writes_that_fail() -> None:
    core = Driver(slots=16, failures=2)
    core.fill("disk", prefix_of("ab"))
    for number in range(2):
        fail_demotions(core, 1)
        core.load(f"{number}", prefix_of("ab"))
        core.run(directions=[Direction.PROMOTE, Direction.SCATTER])
        assert core.loaded()[-1].tokens == 2 * CHUNK
        core.cache.release(RequestId(f"{number}"), core.now_s)
    assert [(notice.way, notice.is_up) for notice in core.notices()] == [("write", False)]


def test_reads_that_fail_do_not_stop_writes_and_what_succeeds_again_ends_the_rest_of_both() -> None:
    core = Driver(slots=16, failures=1, retry_s=5.0)
    fail_promotions(core, 1)
    core.store_and_run("a", prefix_of("ab"))
    assert len(core.held["disk"]) == 2
    fail_demotions(core, 1)
    core.wait(5.0)
    fail_demotions(core, 1)  # the next trial of writes is 10 s away
    core.lookup_and_run("r", prefix_of("z"))
    assert [(notice.way, notice.is_up) for notice in core.notices()] == [
        ("read", False),
        ("write", False),
        ("read", True),
    ]
    core.store_and_run("b", prefix_of("c"))
    assert [(notice.way, notice.is_up) for notice in core.notices()] == [("write", True)]


def test_the_breaker_opens_after_failures_in_a_row_and_a_trial_closes_it() -> None:
    core = Driver(failures=2, retry_s=5.0)
    fail_promotions(core, 2)
    (notice,) = core.notices()
    assert (notice.tier, notice.is_up) == ("disk", False)
    assert "2 times" in notice.detail
    core.load("x", prefix_of("x"))
    assert core.loaded()[-1].tokens == 0, "left alone"
    core.wait(5.0)
    core.fill("disk", prefix_of("y"))
    core.load("y", prefix_of("y"))
    assert core.loaded()[-1].tokens == 0, "a load is no trial, for which it would wait"
    core.check_tiers()
    core.lookup("z", prefix_of("z"))
    assert len(core.probes) == 1, "one trial at a time"
    core.run()
    assert [notice.is_up for notice in core.notices()] == [True]
    core.load_and_run("y", prefix_of("y"))
    assert core.loaded()[-1].tokens == 4


def test_a_failed_trial_doubles_the_rest_up_to_a_minute() -> None:
    core = Driver(failures=1, retry_s=5.0)
    fail_promotions(core, 1)
    for rest_s in (5.0, 10.0, 20.0, 40.0, tier_state.RETRY_SECONDS_MAX, tier_state.RETRY_SECONDS_MAX):
        core.wait(rest_s - 0.1)
        core.check_tiers()
        assert not core.probes
        core.wait(0.1)
        core.check_tiers()
        core.tell(next(iter(core.probes.values())), None)
    assert len(core.notices()) == 1, "one notice"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CANCELLED])
def test_a_read_that_began_before_the_breaker_opened_does_not_end_its_trial(outcome: Outcome) -> None:
    core = Driver(slots=16, failures=1, retry_s=5.0, transfer_deadline_s=60.0)
    core.load("old", prefix_of("o"))
    (old,) = core.going(Direction.PROMOTE)
    fail_promotions(core, 1)
    core.wait(5.0)
    core.check_tiers()
    (trial,) = core.probes.values()
    core.answer(old, outcome, is_fault=outcome is Outcome.FAILED)
    core.lookup("z", prefix_of("z"))
    assert list(core.probes.values()) == [trial], "one trial at a time"
    core.tell(trial, None)
    core.wait(9.9)
    core.check_tiers()
    assert not core.probes
    core.wait(0.1)
    core.check_tiers()
    assert core.probes, "one trial has failed, so the delay has doubled once"


def test_what_a_tier_missed_is_written_at_its_next_use_and_the_rest_at_a_flush() -> None:
    core = Driver(slots=16, failures=1, retry_s=5.0)
    fail_demotions(core, 1)
    core.store_and_run("away", prefix_of("abc"))
    core.store_and_run("away too", prefix_of("xy"))
    assert not core.held["disk"]
    core.wait(5.0)
    core.store_and_run("again", prefix_of("abc"))
    assert {key for key, _ in core.held["disk"]} == set(prefix_of("abc").keys)
    core.flush()
    core.run()
    assert len(core.held["disk"]) == 6, "also the one whose write failed"


def test_writes_that_waited_when_the_breaker_opened_are_written_at_the_next_use() -> None:
    core = Driver(slots=16, failures=1, retry_s=5.0, writes_in_flight=1)
    core.store_and_gather("a", prefix_of("abcd"))
    core.answer(core.going(Direction.DEMOTE)[0], Outcome.FAILED, is_fault=True)
    core.run()
    assert not core.held["disk"]
    core.wait(5.0)
    core.store_and_run("b", prefix_of("abcd"))
    assert len(core.held["disk"]) == 4


def test_a_write_that_a_tier_refuses_is_not_repeated() -> None:
    core = Driver(slots=16, failures=1)
    core.store_and_gather("a", prefix_of("a"))
    core.answer(core.going(Direction.DEMOTE)[0], Outcome.FAILED)
    assert not core.notices(), "a refusal is no fault"
    assert (core.cache.counters.demotions_dropped, core.cache.pending_count) == (1, 0)
    core.store("b", prefix_of("a"))
    core.flush()
    core.run()
    assert not core.held["disk"], "a full tier would be asked at every use"


def test_what_a_tier_took_and_did_not_keep_is_written_again_with_the_rest_of_its_prefix() -> None:
    core = Driver(tiers=(TierRules(name="far", is_remote=True, loads_in_flight=1),), slots=32)
    prompt = prefix_of("abcdef")
    core.store_and_run("a", prompt)
    assert len(core.held["far"]) == 6
    for text in "0123456789":
        core.store_and_run(text, prefix_of(text * 4))
    assert core.present().isdisjoint({"a", "abcdef"})
    core.held["far"].clear()
    core.load_and_run("r", prompt)
    assert core.loaded()[-1].tokens == 0
    core.store_and_run("r", prompt)
    assert {name for name, _ in core.held["far"]} == set(prompt.keys)


def test_a_copy_found_bad_after_its_object_was_stored_again_is_written_at_the_next_use() -> None:
    """The write replaced a copy whose read was late. That read says later that the copy is bad; perhaps the new one."""
    core = Driver(slots=16, transfer_deadline_s=2.0)
    core.fill("disk", prefix_of("a"))
    core.load("r", prefix_of("a"))
    (late,) = core.going(Direction.PROMOTE)
    core.wait(2.0)
    core.store("r", prefix_of("a"))
    core.run(keep=lambda one: one is late)
    assert core.held["disk"]
    core.answer(late, Outcome.CORRUPT)
    assert core.drops == [Drop("disk", key("a"), 0)] * 2
    assert not core.held["disk"]
    core.store_and_run("s", prefix_of("a"))
    assert core.held["disk"] == {(key("a"), 0)}


def test_a_tier_that_was_never_open_is_tried_every_second() -> None:
    core = Driver(down=("disk",), retry_s=5.0)
    for _ in range(20):
        core.check_tiers()
        (trial,) = core.probes.values()
        core.tell(trial, None)
        core.wait(1.0)
    core.fill("disk", prefix_of("y"))
    core.check_tiers()
    core.run()
    assert core.cache.is_up("disk")


def test_what_a_remote_tier_held_before_it_went_down_is_asked_again() -> None:
    core = Driver(tiers=[TierRules(name="s3", is_remote=True, failures=1, retry_s=5.0)])
    core.fill("s3", prefix_of("ab"))
    core.lookup_and_run("a", prefix_of("ab"))
    assert core.lookup("a", prefix_of("ab")).tokens == 2 * CHUNK
    core.check_tiers()
    core.tell(next(iter(core.probes.values())), None)
    core.held["s3"].clear()
    core.wait(5.0)
    core.check_tiers()
    core.run()
    core.lookup("b", prefix_of("ab"))
    assert core.probes, "it may have come back empty"
    core.run()
    assert core.lookup("b", prefix_of("ab")).tokens == 0


def reads_stop(core: Driver, tier: str) -> None:
    """All health checks of `tier` fail until its reads have stopped."""
    while core.cache.is_up(tier):
        core.wait(1.0)
        core.check_tiers()
        for probe in list(core.probes.values()):
            core.tell(probe, None if probe.tier == tier else [])


def test_a_load_goes_on_when_the_tier_that_it_waits_for_is_down() -> None:
    core = Driver(tiers=("disk", "shared"), loads_in_flight=2, slots=16)
    core.fill("shared", prefix_of("ab"))
    core.load("r", prefix_of("abc"))
    stuck = core.going(Direction.PROMOTE)
    assert [one.tier for one in stuck] == ["disk", "disk"], "and one object that waits for these"
    reads_stop(core, "disk")
    assert core.now_s == 3.0
    assert core.cancelled == [one.id for one in stuck]
    core.run(keep=lambda one: one in stuck)
    (done,) = core.loaded()
    assert (done.tokens, done.sources) == (8, (("shared", 8),)), "what another tier has arrives"
    assert {one.slot for one in stuck}.isdisjoint(one.slot for one in core.sent if one not in stuck), "still written to"
    core.wait(LONG_S)
    assert core.cache.in_flight == 2, "their deadline changes nothing more"
    for one in stuck:
        core.answer(one)
    assert core.cache.in_flight == 0
    assert core.present() == {"a", "ab"}
    assert not core.cache.is_up("disk"), "after the deadline a success proves nothing"


def test_a_read_that_was_given_up_and_succeeds_before_its_deadline_ends_the_rest() -> None:
    core = Driver(slots=16)
    core.load("r", prefix_of("a"))
    (stuck,) = core.going(Direction.PROMOTE)
    reads_stop(core, "disk")
    assert core.loaded()[0].tokens == 0
    core.answer(stuck)
    assert core.cache.is_up("disk")
    assert not core.present(), "its load has ended"


def test_an_object_that_is_relayed_is_not_given_up() -> None:
    core = Driver(tiers=("disk", "shared"), slots=32, failures=2)
    core.store("a", prefix_of("a"))
    core.run(keep=lambda one: one.tier == "shared")
    for text in "bcdefghijklmnopqrstuvwxyzABCDEFGHIJ":
        core.store(text, prefix_of(text))
        core.run(keep=lambda one: one.tier == "shared")
    for one in core.going(Direction.DEMOTE):
        core.answer(one)
    relays = core.going(Direction.PROMOTE)
    assert relays
    reads_stop(core, "disk")
    assert not core.cancelled


def test_demotions_wait_for_the_answer_of_a_trial() -> None:
    core = Driver(slots=16, writes_in_flight=2, failures=1, retry_s=5.0)
    core.store_and_gather("a", prefix_of("abcde"))
    core.answer(core.going(Direction.DEMOTE)[0], Outcome.FAILED, is_fault=True)
    (before,) = core.going(Direction.DEMOTE)
    assert core.cache.counters.demotions_dropped == 4, "what waited for a tier that takes no writes is not written"
    core.wait(5.0)
    core.store_and_gather("b", prefix_of("xyz"))
    assert len(core.going(Direction.DEMOTE)) == 2, "the one sent before, and the trial"
    core.answer(before)  # a success, too
    assert [notice.is_up for notice in core.notices()] == [False, True]


def test_a_demotion_that_waits_goes_out_when_the_trial_succeeds() -> None:
    core = Driver(slots=16, failures=1, retry_s=5.0, write_policy=WritePolicy.BACK)
    core.store_and_run("a", prefix_of("abcdefghijklmnop"))
    core.store("b", prefix_of("y"))
    core.answer(core.going(Direction.DEMOTE)[0], Outcome.FAILED, is_fault=True)
    core.run()
    core.wait(5.0)
    core.store("c", prefix_of("uvw"))
    assert len(core.going(Direction.DEMOTE)) == 1
    core.run()
    assert len(core.held["disk"]) == 2


def test_stores_go_on_while_their_tier_hangs() -> None:
    core = Driver(slots=8, writes_in_flight=1, transfer_deadline_s=2.0, failures=9)
    core.store_and_gather("a", prefix_of("abcdefgh"))
    (stuck,) = core.going(Direction.DEMOTE)
    core.store_and_gather("b", prefix_of("stuvwxyz"))
    assert not core.stored()[1:], "everything is owed, and may yet be written"
    core.wait(2.0)
    core.run(directions=[Direction.GATHER])
    assert core.stored() == [StoreDone(RequestId("b"), 8, 0)]
    assert stuck.slot not in {one.slot for one in core.sent if one.request == "b"}, "it is still being read"
    core.answer(stuck)
    assert core.cache.in_flight == 0


def test_a_leaf_that_hangs_does_not_shield_its_parents() -> None:
    core = Driver(tiers=("disk", "shared"), slots=8, writes_in_flight=1, transfer_deadline_s=2.0, failures=1)
    core.store("a", prefix_of("ab"))
    core.run(keep=lambda one: one.direction is Direction.DEMOTE and one.key == key("ab"))
    core.wait(2.0)
    stuck = core.going(Direction.DEMOTE)
    assert len(stuck) == 2
    core.store("b", prefix_of("1234567"))
    core.run(keep=lambda one: one in stuck)
    assert core.stored()[-1].stored == 7
    assert core.present() == {"ab", *("1234567"[: end + 1] for end in range(7))}
    core.answer(stuck[0])
    core.store("c", prefix_of("x"))
    assert core.cache.presence(key("ab"), 0) is Presence.READY
    core.run(keep=lambda one: one in stuck)
    core.answer(stuck[1])
    for text in ("p", "q", "r", "s", "t", "u", "v", "w"):
        core.store_and_run(text, prefix_of(text))
    assert core.present().isdisjoint({"ab"}), "it can leave again"


def test_a_leaving_object_whose_demotion_is_late_stays_readable_until_it_ends() -> None:
    core = Driver(slots=2, write_policy=WritePolicy.BACK, transfer_deadline_s=2.0)
    core.store_and_run("a", prefix_of("ab"))
    core.store("b", prefix_of("z"))
    (stuck,) = core.going(Direction.DEMOTE)
    core.wait(2.0)
    assert core.cache.presence(key("ab"), 0) is Presence.READY
    core.answer(stuck)
    assert core.cache.presence(key("ab"), 0) is Presence.ABSENT
    core.run()
    assert core.stored()[-1].stored == 1


def test_a_hanging_tier_leaves_half_of_host_memory() -> None:
    core = Driver(slots=8, transfer_deadline_s=2.0, failures=1)
    core.store_and_gather("a", prefix_of("abcd"))
    core.load("r", prefix_of("uvwxyz"))
    core.wait(2.0)
    stuck = list(core.out.values())
    assert len(stuck) <= 4
    core.store("b", prefix_of("1234"))
    core.run(keep=lambda one: one in stuck)
    assert core.stored()[-1].stored == 4


def test_sources_of_a_load_name_the_slowest_group_of_each_chunk() -> None:
    core = Driver(groups=(History(), Window(4)), slots=16)
    prompt = prefix_of("abc")
    core.fill("disk", prompt)
    core.store_and_gather("s", prompt, (0, 0), (0, 1), (0, 2))
    core.load_and_run("r", prompt)
    assert core.loaded()[0].sources == (("host", 2 * CHUNK), ("disk", CHUNK))
