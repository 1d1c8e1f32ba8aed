"""No control thread is ever inside a tier, so no file system that hangs can hold one up.

Control threads serve requests, refresh gauges and close the session. A real file system (FUSE) hangs in one kind of
call after the other, in the middle of traffic, and knows which threads have called it.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hanging_fs import HangingFs, hanging_fs, missing
from tests.metric_values import values_of
from tests.rig import (
    CHUNK_TOKENS,
    FINGERPRINT,
    LAYOUT,
    TIER_LIMITS,
    Engine,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)

from kvtier.config.sections import Config, JournalConfig, TraceConfig
from kvtier.observe import metric_definitions as table
from kvtier.runtime.observers import line_file
from kvtier.runtime.observers.trace_recorder import Served
from kvtier.runtime.open import OpenedSession, open_session
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk import tier as disk
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.disk.tier import DiskTier
from kvtier.types import NextTurn

needs_fuse = pytest.mark.skipif(bool(missing()), reason=missing())

KINDS = ["directory", "disk"]
OPERATIONS = {
    "directory": ["open", "read", "write", "getattr", "rename", "unlink", "mkdir", "flock", "utimens"],
    "disk": ["open", "read", "write", "getattr", "statfs"],
}
"""Calls that each tier makes while it serves. When it opens or closes everything hangs at once."""
TIER_THREAD = re.compile(r"kvtier (open )?(directory|disk)( (read|write|probe|keeper))?|kvtier-close-(directory|disk)")
CHUNKS = 4
FILLS_HOST = 12
"""Prompts after which host memory has given up an earlier one."""
CALL_S = 15.0
"""No call of a session may take longer while a tier hangs; a hang lasts until the test ends it."""
PATIENCE_S = 60.0


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[HangingFs]:
    """A file system of our own."""
    yield from hanging_fs(tmp_path)


def settings(kind: str, place: Path, **more: float) -> Config:
    own = {"probe_deadline_s": 0.1, "transfer_deadline_s": 0.3, "retry_s": 0.05}
    own |= {name: more.pop(name) for name in TIER_LIMITS if name in more}
    made = config(None, **{"load_deadline_s": 0.3, "open_deadline_s": 1.0, **more})
    if kind == "disk":
        tier = DiskSettings(path=place, capacity_bytes=4 << 20, reserve_bytes=1, sync_interval_s=0.2, **own)
    else:
        tier = DirectorySettings(path=place, capacity_bytes=4 << 20, **own)
    return replace(made, tiers=(tier,))


class Traffic:
    """Requests to a session, each call of which must return in time whatever the tier does."""

    def __init__(self, kv: OpenedSession) -> None:
        self.kv = kv
        self.number = 0
        self.seeds: list[int] = []
        self.longest_s = 0.0
        self.sources = Engine(64, seed=1)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.longest_s = max(self.longest_s, time.monotonic() - start_s)

    def request(self, seed: int) -> int:
        """Look up, load the cached tokens, store the others; the number of loaded tokens."""
        self.number += 1
        self.seeds.append(seed)
        name, prefix, session = f"r{self.number}", prefix_of(CHUNKS, self.kv.root, seed=seed), self.kv.session
        with self.timed():
            tokens = looked_up(session, name, prefix).tokens
        below = 0
        if tokens:
            with self.timed():
                done = loaded(session, name, prefix, tokens, load_places(tokens))
            below = sum(count for place, count in done.sources if place != "host")
        with self.timed():
            stored(session, f"{name} store", prefix, places_of(range(CHUNKS)))
        with self.timed():
            session.release(name)
            self.kv.metrics.series()
        return below

    def until_it_works(self) -> None:
        """A chunk stored now is found in the tier after it has left host memory."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < end_s, "the tier does not come back"
            mine = 1000 + self.number
            for seed in (mine, *range(mine + 1, mine + FILLS_HOST)):
                self.request(seed)
            time.sleep(0.05)
            if self.request(mine):
                return


def control_threads() -> dict[int | None, str]:
    """By id: the engine's thread, which is this one, and the session's."""
    session_threads = {
        thread.native_id: thread.name for thread in threading.enumerate() if thread.name == "kvtier-session"
    }
    return {**session_threads, threading.get_native_id(): "engine"}


def no_control_thread_in(hanging: HangingFs, deciding: dict[int | None, str]) -> None:
    assert not {(deciding[thread], what) for what, thread in hanging.calls() if thread in deciding}


def is_seen(kv: OpenedSession, kind: str, operation: str) -> bool:
    """Whether the circuit breakers know that the operation hangs. Some only hang up the disk tier's upkeep."""
    ups = [value for name, value in values_of(kv.metrics).items() if name.startswith(table.TIER_UP.name + "{")]
    return (kind == "disk" and operation in {"getattr", "statfs"}) or 0 in ups


def until_no_thread_closes() -> None:
    """Closing goes on in threads of its own."""
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-close-"):
            thread.join(PATIENCE_S)


@needs_fuse
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_control_thread_is_in_a_tier_that_hangs(hanging: HangingFs, kind: str) -> None:
    kv = open_session(settings(kind, hanging.place / "kv"), LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    deciding = control_threads()
    assert len(deciding) >= 2
    traffic = Traffic(kv)
    traffic.until_it_works()
    for operation in OPERATIONS[kind]:
        kv.metrics.set(table.HELD_BYTES, -1, place="host")
        hanging.hang(operation)
        start_s = time.monotonic()
        while (
            not hanging.waiting()
            or kv.metrics.get(table.HELD_BYTES, place="host") < 0
            or not is_seen(kv, kind, operation)
        ):
            traffic.request(traffic.number)
            traffic.request(traffic.seeds[-3 * FILLS_HOST :][0])  # below, unless it has been given up there
            seen = (hanging.waiting(), is_seen(kv, kind, operation))
            assert time.monotonic() - start_s < PATIENCE_S, f"{operation}: gauges stand still, or nothing fails: {seen}"
        no_control_thread_in(hanging, deciding)
        hanging.go_on()
        traffic.until_it_works()
    assert traffic.longest_s < CALL_S
    hanging.hang("everything")
    start_s = time.monotonic()
    kv.session.close(1.0)
    assert time.monotonic() - start_s < CALL_S
    no_control_thread_in(hanging, deciding)
    hanging.go_on()
    until_no_thread_closes()


@needs_fuse
@pytest.mark.parametrize("kind", KINDS)
def test_writes_that_hang_do_not_stop_reads(hanging: HangingFs, kind: str) -> None:
    made = settings(kind, hanging.place / "kv", probe_deadline_s=2.0, load_deadline_s=5.0, transfer_deadline_s=1.0)
    patient = replace(made, tiers=(replace(made.tiers[0], transfer_deadline_s=PATIENCE_S),))  # on a busy machine, too
    kv = open_session(patient, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    for seed in range(FILLS_HOST):
        assert stored(kv.session, f"s{seed}", prefix_of(CHUNKS, kv.root, seed=seed), places_of(range(CHUNKS))).stored
    assert kv.session.close(PATIENCE_S).flushed
    (hanging.source / "kv" / "index").unlink(missing_ok=True)
    for file in (hanging.source / "kv").rglob("*"):
        os.utime(file, (1e9, 1e9))  # so old that a read would renew it
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    traffic = Traffic(kv)
    traffic.request(0)
    hanging.hang("write", "rename", "unlink", "mkdir", "utimens", "fsync")
    end_s = time.monotonic() + PATIENCE_S
    while kv.metrics.get(table.TIER_UP, tier=kind, way="write") != 0.0:
        traffic.request(1000 + traffic.number)
        assert time.monotonic() < end_s, "writes do not hang"
    found = [traffic.request(seed) for seed in range(1, FILLS_HOST)]
    assert found == [CHUNKS * CHUNK_TOKENS] * (FILLS_HOST - 1)
    assert kv.metrics.get(table.TIER_UP, tier=kind, way="read") == 1.0
    hanging.go_on()
    traffic.until_it_works()
    kv.session.close(PATIENCE_S)
    until_no_thread_closes()


@needs_fuse
def test_a_load_does_not_wait_for_a_tier_whose_reads_have_stopped(hanging: HangingFs) -> None:
    patient = {"transfer_deadline_s": PATIENCE_S, "load_deadline_s": PATIENCE_S, "retry_s": 5.0}
    made = settings("directory", hanging.place / "kv", **patient)
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    prefix = prefix_of(CHUNKS, kv.root)
    stored(kv.session, "s", prefix, places_of(range(CHUNKS)))
    assert kv.session.close(PATIENCE_S).flushed
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    tokens = looked_up(kv.session, "r", prefix).tokens
    assert tokens == CHUNKS * CHUNK_TOKENS
    hanging.hang("everything")
    start_s = time.monotonic()
    assert loaded(kv.session, "r", prefix, tokens, load_places(tokens)).tokens == 0
    assert time.monotonic() - start_s < CALL_S, "the health checks of three seconds have failed"
    assert kv.metrics.get(table.TIER_UP, tier="directory", way="read") == 0.0
    hanging.go_on()
    kv.session.close(PATIENCE_S)
    until_no_thread_closes()


@needs_fuse
@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_hangs_when_it_is_opened_costs_one_deadline(hanging: HangingFs, kind: str) -> None:
    deadline_s = 4.0
    hanging.hang("everything")
    start_s = time.monotonic()
    made = settings(kind, hanging.place / "kv", open_deadline_s=deadline_s)
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    assert time.monotonic() - start_s < 2 * deadline_s, "tier and secret have waited one after the other"
    deciding = control_threads()
    assert kv.metrics.get(table.TIER_UP, tier=kind, way="read") == 0.0
    hanging.go_on()
    Traffic(kv).until_it_works()
    kv.session.close(5.0)
    no_control_thread_in(hanging, deciding)
    until_no_thread_closes()


@needs_fuse
def test_a_recording_that_hangs_holds_up_no_engine(hanging: HangingFs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "OPEN_DEADLINE_S", 0.1)
    hanging.hang("everything")
    lines = {
        "trace": TraceConfig(path=hanging.place / "trace"),
        "journal": JournalConfig(path=hanging.place / "journal"),
    }
    made = replace(config(hanging.source / "kv"), **lines)
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    deciding = control_threads()
    assert kv.recorder is not None
    assert kv.journal is not None
    traffic = Traffic(kv)
    for seed in range(3):
        traffic.request(seed)
    assert traffic.longest_s < CALL_S
    kv.recorder.served(Served(time.monotonic(), prefix_of(CHUNKS).keys, 64, 8))
    no_control_thread_in(hanging, deciding)
    hanging.go_on()
    kv.session.close(PATIENCE_S)
    no_control_thread_in(hanging, deciding)
    (file,) = (hanging.source / "trace").iterdir()
    assert file.read_text().count("\n") == 1
    (file,) = (hanging.source / "journal").iterdir()
    written = kv.metrics.get(table.TRANSFER_BYTES, link="demote", tier="directory")
    objects = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert sum(line["bytes"] for line in objects if line["way"] == "write") == written > 0


@pytest.mark.parametrize("kind", KINDS)
def test_tiers_are_called_by_their_own_threads_only(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any call of a tier, also for its fill level."""
    callers: set[str] = set()
    kinds = {"directory": DirectoryTier, "disk": DiskTier}

    class Watched(kinds[kind]):
        def __getattribute__(self, name: str) -> object:
            found = super().__getattribute__(name)
            if name.startswith("_") or name in {"name", "takes_batches"}:  # constants
                return found
            if not callable(found):
                callers.add(threading.current_thread().name)
                return found

            def called(*given: Any, **more: Any) -> object:
                callers.add(threading.current_thread().name)
                return found(*given, **more)

            return called

    place = {"directory": directory, "disk": disk}[kind]
    monkeypatch.setattr(place, kinds[kind].__name__, Watched)
    kv = open_session(settings(kind, tmp_path / "kv"), LAYOUT, FINGERPRINT, Engine(64, seed=1).copier())
    Traffic(kv).until_it_works()
    start_s = time.monotonic()
    while not kv.metrics.get(table.HELD_BYTES, place=kind):
        kv.session.poll(0.05)
        assert time.monotonic() - start_s < PATIENCE_S
    kv.session.expects("a session", NextTurn.USER)
    assert kv.session.close(PATIENCE_S).flushed
    assert callers
    assert not {caller for caller in callers if not TIER_THREAD.fullmatch(caller)}
