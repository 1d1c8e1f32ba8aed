"""An object store's slots, metrics and health."""

import time

import pytest
from tests.metric_values import values_of

from kvtier.codec.frame import frame_bytes
from kvtier.core.limits import TierRules
from kvtier.observe import metric_definitions as table
from kvtier.runtime.arena import Arena
from kvtier.runtime.executor import Completion
from kvtier.runtime.object_store import ObjectStore
from kvtier.runtime.object_transfers import ObjectTransfers
from kvtier.runtime.object_work import ObjectCall, ObjectRead
from kvtier.runtime.staging import StagingSlots
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.object_store import DEADLINE_S, LAYOUT, STAGED, STAGING_BYTES, got, object_id, put
from kvtier.types import Drop, Link, Origin, Outcome


def opened(tier):
    return ObjectStore(
        layout=LAYOUT,
        name_root=bytes(32),
        fingerprint=bytes(32),
        tiers={tier.name: tier},
        rules=[TierRules(name=tier.name)],
        arena=Arena(LAYOUT, (STAGED,) * len(LAYOUT.groups)),
    )


def test_neither_reads_nor_writes_take_all_slots():
    staging = StagingSlots((8, 2))
    reads = [staging.take_for_read(0) for _ in range(8)]
    assert reads.count(None) == 2
    assert [staging.take_for_write(0) is None for _ in range(3)] == [False, False, True]
    assert staging.used(0) == 8
    assert staging.used(1) == 0
    for slot in reads[:6]:
        staging.give_from_read(0, slot)
    assert sorted([staging.take_for_read(0) for _ in range(6)]) == sorted(reads[:6]), "a slot is given once"


def test_a_read_that_becomes_a_write_counts_as_one():
    staging = StagingSlots((4,))
    slot = staging.take_for_read(0)
    assert [staging.take_for_write(0) for _ in range(2)].count(None) == 0
    assert staging.read_becomes_write(0)
    assert staging.take_for_read(0) is not None
    assert not staging.read_becomes_write(0), "writes have their most"
    staging.give_from_write(0, slot)
    assert staging.used(0) == 3


class Silent:
    def submitted(self, command):
        pass

    def completed(self, completion):
        pass


def transfers_of(*names):
    rules = [TierRules(name=name) for name in names]
    return ObjectTransfers(layout=LAYOUT, slots=(4, 4), tiers=rules, down=(), observer=Silent())


def commands_of(transfers):
    taken = list(transfers.output.commands)
    transfers.output.commands.clear()
    return taken


def call_of_one():
    return ObjectCall(lambda: None, [Outcome.CANCELLED], 1)


def test_a_put_that_joins_an_overdue_write_is_answered():
    transfers, page = transfers_of("memory"), object_id(1)
    deadline_s = transfers.tiers["memory"].rules.transfer_deadline_s
    first, before, after = call_of_one(), call_of_one(), call_of_one()
    transfers.filled(transfers.stage(first, 0, page, Origin()), 0.0)
    transfers.advance(0.0)
    (demote,) = commands_of(transfers)
    transfers.abandon(first)
    assert transfers.join(before, 0, page)
    assert before.left == 1
    transfers.expire(deadline_s)
    assert before.outcomes == [Outcome.FAILED]
    assert transfers.join(after, 0, page)
    assert after.outcomes == [Outcome.FAILED], "its thread may never return"
    transfers.complete(Completion(demote, Outcome.FAILED), deadline_s)
    assert transfers.staging.used(0) == 0
    assert not transfers.join(after, 0, page)


@pytest.mark.parametrize("has_lost_it", [False, True])
def test_a_put_that_joins_a_relay_is_done_if_the_source_has_the_object(has_lost_it):
    transfers, page = transfers_of("fast", "slow"), object_id(1)
    slow = transfers.tiers["slow"]
    slow.breakers[Link.DEMOTE].open_now()
    slow.breakers[Link.DEMOTE].retry_at_s = 1.0
    transfers.filled(transfers.stage(call_of_one(), 0, page, Origin()), 0.0)
    transfers.advance(0.0)
    (demote,) = commands_of(transfers)
    transfers.complete(Completion(demote, Outcome.DONE), 0.1)
    assert transfers.relays_waiting()["slow"] == 1
    slow.breakers[Link.DEMOTE].succeeded()
    transfers.advance(2.0)
    (promote,) = commands_of(transfers)
    again = call_of_one()
    assert transfers.join(again, 0, page)
    assert again.left == 1, "the source may have lost it"
    transfers.complete(Completion(promote, Outcome.ABSENT if has_lost_it else Outcome.DONE), 2.1)
    assert again.outcomes == [Outcome.FAILED if has_lost_it else Outcome.DONE]
    transfers.advance(2.1)
    assert [it.tier for it in commands_of(transfers)] == ([] if has_lost_it else ["slow"])
    assert transfers.staging.used(0) == (0 if has_lost_it else 1)


def test_a_put_that_joins_a_relay_does_not_wait_for_a_source_that_hangs():
    transfers, page = transfers_of("fast", "slow"), object_id(1)
    transfers.tiers["slow"].breakers[Link.DEMOTE].open_now()
    transfers.tiers["slow"].breakers[Link.DEMOTE].retry_at_s = 1.0
    transfers.filled(transfers.stage(call_of_one(), 0, page, Origin()), 0.0)
    transfers.advance(0.0)
    transfers.complete(Completion(commands_of(transfers)[0], Outcome.DONE), 0.1)
    transfers.tiers["slow"].breakers[Link.DEMOTE].succeeded()
    transfers.advance(2.0)
    before, after = call_of_one(), call_of_one()
    assert transfers.join(before, 0, page)
    transfers.expire(2.0 + transfers.tiers["fast"].rules.transfer_deadline_s)
    assert transfers.join(after, 0, page)
    assert before.outcomes == after.outcomes == [Outcome.FAILED]


def test_the_write_that_heals_waits_for_the_drop_of_the_bad_copy():
    """The thread that found it may send the drop later, and an older probe may still say that the copy is there."""
    transfers = ObjectTransfers(
        layout=LAYOUT, slots=(4, 4), tiers=[TierRules(name="memory")], down=(), observer=Silent()
    )
    tier, bad = transfers.tiers["memory"], object_id(1)

    def commands():
        taken = list(transfers.output.commands)
        transfers.output.commands.clear()
        return taken

    call = ObjectCall(lambda: None, [Outcome.CANCELLED], 1)
    transfers.read(ObjectRead(call, 0, bad, Origin()))
    transfers.advance(0.0)
    (promote,) = commands()
    assert not transfers.must_write(tier, bad)
    transfers.complete(Completion(promote, Outcome.CORRUPT), 0.1)
    (drop,) = commands()
    assert isinstance(drop, Drop)
    assert call.outcomes == [Outcome.CORRUPT]
    call = ObjectCall(lambda: None, [Outcome.FAILED], 1)
    assert transfers.must_write(tier, bad)
    transfers.filled(transfers.stage(call, 0, bad, Origin()), 0.2)
    transfers.advance(0.2)
    assert commands() == [], "the drop is not over"
    transfers.complete(Completion(drop, Outcome.DONE), 0.3)
    assert transfers.must_write(tier, bad), "a probe may have been answered before"
    transfers.advance(0.3)
    (demote,) = commands()
    assert demote.link is Link.DEMOTE
    transfers.complete(Completion(demote, Outcome.DONE), 0.4)
    assert call.outcomes == [Outcome.DONE]
    transfers.expire(0.3 + tier.rules.probe_deadline_s)
    assert not transfers.must_write(tier, bad)


def test_metrics_are_those_of_a_session():
    store = opened(MemoryTier("memory", capacity_bytes=64 << 20))
    put(store, range(4))
    got(store, range(6))
    store.leading_run([object_id(0)], DEADLINE_S)
    metrics = store.metrics
    assert metrics.get(table.OBJECTS, way="write", outcome="done") == 4
    assert metrics.get(table.OBJECTS, way="read", outcome="done") == 4
    assert metrics.get(table.OBJECTS, way="read", outcome="absent") == 2
    assert metrics.get(table.TRANSFERS, link="demote", outcome="done") == 4
    assert metrics.get(table.TRANSFERS, link="promote", outcome="absent") == 2
    assert metrics.get(table.TRANSFER_BYTES, link="promote", tier="memory") == 4 * frame_bytes(LAYOUT.groups[0])
    assert metrics.get(table.PROBES, tier="memory", result="answered") == 2, "of the put and of the question"
    assert metrics.get(table.OBJECT_CALL_SECONDS, call="get") == 1
    assert metrics.get(table.TIER_UP, tier="memory", way="read") == 1
    until_s = time.monotonic() + DEADLINE_S
    while metrics.get(table.HELD_BYTES, place="memory") == 0:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert metrics.get(table.CAPACITY_BYTES, place="host") == STAGING_BYTES
    assert metrics.get(table.HELD_BYTES, place="host") == 0
    assert "kvtier_objects_total" in str(values_of(metrics))
    store.close()


def test_health_names_each_tier_and_its_figures():
    tier = MemoryTier("memory", capacity_bytes=64 << 20)
    store = opened(tier)
    put(store, range(4))
    until_s = time.monotonic() + DEADLINE_S
    while store.health()["memory"].figures.used_bytes != tier.used_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    assert store.health()["memory"][:2] == (True, True)
    assert put(store, [1]) == [Outcome.DONE], "an object that is there is not staged again"
    assert store.metrics.get(table.TRANSFERS, link="demote", outcome="done") == 4
    store.close()
