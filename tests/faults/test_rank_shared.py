"""Ranks in processes of their own share host memory: one copy, and no wrong byte whichever of them dies or stops.

A slot is given away only when every process that may write to it, or read it, has answered or is gone.
"""

import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.rank_world import opened
from tests.rank_worker import contents, workers
from tests.rig import (
    CHUNK_BLOCKS,
    CHUNK_TOKENS,
    DEADLINE_S,
    Engine,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)
from tests.system import until

from kvtier.runtime.remote_rank import RemoteRank
from kvtier.types import LoadDone, RequestId

SEED, BLOCKS, HOST_CHUNKS = 1, 128, 48
SLOTS, SCARCITY = 8, 12
"""Of each group, where slots are scarce: any 8 chunks need all of them."""
CHUNKS = 4
"""Of the prefix that is loaded."""
TOKENS = CHUNKS * CHUNK_TOKENS
TARGET = 20
"""The chunk of the engine into which its first is loaded."""


def started(directory, ranks=2, **options):
    """Workers with the KV of `SEED`, and host memory for `HOST_CHUNKS` if each has a copy."""
    return workers(directory, ranks, is_shared=True, blocks=BLOCKS, seed=SEED, host_chunks=HOST_CHUNKS, **options)


def at(first, places):
    """`places` in an engine whose chunk `first` is the first of the prefix."""
    return [it._replace(blocks=tuple(block + first * CHUNK_BLOCKS for block in it.blocks)) for it in places]


def target_places(first=TARGET):
    """Where the chunks of the prefix are loaded."""
    return at(first, load_places(TOKENS))


def check(worker, delivered=()):
    """No block has bytes of another one, and those of loads into `delivered` chunks have what was loaded.

    Returns:
        How many blocks have been loaded.
    """
    own, now = contents(Engine(BLOCKS, seed=SEED)), worker.ask("contents")
    may_be = {}
    for first in (TARGET, TARGET + CHUNKS):
        for place in target_places(first):
            for block in place.blocks:
                may_be[place.group, block] = own[place.group][block - first * CHUNK_BLOCKS]
                if first in delivered:
                    assert now[place.group][block] == may_be[place.group, block], "what was delivered is not there"
    moved = [
        (group, block) for group in range(len(own)) for block in range(BLOCKS) if now[group][block] != own[group][block]
    ]
    for group, block in moved:
        assert now[group][block] == may_be.get((group, block)), f"block {block} of group {group} has wrong bytes"
    return len(moved)


@pytest.mark.parametrize(
    ("ranks", "unable", "copies"), [(2, (), 1), (3, (), 1), (2, (1,), 2), (2, (0,), 2), (3, (1,), 2)]
)
def test_host_memory_holds_one_copy_for_all_ranks_that_can_map_it(tmp_path, ranks, unable, copies):
    directory, disk = tmp_path / "kv", tmp_path / "disk"
    with started(directory, ranks, unable=unable, disk=disk) as processes:
        assert {tuple(it.handshake["slots"]) for it in processes} == {(HOST_CHUNKS * ranks // copies,) * 2}
        with opened(directory, processes, disk=disk) as (kv, _):
            prefix = prefix_of(CHUNKS, kv.root)
            assert stored(kv.session, "a", prefix, places_of(range(CHUNKS))).held == 2 * CHUNKS
            assert loaded(kv.session, "b", prefix, TOKENS, target_places()).tokens == TOKENS
            assert {check(it, (TARGET,)) for it in processes} == {len(target_places()) * CHUNK_BLOCKS}
            assert kv.session.close().flushed
            assert all(it.end() for it in processes)
    with started(directory, ranks, disk=disk) as processes, opened(directory, processes, disk=disk) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        answer = looked_up(kv.session, "c", prefix)
        assert answer.sources == (("disk", TOKENS),)
        assert loaded(kv.session, "c", prefix, TOKENS, target_places()).tokens == TOKENS
        assert {check(it, (TARGET,)) for it in processes} == {len(target_places()) * CHUNK_BLOCKS}


def test_a_rank_has_nothing_of_a_group_that_others_hold_and_one_rank_of_all_finds_both(tmp_path):
    directory, disk = tmp_path / "kv", tmp_path / "disk"
    with started(directory, 3, is_divided=True, disk=disk) as processes:
        assert {tuple(it.handshake["slots"]) for it in processes} == {(HOST_CHUNKS * 3,) * 2}
        with opened(directory, processes, disk=disk) as (kv, _):
            prefix = prefix_of(CHUNKS, kv.root)
            assert stored(kv.session, "a", prefix, places_of(range(CHUNKS))).held == 2 * CHUNKS
            assert loaded(kv.session, "b", prefix, TOKENS, target_places()).tokens == TOKENS
            for rank, worker in enumerate(processes):
                own = [place for place in target_places() if place.group == rank % 2]
                assert check(worker) == CHUNK_BLOCKS * len(own)
            assert kv.session.close().flushed
            assert all(it.end() for it in processes)
    with started(directory, 3, is_divided=True, disk=disk) as processes, opened(directory, processes, disk=disk) as it:
        assert looked_up(it[0].session, "c", prefix_of(CHUNKS, it[0].root)).sources == (("disk", TOKENS),)
    with started(directory, 1, disk=disk) as processes, opened(directory, processes, disk=disk) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        found = looked_up(kv.session, "d", prefix).sources
        assert (sum(tokens for _, tokens in found), found[-1][0]) == (TOKENS, "directory")
        assert loaded(kv.session, "d", prefix, TOKENS, target_places()).tokens == TOKENS
        assert check(processes[0], (TARGET,)) == len(target_places()) * CHUNK_BLOCKS


@contextmanager
def caught(tmp_path, state, rank):
    """A session whose rank `rank` is held in a gather, promote, demote or scatter; slots are scarce."""
    directory, gate = tmp_path / "kv", tmp_path / "gate"
    if state == "promote":
        with started(directory) as processes, opened(directory, processes) as (kv, _):
            stored(kv.session, "a", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS)))
            assert kv.session.close().flushed
    with (
        started(directory, gate=gate, scarcity=SCARCITY) as processes,
        opened(directory, processes, hung_s=0.3) as (kv, below),
    ):
        assert processes[0].handshake["slots"] == [SLOTS] * 2
        prefix = prefix_of(CHUNKS, kv.root)
        if state == "scatter":
            stored(kv.session, "a", prefix, places_of(range(CHUNKS)))
        gate.write_text(f"{state} {rank}")
        if state in ("gather", "demote"):
            kv.session.store(RequestId("a"), prefix, places_of(range(CHUNKS)))
        else:
            assert looked_up(kv.session, "b", prefix).tokens == TOKENS
            kv.session.load(RequestId("b"), prefix, TOKENS, target_places())
        until(gate.with_suffix(".held").exists)
        yield processes, kv, below, gate, prefix


def press(kv, prefix):
    """Store over all slots that can be had, and load what may still be there; the chunks that were loaded."""
    for seed in range(3):
        other = prefix_of(SLOTS, kv.root, seed=100 + seed)
        kv.session.store(RequestId(f"p{seed}"), other, at(CHUNKS, places_of(range(SLOTS))))
        time.sleep(0.05)
    kv.session.load(RequestId("again"), prefix, TOKENS, target_places(TARGET + CHUNKS))
    time.sleep(0.2)


def loads_of(kv):
    """The chunks into which loads were complete, as the session says."""
    firsts = {"b": TARGET, "again": TARGET + CHUNKS}
    return [
        firsts[event.request]
        for event in kv.session.poll(0.2)
        if isinstance(event, LoadDone) and event.tokens == TOKENS and event.request in firsts
    ]


STATES = [("gather", 0), ("promote", 0), ("demote", 0), ("scatter", 0), ("scatter", 1)]


@pytest.mark.parametrize(("state", "rank"), STATES)
def test_a_rank_that_is_killed_leaves_no_wrong_byte(tmp_path, state, rank):
    with caught(tmp_path, state, rank) as (processes, kv, below, gate, prefix):
        processes[rank].signal(signal.SIGKILL)
        until(lambda: below.executor.lost)
        press(kv, prefix)
        delivered = loads_of(kv)
        gate.unlink()
        kv.session.close(5.0)
        check(processes[1 - rank], delivered)


@pytest.mark.parametrize(("state", "rank"), STATES)
def test_a_rank_that_stops_and_goes_on_leaves_no_wrong_byte(tmp_path, state, rank):
    stop_and_go_on(tmp_path, state, rank)


def stop_and_go_on(tmp_path, state, rank):
    with caught(tmp_path, state, rank) as (processes, kv, below, gate, prefix):
        processes[rank].stop()
        until(lambda: below.executor.lost)
        press(kv, prefix)
        gate.unlink()
        processes[rank].signal(signal.SIGCONT)
        kv.session.close(DEADLINE_S)
        delivered = loads_of(kv)
        for each in processes:
            check(each, delivered)
    if state == "demote":  # what was written late is right, too
        with started(tmp_path / "kv") as processes, opened(tmp_path / "kv", processes) as (kv, _):
            tokens = looked_up(kv.session, "b", prefix).tokens
            loaded(kv.session, "b", prefix, tokens, at(TARGET, load_places(tokens)))
            assert check(processes[0]) == check(processes[1])


def test_without_the_fence_a_late_scatter_has_the_bytes_of_another_chunk(tmp_path, monkeypatch):
    lose = RemoteRank._lose
    monkeypatch.setattr(RemoteRank, "_lose", lambda self, why, *, is_gone: lose(self, why, is_gone=True))
    with pytest.raises(AssertionError, match="has wrong bytes"):
        stop_and_go_on(tmp_path, "scatter", 1)


def test_nothing_stays_when_all_are_killed(tmp_path):
    def held():
        """Inodes of memory files of these workers, in any process."""
        found = set()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                found |= set(re.findall(r"(\d+) +/memfd:kvtier ", (place / "maps").read_text("utf-8")))
                found |= {str(it.stat().st_ino) for it in (place / "fd").iterdir() if "memfd:kvtier" in os.readlink(it)}
            except OSError:  # it has ended
                continue
        return found

    before = held()
    with started(tmp_path / "kv") as processes, opened(tmp_path / "kv", processes):
        assert held() - before
        for each in processes:
            assert "/dev/shm/" not in Path(f"/proc/{each.process.pid}/maps").read_text("utf-8")
            each.signal(signal.SIGKILL)
    until(lambda: not held() - before)
