"""A bucket under many operations of two nodes: the network breaks, this process stops, and objects are damaged."""

import random
import time
from contextlib import suppress

import obstore
import pytest
from tests.shared.s3_world import KEY_ID, fresh_prefix, open_tier
from tests.tier_soak import TierSoak, stop_this_process

OPERATIONS = [
    pytest.param(3000, marks=pytest.mark.shared_core),
    pytest.param(1_000_000, marks=[pytest.mark.nightly, pytest.mark.timeout(14400)]),
]
DEADLINE_S = 1.0
STOPPED_S = 3.5
"""Longer than the deadline, and what a read that was given up waits for its end."""


def faults_of(proxy, raw, prefix, chance, stop=stop_this_process):
    """What harms the network, the objects and the processes; `stop` stops these for some seconds."""

    def partition():
        proxy.partition()
        time.sleep(1.5 * DEADLINE_S)

    def stop_slowly():
        proxy.delay_s = 0.2  # answers are on their way when the process stops
        stop(STOPPED_S)

    def cut_bodies():
        proxy.cut_answers_after(chance.randrange(1000, 30_000))
        time.sleep(0.5)

    def damage():
        rows = [row for page in obstore.list(raw, prefix) for row in page]
        for row in chance.sample(rows, min(5, len(rows))):
            if row["size"] > 1000:
                with suppress(FileNotFoundError):  # a worker or the tier has deleted it since the list
                    content = bytearray(obstore.get(raw, row["path"]).bytes())
                    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
                    obstore.put(raw, row["path"], bytes(content[: chance.choice((len(content), 4096))]))

    return [partition, proxy.cut, stop_slowly, cut_bodies, damage, lambda: stop(STOPPED_S)]


@pytest.mark.parametrize("operations", OPERATIONS)
def test_s3_gives_no_wrong_byte_and_writes_into_no_buffer_late(gateway, operations):
    prefix = fresh_prefix()

    def make():
        return open_tier(gateway.access, prefix, deadline_s=DEADLINE_S, probe_deadline_s=0.5)

    place = f"{prefix}/{KEY_ID.hex()}/"
    faults = faults_of(gateway.proxy, gateway.raw, place, random.Random(operations))
    counts = TierSoak(make, faults, gateway.proxy.heal, operations).run(operations)
    assert counts["right"] > operations / 20
    assert min(counts["faults"], counts["failed"]) > 2
