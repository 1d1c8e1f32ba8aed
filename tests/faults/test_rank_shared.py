"""Ranks in processes of their own, which hold copies or shares of KV: no wrong byte whichever of them dies or stops.

Ranks that hold the same KV share host memory. A slot is given away only when every process that may write to it, or
read it, has answered or is gone.
"""

import os
import re
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
from tests.faults.rank_world import opened
from tests.rank_worker import SHAPES, contents, workers
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
from kvtier.types import LoadDone, RequestId, StoreDone

SEED, BLOCKS, HOST_CHUNKS = 1, 128, 48
SLOTS = 8
"""Of each group, where slots are scarce: any 8 chunks need all of them."""
CHUNKS = 4
"""Of the prefix that is loaded."""
TOKENS = CHUNKS * CHUNK_TOKENS
TARGET = 20
"""The chunk of the engine into which its first is loaded."""


def started(directory, ranks=2, shape="copies", **options):
    """Workers with the KV of `SEED`, and host memory for `HOST_CHUNKS` if each has a copy."""
    return workers(directory, ranks, shape=shape, blocks=BLOCKS, seed=SEED, host_chunks=HOST_CHUNKS, **options)


def at(first, places):
    """`places` in an engine whose chunk `first` is the first of the prefix."""
    return [it._replace(blocks=tuple(block + first * CHUNK_BLOCKS for block in it.blocks)) for it in places]


def all_places(chunks, shape="copies"):
    """Where an engine keeps so many chunks, of all groups."""
    return places_of(range(chunks), range(len(SHAPES[shape][0].groups)))


def target_places(first=TARGET, shape="copies", tokens=TOKENS):
    """Where leading `tokens` of the prefix are loaded."""
    return at(first, all_places(tokens // CHUNK_TOKENS, shape) if shape == "shares" else load_places(tokens))


def check(worker, delivered=(), layout=None):
    """No block has bytes of another one or of a group that the rank lacks, and what was delivered is there.

    Args:
        worker: the rank.
        delivered: places into which loads were complete.
        layout: what the rank really has, if it claims another layout.

    Returns:
        How many blocks have been loaded.
    """
    layout = layout or worker.engine["layout"]
    own, now = contents(Engine(**worker.engine)), worker.ask("contents")
    held = [number for number, group in enumerate(layout.groups) if not group.is_absent]
    may_be = {}
    for first in (TARGET, TARGET + CHUNKS):
        for group, _, blocks in at(first, places_of(range(CHUNKS), held)):
            may_be |= {(group, block): own[group][block - first * CHUNK_BLOCKS] for block in blocks}
    for group, _, blocks in delivered:
        for block in blocks:
            assert group not in held or now[group][block] == may_be[group, block], "what was delivered is not there"
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
            assert stored(kv.session, "a", prefix, places_of(range(CHUNKS))).stored == 2 * CHUNKS
            assert loaded(kv.session, "b", prefix, TOKENS, target_places()).tokens == TOKENS
            assert {check(it, target_places()) for it in processes} == {len(target_places()) * CHUNK_BLOCKS}
            assert kv.session.close().flushed
            assert all(it.end() for it in processes)
    with started(directory, ranks, disk=disk) as processes, opened(directory, processes, disk=disk) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        answer = looked_up(kv.session, "c", prefix)
        assert answer.sources == (("disk", TOKENS),)
        assert loaded(kv.session, "c", prefix, TOKENS, target_places()).tokens == TOKENS
        assert {check(it, target_places()) for it in processes} == {len(target_places()) * CHUNK_BLOCKS}


def test_a_rank_has_nothing_of_a_group_that_others_hold_and_one_rank_of_all_finds_both(tmp_path):
    directory, disk = tmp_path / "kv", tmp_path / "disk"
    with started(directory, 3, "divided", disk=disk) as processes:
        assert {tuple(it.handshake["slots"]) for it in processes} == {(HOST_CHUNKS * 3,) * 2}
        with opened(directory, processes, disk=disk) as (kv, _):
            prefix = prefix_of(CHUNKS, kv.root)
            assert stored(kv.session, "a", prefix, places_of(range(CHUNKS))).stored == 2 * CHUNKS
            assert loaded(kv.session, "b", prefix, TOKENS, target_places()).tokens == TOKENS
            for rank, worker in enumerate(processes):
                own = [place for place in target_places() if place.group == rank % 2]
                assert check(worker) == CHUNK_BLOCKS * len(own)
            assert kv.session.close().flushed
            assert all(it.end() for it in processes)
    with started(directory, 3, "divided", disk=disk) as processes, opened(directory, processes, disk=disk) as it:
        assert looked_up(it[0].session, "c", prefix_of(CHUNKS, it[0].root)).sources == (("disk", TOKENS),)
    with started(directory, 1, disk=disk) as processes, opened(directory, processes, disk=disk) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        found = looked_up(kv.session, "d", prefix).sources
        assert (sum(tokens for _, tokens in found), found[-1][0]) == (TOKENS, "directory")
        assert loaded(kv.session, "d", prefix, TOKENS, target_places()).tokens == TOKENS
        assert check(processes[0], target_places()) == len(target_places()) * CHUNK_BLOCKS


OTHER = 5
"""Seed of a second prefix, with the same bytes."""
LIMITS = {"store_deadline_s": 2.0, "load_deadline_s": 2.0}
RANKS = {"copies": 2, "dcp": 2, "shares": 3}
WORKING = {"copies": 1, "dcp": 2, "shares": 2}
"""How many ranks fill slots, and use tiers. The others of a shape have copies, and only scatter."""


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """For each shape, where ranks have stored the prefix."""
    places = {}

    def store(shape):
        if shape not in places:
            directory = tmp_path_factory.mktemp("stored") / "kv"
            with started(directory, RANKS[shape], shape) as processes, opened(directory, processes) as (kv, _):
                stored(kv.session, "a", prefix_of(CHUNKS, kv.root), all_places(CHUNKS, shape))
                assert kv.session.close().flushed
            places[shape] = directory
        return places[shape]

    return store


class Caught(NamedTuple):
    """An engine whose rank is held in its work, with scarce slots."""

    shape: str
    processes: list[Any]
    kv: Any
    below: Any
    gate: Path
    held: int
    """The rank that the gate holds."""
    prefix: Any
    told: dict[str, LoadDone | StoreDone]
    """How requests have ended."""

    def press(self, rank):
        """Store over all slots that can be had, and load what may still be there; the requests. `rank` is gone."""
        until(lambda: self.below.executor.lost)
        if rank != self.held:
            self.gate.unlink()
        session, names = self.kv.session, ["p0", "p1", "p2", "again"]
        for seed, name in enumerate(names[:3]):
            other = prefix_of(SLOTS, self.kv.root, seed=100 + seed)
            session.store(RequestId(name), other, at(CHUNKS, all_places(SLOTS, self.shape)))
            time.sleep(0.05)
        session.load(RequestId("again"), self.prefix, TOKENS, target_places(TARGET + CHUNKS, self.shape))
        return names

    def until_told(self, names):
        """Poll until these requests have ended."""
        end_s = time.monotonic() + DEADLINE_S
        while not self.told.keys() >= set(names):
            assert time.monotonic() < end_s, f"of {names} only {sorted(self.told)} have ended"
            events = self.kv.session.poll(0.1)
            self.told.update({it.request: it for it in events if isinstance(it, LoadDone | StoreDone)})

    @property
    def delivered(self):
        """Places into which loads were complete, as the session says."""
        firsts = {"b": TARGET, "again": TARGET + CHUNKS}
        ends = [(first, self.told.get(name)) for name, first in firsts.items()]
        return [
            place
            for first, done in ends
            if isinstance(done, LoadDone) and done.tokens == TOKENS
            for place in target_places(first, self.shape)
        ]


@contextmanager
def caught(tmp_path, stores, shape, state, rank):
    """`Caught` in a gather, promote, demote or scatter of `rank`, or of the first one where the rank has no such work.

    Its store has a prefix already, except before a scatter, and it gathers and demotes another one.
    """
    directory, gate = tmp_path / "kv", tmp_path / "gate"
    if state != "scatter":
        copytree(stores(shape), directory)
    with (
        started(directory, RANKS[shape], shape, gate=gate, slots=SLOTS) as processes,
        opened(directory, processes, hung_s=0.3, limits=LIMITS) as (kv, below),
    ):
        assert processes[0].handshake["slots"] == [SLOTS] * len(SHAPES[shape][0].groups)
        prefix = prefix_of(CHUNKS, kv.root, OTHER if state in ("gather", "demote") else 0)
        if state == "scatter":
            stored(kv.session, "a", prefix, all_places(CHUNKS, shape))
        held = rank if state == "scatter" or rank < WORKING[shape] else 0
        gate.write_text(f"{state} {held}")
        if state in ("gather", "demote"):
            kv.session.store(RequestId("a"), prefix, all_places(CHUNKS, shape))
        else:
            assert looked_up(kv.session, "b", prefix).tokens == TOKENS
            kv.session.load(RequestId("b"), prefix, TOKENS, target_places(TARGET, shape))
        until(gate.with_suffix(".held").exists)
        yield Caught(shape, processes, kv, below, gate, held, prefix, {})


EACH = [
    (shape, state, rank)
    for shape, ranks in RANKS.items()
    for state in ("gather", "promote", "demote", "scatter")
    for rank in range(ranks)
]
BY_DAY = {(shape, state, rank) for shape, state, rank in EACH if shape == "copies" and (not rank or state == "scatter")}
"""Each work of each rank where all hold the same KV."""


def every_rank_in_every_state(*by_day):
    """Cells of `by_day` and of `BY_DAY` run each time, and the others at night."""
    usual = BY_DAY | set(by_day)
    marks = [[] if it in usual else [pytest.mark.nightly] for it in EACH]
    return pytest.mark.parametrize(
        ("shape", "state", "rank"), [pytest.param(*it, marks=own) for it, own in zip(EACH, marks, strict=True)]
    )


@every_rank_in_every_state(("dcp", "gather", 1), ("shares", "demote", 1), ("shares", "scatter", 2))
def test_a_rank_that_is_killed_leaves_no_wrong_byte(tmp_path, stores, shape, state, rank):
    with caught(tmp_path, stores, shape, state, rank) as it:
        it.processes[rank].signal(signal.SIGKILL)
        names = it.press(rank)
        time.sleep(0.2)
        it.gate.unlink(missing_ok=True)
        it.until_told(["b" if state in ("promote", "scatter") else "a", *names])
        it.kv.session.close(5.0)
        for each in (other for number, other in enumerate(it.processes) if number != rank):
            check(each, it.delivered)
    if state in ("gather", "demote"):
        before, late = what_was_stored_is_right(tmp_path / "kv", shape, 0, OTHER)
        assert before == TOKENS
        assert not late or it.held != rank, "a chunk counts that one rank has not written"


@every_rank_in_every_state(("dcp", "demote", 0), ("dcp", "scatter", 1), ("shares", "promote", 1))
def test_a_rank_that_stops_and_goes_on_leaves_no_wrong_byte(tmp_path, stores, shape, state, rank):
    stop_and_go_on(tmp_path, stores, shape, state, rank)


def stop_and_go_on(tmp_path, stores, shape, state, rank):
    with caught(tmp_path, stores, shape, state, rank) as it:
        it.processes[rank].stop()
        it.until_told(it.press(rank))
        request = "b" if state in ("promote", "scatter") else "a"
        is_early = request in it.told
        it.gate.unlink(missing_ok=True)
        it.processes[rank].signal(signal.SIGCONT)
        it.until_told([request])
        it.kv.session.close(DEADLINE_S)
        for each in it.processes:
            check(each, it.delivered)
        are_blocks_in_use = state in ("gather", "scatter") and it.held == rank
        assert not (are_blocks_in_use and is_early), "a request has ended while its blocks are in use"
    if state in ("gather", "demote"):  # what was written late is right, too
        assert what_was_stored_is_right(tmp_path / "kv", shape, 0, OTHER)[0] == TOKENS


def what_was_stored_is_right(directory, shape, *seeds, claimed=""):
    """Load all that a new engine finds of prefixes; how many tokens. Its ranks may have the layouts of `claimed`."""
    with (
        started(directory, RANKS[shape], claimed or shape) as processes,
        opened(directory, processes) as (kv, _),
    ):
        found, places = [], []
        for first, seed in zip((TARGET, TARGET + CHUNKS), seeds, strict=False):
            prefix = prefix_of(CHUNKS, kv.root, seed)
            tokens = looked_up(kv.session, f"b{seed}", prefix).tokens
            found.append(tokens)
            places += (own := target_places(first, shape, tokens))
            assert loaded(kv.session, f"b{seed}", prefix, tokens, own).tokens == tokens
        for worker, layout in zip(processes, SHAPES[shape], strict=False):
            check(worker, places, layout)
        return found


@pytest.mark.parametrize(
    ("shape", "claimed"),
    [
        pytest.param("dcp", "dcp, swapped", marks=pytest.mark.nightly),
        pytest.param("shares", "shares, swapped", marks=pytest.mark.nightly),
        ("shares", "shares, all held"),
    ],
)
def test_shares_that_change_places_or_are_held_where_they_are_absent_show(stores, shape, claimed):
    assert what_was_stored_is_right(stores(shape), shape, 0) == [TOKENS]
    with pytest.raises(AssertionError, match=r"has wrong bytes|what was delivered is not there"):
        what_was_stored_is_right(stores(shape), shape, 0, claimed=claimed)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ("copies", 1),
        pytest.param("shares", 2, marks=pytest.mark.nightly),
        pytest.param("dcp", 1, marks=pytest.mark.nightly),
    ],
)
def test_without_the_fence_a_late_scatter_has_the_bytes_of_another_chunk(tmp_path, stores, monkeypatch, shape, rank):
    """Or a request ends while the stopped rank may still use its blocks, whichever is seen first."""
    lose = RemoteRank._lose
    monkeypatch.setattr(RemoteRank, "_lose", lambda self, why, *, is_gone: lose(self, why, is_gone=True))
    with pytest.raises(AssertionError, match=r"has wrong bytes|has ended while its blocks are in use"):
        stop_and_go_on(tmp_path, stores, shape, "scatter", rank)


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
