"""Used objects of a bucket outlive its lifecycle rule, and a cap holds, on a real server and by its clock alone."""

import hashlib
import heapq
import re
import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest
from tests.shared.ceph import wait_until
from tests.shared.s3_world import FINGERPRINT, KEY_ID, fresh_prefix, key_of, name_of, open_tier

from kvtier.codec.frame import frame_bytes, head_bytes, seal
from kvtier.codec.head import Identity
from kvtier.codec.raw import Raw
from kvtier.layout import GroupLayout, History
from kvtier.tier.base import Read
from kvtier.tier.s3 import rewrite as s3_rewrite
from kvtier.tier.s3 import sweep as s3_sweep
from kvtier.tier.s3.sweep import RECORD_NAME, S3Sweeper
from kvtier.tier.s3.upkeep import StoreClock, Upkeep

GROUP = GroupLayout(History(), (8192, 8192), "test/pages")
FRAME_BYTES = frame_bytes(GROUP)
LIFETIME_S = 1000.0
DAY_S = 86400.0
DEADLINE_S = 20.0
SIZE = 1 << 16


class Clock:
    """Monotonic seconds that begin anywhere and can be turned."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def sealed(number: int) -> memoryview:
    """A whole frame of `name_of(number)`."""
    slot = memoryview(bytearray(FRAME_BYTES))
    slot[head_bytes(GROUP) :] = bytes([number % 256]) * (FRAME_BYTES - head_bytes(GROUP))
    return seal(slot, GROUP, Identity(name_of(number), FINGERPRINT, bytes(32)), Raw())


def empty() -> memoryview:
    return memoryview(bytearray(FRAME_BYTES))


def modified(gateway, key: str) -> float:
    return obstore.head(gateway.raw, key)["last_modified"].timestamp()


def next_second() -> None:
    """S3 shows whole seconds: what is stored from here on has a later time."""
    time.sleep(1.1)


def has_time(tier) -> bool:
    return tier._rewriter._clock._ahead_s is not None


@pytest.fixture
def opened(gateway):
    """Opens tiers that rewrite; the store's time is known when they are given."""
    tiers = []

    def make(**upkeep):
        prefix = upkeep.pop("prefix", None) or fresh_prefix()
        tier = open_tier(gateway.access, prefix, upkeep=Upkeep(**{"lifetime_s": LIFETIME_S} | upkeep))
        tiers.append(tier)
        wait_until(lambda: has_time(tier), "the store's time", DEADLINE_S)
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.mark.shared_core
@pytest.mark.parametrize("off_s", [0.0, DAY_S, -DAY_S])
def test_a_read_past_half_the_lifetime_rewrites_the_object_whatever_the_nodes_clock_says(
    gateway, opened, monkeypatch, off_s
):
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + off_s)
    clock = Clock(off_s)
    tier = opened(clock=clock)
    keys = [key_of(tier, name_of(number)) for number in range(3)]
    assert all(tier.write(name_of(number), sealed(number)) for number in range(3))
    before = [modified(gateway, key) for key in keys]
    next_second()
    assert tier.read(name_of(0), empty()) == FRAME_BYTES
    assert not tier._rewriter._waiting  # young

    clock.ahead_s += 0.6 * LIFETIME_S
    into = empty()
    assert tier.read(name_of(0), into) == FRAME_BYTES
    assert tier.read_many([Read(name_of(1), empty()), Read(name_of(1), empty())]) == [FRAME_BYTES] * 2
    wait_until(lambda: modified(gateway, keys[1]) > before[1], "rewrite", DEADLINE_S)
    assert modified(gateway, keys[0]) > before[0]
    assert modified(gateway, keys[2]) == before[2]  # not read
    assert into == sealed(0)
    assert tier.read(name_of(0), into) == FRAME_BYTES
    assert into == sealed(0)
    assert tier.figures().write_bytes["frames"] >= 5 * FRAME_BYTES


def test_a_clock_of_the_node_would_be_noticed(opened, monkeypatch):
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + DAY_S)
    monkeypatch.setattr(StoreClock, "age_s", lambda self, when: time.time() - when.timestamp())
    tier = opened(rewrite_bytes_per_s=1)
    tier._rewriter.close()  # keys stay in its list
    tier.write(name_of(0), sealed(0))
    tier.read(name_of(0), empty())
    assert tier._rewriter._waiting


def test_rewrites_keep_to_their_budget(gateway, opened):
    clock = Clock()
    tier = opened(clock=clock, rewrite_bytes_per_s=1)
    for number in range(4):
        tier.write(name_of(number), sealed(number))
    keys = [key_of(tier, name_of(number)) for number in range(4)]
    before = [modified(gateway, key) for key in keys]
    next_second()
    clock.ahead_s += 0.6 * LIFETIME_S
    for number in range(4):
        tier.read(name_of(number), empty())
    wait_until(lambda: modified(gateway, keys[0]) > before[0], "rewrite", DEADLINE_S)
    time.sleep(1.5)  # without the budget the others follow within milliseconds
    assert [modified(gateway, key) for key in keys[1:]] == before[1:]


def test_damaged_foreign_short_and_absent_objects_are_not_rewritten(gateway, opened):
    clock = Clock()
    tier = opened(clock=clock)
    damaged = bytearray(sealed(0))
    damaged[-1] ^= 1
    bad = {0: bytes(damaged), 1: bytes(sealed(7)), 2: bytes(sealed(2))[:-4096], 3: b"", 4: bytes(sealed(4))}
    for number, content in bad.items():
        obstore.put(gateway.raw, key_of(tier, name_of(number)), content)
    tier.write(name_of(5), sealed(5))
    keys = [key_of(tier, name_of(number)) for number in range(6)]
    before = [modified(gateway, key) for key in keys]
    next_second()
    clock.ahead_s += 0.6 * LIFETIME_S
    meta = obstore.head(gateway.raw, keys[5])
    obstore.delete(gateway.raw, keys[4])
    for key in keys:
        tier._rewriter.used(key, meta)
    wait_until(lambda: modified(gateway, keys[5]) > before[5], "rewrite", DEADLINE_S)
    assert [modified(gateway, keys[number]) for number in range(4)] == before[:4]
    assert tier.contains([name_of(4)]) == [False]


def test_an_object_that_another_node_has_rewritten_is_left_alone(gateway, opened):
    prefix, lifetime_s = fresh_prefix(), 10.0  # by real clocks: a turned one takes the new object for old, too
    here, there = (opened(prefix=prefix, lifetime_s=lifetime_s) for _ in range(2))
    here.write(name_of(0), sealed(0))
    key = key_of(here, name_of(0))
    old = obstore.head(gateway.raw, key)
    wait_until(lambda: (here._rewriter._clock.age_s(old["last_modified"]) or 0) > lifetime_s / 2 + 0.5, "age", 15)
    here.read(name_of(0), empty())
    wait_until(lambda: modified(gateway, key) > old["last_modified"].timestamp(), "rewrite", DEADLINE_S)
    rewritten = modified(gateway, key)
    next_second()
    there._rewriter.used(key, old)  # as if it had read at the same moment
    assert there._rewriter._waiting
    wait_until(lambda: not there._rewriter._waiting, "its turn", DEADLINE_S)
    time.sleep(0.3)
    there.close()  # waits for the request in flight
    assert modified(gateway, key) == rewritten
    assert there.figures().write_bytes["frames"] == 0


def test_a_server_that_fails_costs_one_log_line_and_no_restart(gateway, opened, monkeypatch, caplog):
    monkeypatch.setattr(s3_rewrite, "FAILURE_PAUSE_S", 0.1)
    clock = Clock()
    tier = opened(clock=clock)
    tier.write(name_of(0), sealed(0))
    key = key_of(tier, name_of(0))
    meta = obstore.head(gateway.raw, key)
    next_second()
    clock.ahead_s += 0.6 * LIFETIME_S
    gateway.proxy.cut()
    for _ in range(3):
        tier._rewriter.used(key, meta)
        wait_until(lambda: not tier._rewriter._waiting, "its turn", DEADLINE_S)
        time.sleep(1.0)  # an idle step follows
    assert tier._rewriter._is_failing
    gateway.proxy.heal()
    tier._rewriter.used(key, meta)
    wait_until(lambda: modified(gateway, key) > meta["last_modified"].timestamp(), "rewrite", DEADLINE_S)
    assert sum("rewrites fails" in record.message for record in caplog.records) == 1


def test_close_removes_the_object_of_the_clock(gateway, opened):
    tier = opened()
    folder = tier._root + "clock/"
    assert len(obstore.list(gateway.raw, folder).collect()) == 1
    assert list(tier.scan()) == []
    tier.close()
    assert obstore.list(gateway.raw, folder).collect() == []


OWN = KEY_ID.hex()
MODEL, OTHER_MODEL = FINGERPRINT.hex()[:32], hashlib.sha256(b"other").hexdigest()[:32]


def filled(gateway, prefix: str) -> dict[str, list[str]]:
    """Keys of what a bucket holds: old objects, then new ones, of two models, and what no sweep may touch."""
    own, other = f"{prefix}/{OWN}", f"{prefix}/{bytes(16).hex()}"
    name = [name_of(number).hex() for number in range(30)]
    keys = {
        "foreign": [
            f"{other}/{MODEL}/{name[0]}",
            f"{prefix}/{name[0]}",
            f"{own}/{MODEL}/notes.txt",
            f"{own}/{MODEL}/{name[0]}.txt",
            f"{own}/{MODEL}/clock/{name[0]}",
            f"{own}/kvtier-absent",
            f"{own}x/{MODEL}/{name[0]}",
            f"elsewhere/{OWN}/{MODEL}/{name[0]}",
        ],
        "old": [f"{own}/{model}/{each}" for model in (MODEL, OTHER_MODEL) for each in name[:10]],
        "new": [f"{own}/{MODEL}/{each}" for each in name[10:]],
    }
    for when, group in keys.items():
        for key in group:
            obstore.put(gateway.raw, key, bytes(SIZE))
        if when == "old":
            next_second()
    return keys


def sweeper(gateway, prefix: str, capacity_bytes: int, clock=time.monotonic) -> S3Sweeper:
    own = f"{prefix}/{OWN}/"
    upkeep = Upkeep(capacity_bytes=capacity_bytes, sweep_interval_s=600.0, clock=clock)
    return S3Sweeper("s3", gateway.raw, own, f"{own}{MODEL}/", upkeep)


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


def test_a_sweep_of_the_newest_objects_would_be_noticed(gateway, monkeypatch):
    monkeypatch.setattr(heapq, "nsmallest", heapq.nlargest)
    with pytest.raises(AssertionError):
        test_two_sweeps_at_once_keep_the_cap_and_delete_the_oldest_objects_only(gateway)


def test_a_sweep_that_ignores_the_pattern_would_be_noticed(gateway, monkeypatch):
    monkeypatch.setattr(s3_sweep, "_OBJECT", re.compile(".*"))
    with pytest.raises(AssertionError):
        test_two_sweeps_at_once_keep_the_cap_and_delete_the_oldest_objects_only(gateway)


def test_one_sweep_of_any_node_serves_all_for_the_interval(gateway, monkeypatch):
    prefix = fresh_prefix()
    filled(gateway, prefix)
    clock = Clock()
    first, second = (sweeper(gateway, prefix, 100 * SIZE, clock) for _ in range(2))
    lists = []
    sweep = S3Sweeper.sweep
    monkeypatch.setattr(S3Sweeper, "sweep", lambda self: lists.append(self) or sweep(self))
    for each in (first, second):
        each._clock.measure()
        assert 0 <= each._work() <= 60.0  # a random delay before the first look
        assert 590.0 <= each._work() <= 750.0
    assert lists == [first]
    assert first.used_bytes == second.used_bytes == 40 * SIZE
    assert first.evictions == second.evictions == 0
    clock.ahead_s += 601.0  # the record is old now
    second._work()
    assert lists == [first, second]
    obstore.put(gateway.raw, f"{prefix}/{OWN}/{RECORD_NAME}", b"-1 of another program")
    clock.ahead_s -= 601.0
    first._work()
    assert lists == [first, second, first]


def test_more_evictions_than_one_sweep_may_make_follow_at_once(gateway, monkeypatch):
    monkeypatch.setattr(s3_sweep, "EVICTIONS_MAX", 5)
    monkeypatch.setattr(s3_sweep, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(s3_sweep, "AGAIN_S", 0.01)
    prefix = fresh_prefix()
    open_tier(gateway.access, prefix).close()  # writes the marker: without one, foreign objects are refused
    keys = filled(gateway, prefix)
    upkeep = Upkeep(capacity_bytes=25 * SIZE, sweep_interval_s=600.0)
    tier = open_tier(gateway.access, prefix, upkeep=upkeep)
    wait_until(lambda: (tier.figures().evictions or 0) >= 15, "sweeps", DEADLINE_S)
    wait_until(lambda: tier.figures().used_bytes == 25 * SIZE, "end of the last sweep", DEADLINE_S)
    assert tier.figures().capacity_bytes == 25 * SIZE
    tier.close()
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
