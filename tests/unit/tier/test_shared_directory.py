"""The shared directory tier on a local drive, with several open stores as nodes. `tests/shared` has real nodes."""

import contextlib
import json
import logging
import os
import threading
import time

import pytest

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier import registry
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.registry import TierContext
from kvtier.tier.shared_directory import sweep as shared_sweep
from kvtier.tier.shared_directory.claims import Claim, Claims, Declared, SweepRecord
from kvtier.tier.shared_directory.tier import SharedDirectoryTier

KEY, MODEL = b"k" * 16, b"f" * 16
DEADLINE_S = 30.0
MIB = 1 << 20


@pytest.fixture
def node(tmp_path):
    tiers = []

    def make(capacity_bytes=64 * MIB, *, key_id=KEY, model=MODEL, wait_s=DEADLINE_S):
        tiers.append(
            SharedDirectoryTier(
                tmp_path / "s", key_id=key_id, model=model, capacity_bytes=capacity_bytes, wait_s=wait_s
            )
        )
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def sweep(tier):
    """What the keeper does when a sweep is due."""
    tier._cap._sweep(tier._cap._claims.usage(), 0)


def read(tier, number, byte_count=2 * BLOCK_BYTES):
    into = empty_frame(byte_count)
    count = tier.read(object_name(number), into)
    return None if count is None else bytes(into[:count])


def holding(tier):
    """`tier` with object 1."""
    assert tier.write(object_name(1), frame_of(1))
    return tier


def files(root, pattern="*/*/*/*"):
    return [path for path in root.glob(pattern) if path.is_file()]


def held_bytes(root):
    found = 0
    for path in files(root):
        with contextlib.suppress(FileNotFoundError):  # a node removes files meanwhile
            found += -(-path.stat().st_size // BLOCK_BYTES) * BLOCK_BYTES
    return found


def test_one_node_writes_and_another_reads(node):
    a, b = node(), node()
    assert b.contains([object_name(1)]) == [False]
    assert a.write(object_name(1), frame_of(1))
    assert b.contains([object_name(1), object_name(2)]) == [True, False]
    assert read(b, 1) == bytes(frame_of(1))


def test_other_secrets_and_other_models_do_not_mix(node, caplog):
    node().write(object_name(1), frame_of(1))
    assert node(model=b"g" * 16).contains([object_name(1)]) == [False]
    assert "other secrets" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert node(key_id=b"x" * 16).contains([object_name(1)]) == [False]
    assert "objects of 1 other secrets and none of this one" in caplog.text


def test_both_layouts_refuse_each_others_store(tmp_path, node):
    node()
    with pytest.raises(TierError, match="store version 2, of kind shared_directory"):
        DirectoryTier(tmp_path / "s", capacity_bytes=MIB)
    DirectoryTier(tmp_path / "one", capacity_bytes=MIB).close()
    with pytest.raises(TierError, match="store version 1, of kind directory"):
        SharedDirectoryTier(tmp_path / "one", key_id=KEY, model=MODEL, capacity_bytes=MIB)


def test_it_needs_a_secret(tmp_path):
    kind = registry.by_name("shared_directory")
    settings = kind.settings(path=tmp_path / "s", capacity_bytes=MIB)
    with pytest.raises(ConfigError, match=r"store\.secret_file"):
        kind.open(settings, TierContext(layout=None, key_id=None))


def test_the_cap_holds_with_several_writers(tmp_path, node):
    capacity = 2 * MIB
    tiers = [node(capacity) for _ in range(3)]
    most, stopped = 0, threading.Barrier(4)

    def fill(tier, first):
        for number in range(first, first + 60):
            if number % 10 == 0:
                stopped.wait(DEADLINE_S)  # the main thread counts
                stopped.wait(DEADLINE_S)
            tier.write(object_name(number), frame_of(number % 7, 16 * BLOCK_BYTES))

    writers = [threading.Thread(target=fill, args=(tier, 1000 * n)) for n, tier in enumerate(tiers)]
    for writer in writers:
        writer.start()
    for _ in range(6):
        stopped.wait(DEADLINE_S)
        most = max(most, held_bytes(tmp_path / "s"))
        stopped.wait(DEADLINE_S)
    for writer in writers:
        writer.join(DEADLINE_S)
    assert capacity // 2 < most <= capacity
    assert held_bytes(tmp_path / "s") <= capacity
    assert sum(tier.figures().evictions for tier in tiers) > 60


def test_the_oldest_use_goes_first(tmp_path, node):
    tier = node()
    for number in range(8):
        assert tier.write(object_name(number), frame_of(number))
    paths = {number: next(tmp_path.glob(f"s/*/*/*/{object_name(number).hex()}")) for number in range(8)}
    for number, path in paths.items():
        os.utime(path, (time.time() - 10_000 + number,) * 2)
    assert read(tier, 0) is not None  # its use is published when the store closes, at the latest
    tier.close()
    smaller = node(6 * 2 * BLOCK_BYTES)
    sweep(smaller)
    assert [number for number, path in paths.items() if path.exists()] == [0, 4, 5, 6, 7]


def test_temporary_files_of_dead_writers_are_swept(tmp_path, node):
    tier = holding(node())
    fan = files(tmp_path / "s")[0].parent
    old, new = fan / f"draft_{'a' * 16}_1", fan / f"draft_{'a' * 16}_2"
    for path in (old, new):
        path.write_bytes(bytes(BLOCK_BYTES))
    os.utime(old, (time.time() - shared_sweep.TEMP_AGE_NS / 1e9 - 60,) * 2)
    stranger = fan / "notes.txt"
    stranger.write_text("of somebody else")
    os.utime(stranger, (1, 1))
    sweep(tier)
    assert (old.exists(), new.exists(), stranger.exists()) == (False, True, True)
    assert tier.contains([object_name(1)]) == [True]


def test_a_swept_temporary_file_costs_only_its_write(tmp_path, node, monkeypatch):
    tier = node()
    sync = os.fsync

    def swept_meanwhile(descriptor):
        sync(descriptor)
        for path in (tmp_path / "s").glob("*/*/*/draft_*"):
            path.unlink()

    monkeypatch.setattr(os, "fsync", swept_meanwhile)
    assert not tier.write(object_name(1), frame_of(1))
    monkeypatch.undo()
    assert tier.write(object_name(1), frame_of(1))


@pytest.mark.parametrize("content", [b"", b"x", b"{}", b"[1]", b'{"written": -1, "claimed": 1}', b"\xff" * 9])
def test_damaged_claims_and_records_count_as_missing(tmp_path, node, content):
    tier = holding(node())
    for path in (tmp_path / "s" / "usage").iterdir():
        path.write_bytes(content)
    for number in range(2, 40):
        assert tier.write(object_name(number), frame_of(number, 64 * BLOCK_BYTES))
    assert tier.contains([object_name(39)]) == [True]


def test_a_store_that_was_purged_goes_on(tmp_path, node):
    tier = holding(node())
    for path in sorted((tmp_path / "s" / KEY.hex()).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "s" / KEY.hex()).rmdir()
    assert read(tier, 1) is None
    assert tier.write(object_name(1), frame_of(1))
    assert read(tier, 1) == bytes(frame_of(1))


def test_a_file_without_bytes_is_absent_and_is_replaced(tmp_path, node):
    """CephFS and others leave one when a node dies before its bytes have arrived."""
    tier = holding(node())
    files(tmp_path / "s")[0].write_bytes(b"")
    assert tier.contains([object_name(1)]) == [False]
    assert read(tier, 1) is None
    assert tier.write(object_name(1), frame_of(1))
    assert read(tier, 1) == bytes(frame_of(1))


def test_an_unmounted_store_is_an_error_and_nothing_is_created(tmp_path, node):
    tier = node()
    (tmp_path / "s").rename(tmp_path / "away")
    (tmp_path / "s").mkdir()
    for act in (
        lambda: tier.contains([]),
        lambda: read(tier, 1),
        lambda: tier.write(object_name(1), frame_of(1)),
    ):
        with pytest.raises(TierError):
            act()
    tier._cap.take(64 * MIB)
    (tmp_path / "s").rmdir()  # nothing was created there
    (tmp_path / "away").rename(tmp_path / "s")
    assert tier.write(object_name(1), frame_of(1))


def test_no_room_drops_the_write_in_time(tmp_path, node):
    tier = node(MIB, wait_s=0.2)
    other = Claims(str(tmp_path / "s"))
    other.declare(0, MIB)  # another node may fill the whole store
    start_s = time.monotonic()
    assert not tier.write(object_name(1), frame_of(1))
    assert time.monotonic() - start_s < DEADLINE_S
    assert other.usage().record is not None


def test_a_write_whose_room_another_takes_waits_for_further_room(node):
    """The one that comes later takes it before the first awakes."""
    tier = node()
    cap, charge, taken = tier._cap, 64 * BLOCK_BYTES, []
    grant = cap._grant

    def robbed(usage, wanted):
        with cap._changed:  # the first writer cannot awake
            is_granted = grant(usage, wanted)
            if is_granted and len(taken) < 3:
                taken.append(cap.take(charge))
        return is_granted

    cap._grant = robbed
    assert tier.write(object_name(1), frame_of(1, charge))
    assert taken == [True] * 3


def test_a_write_that_finds_no_room_does_not_wait_for_more_rounds(tmp_path, node):
    tier = node(MIB)
    Claims(str(tmp_path / "s")).declare(0, MIB)
    assert not tier.write(object_name(1), frame_of(1))
    assert tier._cap._ended <= 2


def test_a_bound_adds_what_was_claimed_since_the_record():
    claims = {"a": Claim(50, 80, 0), "b": Claim(0, 7, 0)}
    assert Declared(None, claims).bound() is None
    usage = Declared(SweepRecord(1000, {"a": 30, "gone": 5}, 0), claims)
    assert usage.bound() == 1000 + (80 - 30) + 7
    assert usage.bound("a", 100) == 1000 + (100 - 30) + 7


def test_claims_are_given_back_at_the_end(tmp_path, node):
    tier = holding(node())
    tier.close()
    (claim,) = [json.loads(path.read_text()) for path in (tmp_path / "s" / "usage").iterdir() if len(path.name) == 16]
    assert (claim["written"], claim["claimed"]) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)


@pytest.mark.parametrize("depth", [1, 2])
def test_no_link_below_the_root_is_followed(tmp_path, node, depth):
    tier, elsewhere = holding(node()), tmp_path / "elsewhere"
    (path,) = files(tmp_path / "s")
    linked = path.parents[3 - depth]
    linked.rename(elsewhere)
    linked.symlink_to(elsewhere)
    assert read(tier, 1) is None
    assert tier.contains([object_name(1)]) == [False]
    assert list(tier.scan()) == []
    before = sorted(elsewhere.rglob("*"))
    tier.delete(object_name(1))
    assert tier.write(object_name(2), frame_of(2))
    assert sorted(elsewhere.rglob("*")) == before, "a write or delete went through the link"
    assert read(tier, 2) == bytes(frame_of(2)), "the link is renamed, and the store goes on"


def test_times_in_the_future_end_neither_the_keeper_nor_the_cap(tmp_path, node):
    tier = holding(node(2 * MIB))
    (path,) = files(tmp_path / "s")
    os.utime(path, ns=(2**63, 2**63))  # the year 2262
    if path.stat().st_mtime_ns < 2**63:
        pytest.skip("this file system has no such times")
    for number in range(2, 400):
        assert tier.write(object_name(number), frame_of(number))
    assert held_bytes(tmp_path / "s") <= 2 * MIB
    assert tier.figures().evictions > 0


def test_a_link_in_place_of_the_claims_is_renamed(tmp_path, node):
    tier = holding(node())
    tier.close()
    claims, elsewhere = tmp_path / "s" / "usage", tmp_path / "elsewhere"
    claims.rename(elsewhere)
    claims.symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    assert node().write(object_name(2), frame_of(2))
    assert sorted(elsewhere.iterdir()) == before


@pytest.mark.parametrize("count", [2**63, -1, 10**4000], ids=["large", "negative", "huge"])
def test_counts_that_no_writer_declares_are_left_out(tmp_path, node, count):
    node().write(object_name(1), frame_of(1))
    claims = Claims(str(tmp_path / "s"))
    claims._write(claims.owner, {"written": 0, "claimed": count})
    assert claims.owner not in claims.usage().claims


def test_a_claim_of_more_than_the_cap_ends_no_writes_and_evicts_nothing(tmp_path, node):
    tier = holding(node())
    tier.close()
    foreign = Claims(str(tmp_path / "s"))
    foreign.declare(0, 2**61)
    os.utime(tmp_path / "s" / "usage" / foreign.owner, (2**32, 2**32))  # in the future, so it does not expire
    tier = node(wait_s=5.0)
    assert tier.write(object_name(2), frame_of(2))
    sweep(tier)
    assert tier.contains([object_name(1), object_name(2)]) == [True, True]


def test_nodes_do_not_try_a_store_that_they_lost_together_at_once(tmp_path) -> None:
    """Herds: the pause before a trial differs from node to node, for tiers that nodes share."""
    from kvtier.config.loader import load
    from kvtier.runtime.open import RETRY_JITTER, _rule

    texts = [f"far=shared_directory:{tmp_path}/far?retry_s=4s", f"near=disk:{tmp_path}/near?retry_s=4s"]
    far, near = load(environ={"KVTIER_STORE__SECRET": "5e" * 32}, tiers=texts).config.tiers
    pauses = {_rule(far).retry_s for _ in range(20)}
    assert len(pauses) == 20
    assert all(4 * (1 - RETRY_JITTER) <= pause_s <= 4 * (1 + RETRY_JITTER) for pause_s in pauses)
    assert {_rule(near).retry_s for _ in range(3)} == {4.0}
