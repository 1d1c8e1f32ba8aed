"""A cap of a bucket holds: the oldest objects are deleted, on a real server and by its times."""

import hashlib
import heapq
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from tests.shared.s3_world import KEY_ID, MODEL, fresh_prefix, name_of, open_tier
from tests.waiting import wait_until

from kvtier.tier.s3 import sweep as s3_sweep
from kvtier.tier.s3.sweep import RECORD_NAME, S3Sweeper

DAY_S = 86400.0
DEADLINE_S = 20.0
SIZE = 1 << 16


def next_second() -> None:
    """S3 shows whole seconds: what is stored from here on has a later time."""
    time.sleep(1.1)


OWN = KEY_ID.hex()
OWN_MODEL, OTHER_MODEL = MODEL.hex(), hashlib.sha256(b"other").hexdigest()[:32]


def filled(gateway, prefix: str) -> dict[str, list[str]]:
    """Keys of what a bucket holds: old objects, then new ones, of two models, and what no sweep may touch."""
    own, other = f"{prefix}/{OWN}", f"{prefix}/{bytes(16).hex()}"
    name = [name_of(number).hex() for number in range(30)]
    keys = {
        "foreign": [
            f"{other}/{OWN_MODEL}/{name[0]}",
            f"{prefix}/{name[0]}",
            f"{own}/{OWN_MODEL}/notes.txt",
            f"{own}/{OWN_MODEL}/{name[0]}.txt",
            f"{own}/{OWN_MODEL}/clock/{name[0]}",
            f"{own}/kvtier-absent",
            f"{own}x/{OWN_MODEL}/{name[0]}",
            f"elsewhere/{OWN}/{OWN_MODEL}/{name[0]}",
        ],
        "old": [f"{own}/{model}/{each}" for model in (OWN_MODEL, OTHER_MODEL) for each in name[:10]],
        "new": [f"{own}/{OWN_MODEL}/{each}" for each in name[10:]],
    }
    for when, group in keys.items():
        for key in group:
            obstore.put(gateway.raw, key, bytes(SIZE))
        if when == "old":
            next_second()
    return keys


def sweeper(gateway, prefix: str, capacity_bytes: int) -> S3Sweeper:
    return S3Sweeper("s3", gateway.raw, f"{prefix}/{OWN}/", capacity_bytes, 600.0)


def there(gateway) -> set[str]:
    return {row["path"] for row in obstore.list(gateway.raw).collect() if not row["path"].endswith(RECORD_NAME)}


@pytest.mark.shared_core
def test_two_sweeps_at_once_keep_the_cap_and_delete_the_oldest_objects_only(gateway):
    prefix = fresh_prefix()
    keys = filled(gateway, prefix)
    capacity = 25 * SIZE  # 5 % of it stay free, so that 23 of 40 objects stay
    sweepers = [sweeper(gateway, prefix, capacity) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(each.sweep) for each in sweepers]:
            ended.result(DEADLINE_S)
    left = there(gateway)
    assert left.issuperset(keys["foreign"])
    assert left.issuperset(keys["new"])
    assert len(left.intersection(keys["old"])) == 3
    assert sum(each.evictions for each in sweepers) >= 17
    for each in sweepers:
        each.sweep()
        assert each.used_bytes == 23 * SIZE
    assert there(gateway) == left


@pytest.mark.parametrize(
    "planted",
    [(heapq, "nsmallest", heapq.nlargest), (s3_sweep, "_OBJECT", re.compile(".*"))],
    ids=["the newest objects go", "whatever its key is"],
)
def test_a_wrong_sweep_would_be_noticed(gateway, monkeypatch, planted):
    monkeypatch.setattr(*planted)
    with pytest.raises(AssertionError):
        test_two_sweeps_at_once_keep_the_cap_and_delete_the_oldest_objects_only(gateway)


@pytest.mark.parametrize("off_s", [0.0, 300.0, -300.0])
def test_one_sweep_of_any_node_serves_all_for_the_interval(gateway, monkeypatch, off_s):
    prefix = fresh_prefix()
    filled(gateway, prefix)
    first, second = (sweeper(gateway, prefix, 100 * SIZE) for _ in range(2))
    lists = []
    sweep = S3Sweeper.sweep
    monkeypatch.setattr(S3Sweeper, "sweep", lambda self: lists.append(self) or sweep(self))
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + off_s)
    for each in (first, second):
        assert 590.0 - abs(off_s) <= each._work() <= 750.0
    assert lists == [first]
    assert first.used_bytes == second.used_bytes == 40 * SIZE
    assert first.evictions == second.evictions == 0
    obstore.put(gateway.raw, f"{prefix}/{OWN}/{RECORD_NAME}", b"-1 of another program")
    first._work()
    assert lists == [first, first]


@pytest.mark.parametrize("off_s", [601.0, DAY_S, -DAY_S])
def test_a_record_that_is_old_or_of_the_future_is_followed_by_a_sweep(gateway, monkeypatch, off_s):
    prefix = fresh_prefix()
    filled(gateway, prefix)
    one = sweeper(gateway, prefix, 100 * SIZE)
    assert one._read_record() == math.inf
    one.sweep()
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + off_s)
    assert one._read_record() >= 600.0
    assert 590.0 <= one._work() <= 750.0


def test_a_server_that_fails_costs_one_log_line_and_no_restart(gateway, monkeypatch, caplog):
    monkeypatch.setattr(s3_sweep, "FIRST_WAIT_S", 0.0)
    tier = open_tier(gateway.access, fresh_prefix())
    gateway.proxy.cut()
    one, attempts = S3Sweeper("s3", tier._store, tier._own, SIZE, 0.4), []
    work = one._work
    monkeypatch.setattr(one, "_work", lambda: attempts.append(0) or work())
    one.start()
    wait_until(lambda: len(attempts) > 3, "several attempts", DEADLINE_S)
    assert one.used_bytes is None
    gateway.proxy.heal()
    wait_until(lambda: one.used_bytes == 0, "a sweep", DEADLINE_S)
    one.close()
    assert sum("cannot be swept" in record.message for record in caplog.records) == 1


def test_more_evictions_than_one_sweep_may_make_follow_at_once(gateway, monkeypatch):
    monkeypatch.setattr(s3_sweep, "EVICTIONS_MAX", 5)
    monkeypatch.setattr(s3_sweep, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(s3_sweep, "AGAIN_S", 0.01)
    prefix = fresh_prefix()
    keys = filled(gateway, prefix)
    tier = open_tier(gateway.access, prefix, capacity_bytes=25 * SIZE, sweep_interval_s=600.0)
    wait_until(lambda: (tier.figures().evictions or 0) >= 15, "sweeps", DEADLINE_S)
    wait_until(lambda: tier.figures().used_bytes == 25 * SIZE, "end of the last sweep", DEADLINE_S)
    assert tier.figures().capacity_bytes == 25 * SIZE
    left = there(gateway)
    assert left.issuperset(keys["foreign"])
    assert left.issuperset(keys["new"])
    assert len(left.intersection(keys["old"])) == 5


def test_a_bucket_that_is_not_swept_in_time_keeps_its_objects(gateway, monkeypatch):
    prefix = fresh_prefix()
    filled(gateway, prefix)
    before = there(gateway)
    monkeypatch.setattr(s3_sweep, "SWEEP_DEADLINE_S", 0.0)
    with pytest.raises(TimeoutError):
        sweeper(gateway, prefix, SIZE).sweep()
    assert there(gateway) == before
