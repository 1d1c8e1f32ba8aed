"""The rules of a hierarchy: each tier is asked for what faster ones lack, and a slow one delays nothing."""

import pytest
from tests.core_driver import CHUNK, Driver, key, prefix_of

from kvtier.core import tier_state, tier_writes
from kvtier.core.limits import TierRules, WritePolicy
from kvtier.layout import History, State, Window
from kvtier.types import ChunkKey, Direction, Outcome, Prefix, Presence

LONG_S = 1000.0


def rules(name: str, **values: object) -> TierRules:
    return TierRules(name=name, **{"probe_deadline_s": LONG_S, "transfer_deadline_s": LONG_S, **values})


def near_and_far(**values: object) -> Driver:
    """A local disk, and a remote store behind it."""
    of_core = {name: values.pop(name) for name in ("slots", "groups", "write_policy") if name in values}
    return Driver(tiers=(rules("disk"), rules("far", is_remote=True, **values)), **{"slots": 64, **of_core})


def long_prefix(chunks: int, name: str = "p") -> Prefix:
    return Prefix(tuple(ChunkKey(f"{name}{number}".encode()) for number in range(chunks)), CHUNK)


def store_near(core: Driver, request: str, prefix: Prefix) -> None:
    """Store, and answer everything but writes to the far tier."""
    core.store(request, prefix)
    core.run(keep=lambda one: one.tier == "far")


def relaying(chunks: int, **values: object) -> Driver:
    """One write to the far tier hangs. Three objects of `a` wait for it, and all of `b`, which has `chunks`."""
    core = near_and_far(slots=32, writes_in_flight=1, **values)
    store_near(core, "a", long_prefix(4, "a"))
    store_near(core, "b", long_prefix(chunks, "b"))
    return core


def probe(core: Driver):
    (only,) = core.probes.values()
    return only


def tell(core: Driver) -> int:
    """Answer the open probe truthfully; the number of its names."""
    asked = probe(core)
    core.tell(asked, [item in core.held[asked.tier] for item in asked.objects])
    return len(asked.objects)


def demotions(core: Driver, tier: str) -> list[str]:
    return [one.key.decode() for one in core.going(Direction.DEMOTE) if one.tier == tier]


# ---- lookup --------------------------------------------------------------------------------------------------------


def test_a_remote_tier_is_asked_only_for_what_the_local_one_lacks() -> None:
    core = near_and_far()
    core.fill("disk", prefix_of("abc"))
    core.fill("far", prefix_of("abcde"))
    core.lookup("r", prefix_of("abcde"))
    assert probe(core).tier == "disk"
    tell(core)
    assert (probe(core).tier, probe(core).objects) == ("far", ((key("abcd"), 0),)), "the first missing name alone"
    core.run()
    assert core.lookup("r", prefix_of("abcde")).sources == (("disk", 12), ("far", 8))


def test_what_the_local_tier_has_whole_asks_no_remote_one() -> None:
    core = near_and_far()
    core.fill("disk", prefix_of("abc"))
    core.lookup("r", prefix_of("abc"))
    tell(core)
    assert not core.probes
    assert core.lookup("r", prefix_of("abc")).presence is Presence.ARRIVING


@pytest.mark.parametrize("held", [0, 1, 2, 23, 24, 25, 100, 300, 510, 511, 512])
def test_a_remote_tier_tells_a_run_of_512_chunks_in_three_round_trips(held: int) -> None:
    core, prompt = near_and_far(slots=600), long_prefix(512)
    core.fill("far", Prefix(prompt.keys[:held], CHUNK))
    core.lookup("r", prompt)
    tell(core)
    names = []
    while core.probes:
        names.append(tell(core))
    assert len(names) <= 3
    assert sum(names) <= 1 + 2 * 23
    assert core.lookup("r", prompt).tokens == held * CHUNK


def test_a_run_with_holes_is_loaded_up_to_the_hole() -> None:
    core, prompt = near_and_far(slots=600), long_prefix(512)
    core.fill("far", prompt)
    core.held["far"].discard((prompt.keys[101], 0))
    core.lookup_and_run("r", prompt)
    assert core.lookup("r", prompt).tokens == 512 * CHUNK, "the hole is between two names that were asked for"
    core.load_and_run("r", prompt)
    assert core.loaded()[0].tokens == 101 * CHUNK


def test_a_hybrid_model_asks_history_first_and_then_at_most_four_boundaries() -> None:
    core = near_and_far(groups=(History(), Window(2 * CHUNK), State()))
    prompt = long_prefix(20)
    for chunk in range(20):
        core.held["far"].add((prompt.keys[chunk], 0))
        core.held["far"].add((prompt.keys[chunk], 1))
    core.held["far"].add((prompt.keys[17], 2))
    core.lookup("r", prompt)
    tell(core)
    rounds = []
    while core.probes:
        rounds.append({group for _, group in probe(core).objects})
        asked = tell(core)
    assert rounds == [{0}, {0}, {1, 2}]
    assert asked == 8, "two groups at four boundaries"
    assert core.lookup("r", prompt).tokens == 18 * CHUNK
    core.load_and_run("r", prompt, 18 * CHUNK)
    assert core.loaded()[0].tokens == 18 * CHUNK


def test_a_model_without_history_asks_its_longest_boundaries() -> None:
    core, prompt = near_and_far(groups=(State(),)), long_prefix(9)
    core.held["far"].add((prompt.keys[6], 0))
    core.lookup("r", prompt)
    tell(core)
    assert [name for name, _ in probe(core).objects] == [prompt.keys[n] for n in (8, 7, 6, 5)]
    core.run()
    assert core.lookup("r", prompt).tokens == 7 * CHUNK


def test_a_remote_tier_that_fails_between_two_rounds_keeps_what_it_reported() -> None:
    core, prompt = near_and_far(), long_prefix(100)
    core.fill("far", prompt)
    core.lookup("r", prompt)
    tell(core)
    tell(core)
    core.tell(probe(core), None)
    assert core.lookup("r", prompt).tokens == CHUNK


# ---- deadlines and absences ----------------------------------------------------------------------------------------


def test_a_request_waits_for_a_remote_tier_a_small_share_of_what_computing_takes() -> None:
    core, prompt = near_and_far(), prefix_of("ab")
    core.fill("far", prompt)
    for tier in core.cache._tiers.all:
        tier.hit_rate = 0.0
    core.lookup("r", prompt, compute_s=1.0)
    tell(core)
    assert core.lookup("r", prompt, compute_s=1.0).presence is Presence.PROBING
    assert core.cache.next_deadline() == pytest.approx(0.01)
    core.wait(0.011)
    assert core.lookup("r", prompt, compute_s=1.0).presence is Presence.ABSENT, "its probe is open, and it goes on"
    core.run()
    core.lookup_and_run("other", prompt, compute_s=1.0)
    assert core.lookup("other", prompt, compute_s=1.0).tokens == 8, "the late answer serves the next request"


def test_a_hit_rate_that_repays_it_makes_requests_wait_longer() -> None:
    core, prompt = near_and_far(), prefix_of("ab")
    core.cache._tiers["far"].hit_rate = 0.8
    core.fill("disk", prefix_of("a"))
    core.lookup("r", prompt, compute_s=1.0)
    tell(core)
    half_s, load_s = 0.5, 0.25  # the disk has half of the prompt; loading is taken to need half of computing
    assert core.cache.next_deadline() == pytest.approx(0.8 * (half_s - load_s))


def test_a_request_waits_a_share_of_what_the_missing_part_takes() -> None:
    core, prompt = near_and_far(), long_prefix(10)
    core.cache._tiers["far"].hit_rate = 0.0
    core.fill("disk", Prefix(prompt.keys[:9], CHUNK))
    core.lookup("r", prompt, compute_s=1.0)
    tell(core)
    assert core.cache.next_deadline() == pytest.approx(0.001), "one of ten chunks is missing"


@pytest.mark.parametrize("answer_s", [0.005, 0.02])
def test_no_request_waits_for_answers_that_usually_come_too_late(answer_s: float) -> None:
    core = near_and_far()
    core.cache._tiers["far"].hit_rate = 0.0
    for number in range(60):
        prompt = long_prefix(2, f"p{number}-")
        core.lookup(f"r{number}", prompt, compute_s=1.0)
        tell(core)
        answer = core.lookup(f"r{number}", prompt, compute_s=1.0)
        core.wait(answer_s)
        tell(core)
    assert answer.presence is (Presence.PROBING if answer_s < 0.01 else Presence.ABSENT)
    assert core.cache._tiers["far"].answer_s == pytest.approx(answer_s, rel=0.01), "a late answer counts"


def test_a_name_that_a_remote_tier_lacks_is_not_asked_for_again_for_seconds() -> None:
    core = near_and_far()
    for request in "ab":
        core.lookup_and_run(request, prefix_of("x"))
    assert core.asked["far"] == 1
    core.now_s += tier_state.ABSENT_S
    core.lookup_and_run("c", prefix_of("x"))
    assert core.asked["far"] == 2


def test_an_own_store_ends_the_memory_of_an_absence() -> None:
    core, prompt = near_and_far(slots=2), prefix_of("x")
    core.lookup_and_run("a", prompt)
    core.store_and_run("a", prompt)
    core.store_and_run("b", prefix_of("yz"))
    core.held["disk"].clear()
    core.lookup_and_run("c", prompt)
    assert core.lookup("c", prompt).sources == (("far", 4),)
    assert core.asked["far"] == 1


# ---- load ----------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_tries_the_slower_tier_though_it_was_not_asked() -> None:
    core, prompt = near_and_far(), prefix_of("ab")
    core.fill("disk", prompt)
    core.fill("far", prompt)
    core.lookup_and_run("r", prompt)
    core.held["disk"].clear()
    core.load_and_run("r", prompt)
    (done,) = core.loaded()
    assert (done.tokens, done.sources) == (8, (("far", 8),))


# ---- store with relay ----------------------------------------------------------------------------------------------


def test_an_object_that_waits_for_a_slow_tier_holds_no_slot_once_the_disk_has_it() -> None:
    core = near_and_far(slots=32, writes_in_flight=1)
    for number in range(8):
        store_near(core, f"r{number}", long_prefix(8, f"{number}-"))
    assert [done.stored for done in core.stored()] == [8] * 8, "twice as many objects as slots, while one write hangs"
    assert len(core.held["disk"]) == 64
    core.run()
    assert len(core.held["far"]) == 64
    assert core.cache.counters.demotions_dropped == core.cache.counters.relays_dropped == 0


def test_without_a_faster_tier_that_persists_the_slot_is_held() -> None:
    core = Driver(tiers=(rules("memory", persists=False), rules("far", is_remote=True, writes_in_flight=1)), slots=8)
    store_near(core, "a", long_prefix(8, "a"))
    store_near(core, "b", long_prefix(8, "b"))
    assert core.cache.pending_count == 8


def test_a_relay_writes_from_host_memory_while_the_object_is_there() -> None:
    core = near_and_far(slots=32, writes_in_flight=1)
    core.store_and_run("a", long_prefix(4))
    assert not [one for one in core.sent if one.direction is Direction.PROMOTE]
    assert len(core.held["far"]) == 4


def test_a_relay_reads_from_the_faster_tier_into_the_staging_area() -> None:
    core = relaying(31)
    for hung in core.going(Direction.DEMOTE):
        core.answer(hung)
    staged = core.going(Direction.PROMOTE)
    assert staged
    assert len({one.slot for one in staged}) == 1, "the staging area is one slot of 32"
    assert all(one.is_relay for one in staged)
    assert not any(one.is_relay for one in core.sent if one not in staged)
    core.run()
    assert len(core.held["far"]) == 34, "all but the hung one"


def test_without_a_relay_requests_use_all_slots() -> None:
    core, prompt = near_and_far(slots=32), long_prefix(32)
    core.store_and_run("a", prompt)
    assert all(core.cache.presence(one, 0) is Presence.READY for one in prompt.keys)


def test_a_relay_takes_no_slot_that_is_in_use() -> None:
    core = near_and_far(slots=32, writes_in_flight=1)
    store_near(core, "a", long_prefix(4, "a"))
    core.store("b", long_prefix(32, "b"))
    core.run(keep=lambda one: one.direction is Direction.DEMOTE)  # the disk is slow: all objects wait for it
    (hung,) = (one for one in core.going(Direction.DEMOTE) if one.tier == "far")
    core.answer(hung)
    core.run(keep=lambda one: one.direction is not Direction.GATHER)
    assert core.cache._tier_writes.queues["far"].relays
    assert not core.going(Direction.PROMOTE)
    core.run()
    assert len(core.held["far"]) == 35, "all but the hung one"


def test_what_the_faster_tier_evicted_before_is_lost_and_counted() -> None:
    core = relaying(31)
    core.held["disk"] = {item for item in core.held["disk"] if item[0].startswith(b"b")}
    core.run()
    assert core.cache.counters.relays_dropped == 3


def test_a_relay_waits_for_loads() -> None:
    core = relaying(30)
    core.fill("disk", long_prefix(30, "c"))
    core.load("c", long_prefix(30, "c"))
    for hung in core.going(Direction.DEMOTE):
        core.answer(hung)
    assert all(one.key.startswith(b"c") for one in core.going(Direction.PROMOTE))
    core.run()
    assert core.loaded()[0].tokens == 30 * CHUNK


def test_relays_wait_for_a_tier_that_is_away_and_take_no_staging() -> None:
    core = relaying(30, failures=1, retry_s=5.0)
    (hung,) = (one for one in core.going(Direction.DEMOTE) if one.tier == "far")
    core.answer(hung, Outcome.FAILED, is_fault=True)
    core.run()
    assert len(core.cache._tier_writes.queues["far"].relays) == 33
    assert not core.cache.pending_count, "closing does not wait for a tier that is away"
    assert core.cache.host.staging == [1]
    core.wait(5.1)
    core.check_tiers()
    core.run()
    assert not core.cache._tier_writes.queues["far"].relays
    assert len(core.held["far"]) == 33


def test_an_object_that_is_relayed_from_host_memory_is_not_written_a_second_time() -> None:
    core = near_and_far(slots=32, writes_in_flight=1, failures=1, retry_s=5.0)
    store_near(core, "a", long_prefix(3, "a"))
    (hung,) = core.going(Direction.DEMOTE)
    core.answer(hung, Outcome.FAILED, is_fault=True)
    core.store_and_run("b", long_prefix(32, "b"))
    core.store("c", long_prefix(3, "a"))  # the far tier is away: nothing is decided for it
    core.run()
    core.wait(5.1)
    core.check_tiers()
    core.run(keep=lambda one: one.direction is Direction.DEMOTE)
    (trial,) = core.going(Direction.DEMOTE)
    core.answer(trial)
    (relayed,) = core.going(Direction.DEMOTE)
    core.store("d", long_prefix(3, "a"))
    core.answer(relayed)
    core.run()
    sent = [one.key for one in core.sent if one.tier == "far" and one is not hung]
    assert len(sent) == len(set(sent)) == 3


def test_only_so_many_objects_wait_to_be_relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "RELAYS_MAX", 3)
    core = near_and_far(slots=32, writes_in_flight=1)
    store_near(core, "a", long_prefix(8))
    assert len(core.cache._tier_writes.queues["far"].relays) == 3
    assert core.cache.counters.relays_dropped == 4


def test_write_back_relays_too() -> None:
    core = near_and_far(slots=8, writes_in_flight=1, write_policy=WritePolicy.BACK)
    core.store_and_run("a", long_prefix(8, "a"))
    store_near(core, "b", long_prefix(8, "b"))
    assert core.stored()[-1].stored == 8


# ---- fill ----------------------------------------------------------------------------------------------------------


def test_an_object_from_a_slower_tier_enters_the_faster_one_at_its_second_use() -> None:
    core, prompt = near_and_far(), prefix_of("a")
    core.fill("far", prompt)
    core.lookup_and_run("r", prompt)
    core.load_and_run("r", prompt)
    assert not core.held["disk"]
    core.load_and_run("s", prompt)
    assert core.held["disk"] == {(key("a"), 0)}
    assert not [one for one in core.sent if (one.direction, one.tier) == (Direction.DEMOTE, "far")], (
        "not sent where it came from"
    )


def test_a_second_promotion_counts_as_a_second_use() -> None:
    core, prompt = near_and_far(slots=2), prefix_of("a")
    core.fill("far", prompt)
    for request in "rs":
        core.lookup_and_run(request, prompt)
        core.load_and_run(request, prompt)
        core.store_and_run(f"{request} other", prefix_of("yz" if request == "r" else "vw"))
    assert (key("a"), 0) in core.held["disk"]


def test_the_memory_of_promotions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_writes, "PROMOTED_MAX", 2)
    core, prompt = near_and_far(), long_prefix(5)
    core.fill("far", prompt)
    core.lookup_and_run("r", prompt)
    core.load_and_run("r", prompt)
    assert len(core.cache._tier_writes._promoted) == 2


def test_what_a_probe_found_is_not_uploaded_again() -> None:
    """The engine computed the prompt though the far tier has it."""
    core, prompt = near_and_far(), prefix_of("a")
    core.fill("far", prompt)
    core.lookup_and_run("r", prompt)
    core.store_and_run("r", prompt)
    assert core.held["disk"] == {(key("a"), 0)}
    assert not [one for one in core.sent if one.tier == "far"]


def test_what_can_not_be_staged_is_dropped_and_holds_up_no_other_relay() -> None:
    few, many = 6, 64  # a group of so few slots has no staging area
    core = near_and_far(groups=(History(), History()), slots=(few, many))
    keep = lambda one: one.tier == "far"  # noqa: E731 - the far tier is slow
    for number in range(4):
        core.store(f"r{number}", long_prefix(8, f"s{number}_"))
        core.run(keep=keep)
    waiting = core.cache.relays_waiting()["far"]
    assert waiting
    core.run()
    assert core.cache.relays_waiting()["far"] == 0
    assert core.cache.pending_count == 0, "closing would wait for them until its deadline"
    assert core.cache.counters.relays_dropped > 0
    assert sum(group == 1 for _, group in core.held["far"]) == 4 * 8


def test_a_suspect_copy_that_a_probe_found_in_between_is_uploaded_again() -> None:
    core = near_and_far()
    core.fill("far", prefix_of("a"))
    core.lookup_and_run("r", prefix_of("a"))
    core.load("r", prefix_of("a"))
    (promote,) = core.going(Direction.PROMOTE)
    core.answer(promote, Outcome.FAILED, is_fault=True)
    core.release("r")
    core.lookup("other", prefix_of("a"))
    core.run()  # the far tier says that it has it
    store_near(core, "r2", prefix_of("a"))
    assert demotions(core, "far") == ["a"]
    assert [drop.tier for drop in core.drops] == ["far"]
