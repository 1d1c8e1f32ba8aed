"""Valkey and Mooncake under many operations of two nodes, while servers are killed, stopped, and damaged."""

import random

import pytest
from tests.cluster.valkey_world import fresh_prefix, open_tier
from tests.tier_soak import TierSoak, stop_this_process

OPERATIONS = [
    pytest.param(4000, marks=pytest.mark.cluster_core),
    pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
]
STOPPED_S = 1.5
"""Longer than the deadlines of the tiers."""


def valkey_faults(valkey, prefix, chance, stop=stop_this_process):
    """What harms the server, its objects and the processes; `stop` stops these for some seconds."""

    def kill():
        valkey.kill()
        valkey.restart()

    def pause():
        valkey.pause()
        stop(STOPPED_S)

    def damage():
        for key in chance.sample(found := valkey.call("KEYS", f"{prefix}/*}}"), min(5, len(found))):
            valkey.call("SETRANGE", key, chance.randrange(10_000), chance.randbytes(8))

    return [kill, pause, damage, lambda: stop(STOPPED_S), lambda: valkey.call("FLUSHALL")]


def mooncake_faults(mooncake, chance, stop=stop_this_process):
    """What harms the storage nodes and the processes; `stop` stops these for some seconds."""

    def pause_a_node():
        chance.choice(mooncake.nodes).pause()
        stop(STOPPED_S)

    def kill_a_node():
        chance.choice(mooncake.nodes).kill()

    return [pause_a_node, kill_a_node, lambda: stop(STOPPED_S)]


@pytest.mark.parametrize("operations", OPERATIONS)
def test_valkey_gives_no_wrong_byte_and_writes_into_no_buffer_late(valkey, operations):
    prefix = fresh_prefix()

    def make():
        return open_tier(valkey, prefix=prefix, deadline_s=1.0, probe_deadline_s=0.5)

    faults = valkey_faults(valkey, prefix, random.Random(operations))
    counts = TierSoak(make, faults, valkey.resume, operations).run(operations)
    assert counts["right"] > operations / 10
    assert counts["faults"] > 3


@pytest.mark.parametrize("operations", OPERATIONS)
def test_mooncake_gives_no_wrong_byte_and_writes_into_no_buffer_late(mooncake, operations):
    prefix = fresh_prefix()

    def make():
        return mooncake.tier(transfer_deadline_s=1.0, probe_deadline_s=0.5, prefix=prefix)

    faults = mooncake_faults(mooncake, random.Random(operations))
    counts = TierSoak(make, faults, mooncake.heal, operations).run(operations)
    assert counts["right"] > operations / 10
    assert counts["faults"] > 2
