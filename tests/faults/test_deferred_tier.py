"""A tier that cannot be opened: the engine starts, logs a warning, and uses the tier once it is open."""

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.memory_tier import MemoryTier
from tests.metric_values import values_of
from tests.rig import (
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    Engine,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)
from tests.system import remount, small_file_system, until

from kvtier.config.sections import Config
from kvtier.core.tier_state import RETRY_SECONDS_MAX
from kvtier.errors import ConfigError, KvError, TierError
from kvtier.observe import metric_definitions as table
from kvtier.runtime import deferred_tier, store_secret
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.open import OpenedSession, open_session
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.tier.base import Figures, Tier
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk import tier as disk
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files import file_per_object
from kvtier.types import NextTurn

KINDS = ["directory", "disk"]
CHUNKS = 10
TOKENS = CHUNKS * 16
MIB = 1 << 20


def settings(kind: str, path: Path, *, is_required: bool = False, **limits: float) -> Config:
    """For a session with one tier, of that kind, at `path`."""
    made = config(None, host_chunks=40, **limits)
    common: dict[str, Any] = {"path": path, "capacity_bytes": 8 * MIB, "required": is_required, "retry_s": 0.01}
    tier = DiskSettings(reserve_bytes=0, **common) if kind == "disk" else DirectorySettings(**common)
    return replace(made, tiers=(tier,))


def opened(kind: str, path: Path, engine: Engine, **more: Any) -> OpenedSession:
    return open_session(settings(kind, path, **more), LAYOUT, FINGERPRINT, engine.copier())


def filled(kind: str, path: Path, engine: Engine) -> None:
    """A store at `path` that holds the first chunks of `engine`."""
    first = opened(kind, path, engine, is_required=True)
    assert stored(first.session, "a", prefix_of(CHUNKS, first.root), places_of(range(CHUNKS))).dropped == 0
    assert first.session.close().flushed


def up(session: OpenedSession, kind: str) -> float:
    """What the metrics say."""
    return session.metrics.get(table.TIER_UP, tier=kind, way="read")


def until_up(session: OpenedSession, kind: str) -> None:
    """Wait until the tier answers."""
    until(lambda: up(session, kind) == 1.0, "the tier does not come in")


def until_found(session: OpenedSession, engine: Engine, target: Engine) -> None:
    """What the store held before is found and comes back as it was."""
    until_up(session, next(kind for kind in KINDS if f'tier="{kind}"' in str(values_of(session.metrics))))
    prefix = prefix_of(CHUNKS, session.root)
    until(  # a probe has 0.5 s
        lambda: looked_up(session.session, "found", prefix).tokens == TOKENS or session.session.release("found"),
        "the tier has lost what it held",
    )
    assert loaded(session.session, "found", prefix, TOKENS, load_places(TOKENS)).tokens == TOKENS
    assert target.same(engine, load_places(TOKENS))


def is_useful_without(session: OpenedSession) -> bool:
    """Whether host memory works meanwhile."""
    prefix = prefix_of(3, session.root, seed=7)
    assert stored(session.session, "meanwhile", prefix, places_of(range(3))).dropped == 0
    return looked_up(session.session, "again", prefix).ready_tokens == 3 * 16


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB."""
    with small_file_system(tmp_path / "mounted", "16m") as where:
        yield where


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_on_a_read_only_disk(small_disk: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    source, target = Engine(64, seed=1), Engine(64, seed=2)
    filled(kind, small_disk / "kv", source)
    remount(small_disk, "ro")
    with pytest.raises(TierError, match="Read-only file system"):
        opened(kind, small_disk / "kv", target, is_required=True)
    session = opened(kind, small_disk / "kv", target)
    assert up(session, kind) == 0.0
    for number in range(8):
        assert looked_up(session.session, f"r{number}", prefix_of(CHUNKS, session.root)).tokens == 0
    assert is_useful_without(session)
    (seen,) = warnings(caplog)
    assert "Read-only file system" in seen
    assert "kvtier starts without this tier" in seen
    remount(small_disk, "rw")
    until_found(session, source, target)
    assert session.session.close().flushed


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_when_it_is_opened(small_disk: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    stranger = small_disk / "stranger"
    with suppress(OSError), stranger.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(MIB))
    session = opened(kind, small_disk / "kv", Engine(64))
    assert up(session, kind) == 0.0
    assert is_useful_without(session)
    assert any("No space left" in seen and "kvtier starts without this tier" in seen for seen in warnings(caplog))
    assert any("kvtier uses a temporary secret" in seen for seen in warnings(caplog)), "the secret found no room"
    stranger.unlink()
    until_up(session, kind)
    assert session.session.close().flushed


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_hangs_when_it_is_opened(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = Engine(64, seed=1), Engine(64, seed=2)
    filled(kind, tmp_path / "kv", source)
    go_on = hung(monkeypatch, kind)
    try:
        with pytest.raises(TierError, match=r"did not open within 0\.02 s"):
            opened(kind, tmp_path / "kv", target, is_required=True, open_deadline_s=0.02)
        session = opened(kind, tmp_path / "kv", target, open_deadline_s=0.02)
        assert up(session, kind) == 0.0
        assert is_useful_without(session)
        assert len(warnings(caplog)) == 1
    finally:
        go_on.set()
    until_found(session, source, target)
    assert session.session.close().flushed


@pytest.mark.parametrize("kind", KINDS)
def test_an_open_tier_without_its_path_is_down_until_it_is_back(tmp_path: Path, kind: str) -> None:
    """Without a single request."""
    source, target = Engine(64, seed=1), Engine(64, seed=2)
    filled(kind, tmp_path / "kv", source)
    session = opened(kind, tmp_path / "kv", target)
    until_up(session, kind)
    (tmp_path / "kv").rename(tmp_path / "away")
    until(lambda: up(session, kind) == 0.0)
    assert looked_up(session.session, "gone", prefix_of(CHUNKS, session.root)).tokens == 0
    assert not (tmp_path / "kv").exists(), "the path may lead to another disk now"
    (tmp_path / "away").rename(tmp_path / "kv")
    until_up(session, kind)
    until_found(session, source, target)
    session.session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_store_opens_after_a_failed_attempt(root: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its secret is there before it, and is no stranger to it: not to the next try, nor to the next start."""
    place, call = {"directory": (file_per_object, "open_store"), "disk": (disk, "open_marker")}[kind]
    make, tries = getattr(place, call), iter([OSError(errno.ENOSPC, "planned")])

    def fail_once(*given: Any) -> Any:
        if (trouble := next(tries, None)) is not None:
            raise trouble
        return make(*given)

    monkeypatch.setattr(place, call, fail_once)
    root.mkdir()
    (root / ".secret.0123456789abcdef").touch()  # of a process that was killed while it made one
    first = opened(kind, root, Engine(64))
    assert (root / "secret").exists()
    until_up(first, kind)
    first.session.close()
    opened(kind, root, Engine(64), is_required=True).session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_opens_just_before_its_secret_is_read_gets_one(tmp_path: Path, kind: str) -> None:
    opened(kind, tmp_path, Engine(64)).session.close()
    (tmp_path / "secret").unlink()
    found = store_secret.store_secret(settings(kind, tmp_path), {kind}, None, "")  # its tier counts as down still
    assert (tmp_path / "secret").read_bytes() == found


@pytest.mark.parametrize("kind", KINDS)
def test_closing_does_not_wait_for_a_place_that_hangs(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_tier, "LEAVE_S", 0.02)
    opens, tiers = DeferredTier.opened, list[DeferredTier]()
    monkeypatch.setattr(
        DeferredTier, "opened", lambda tier, *it, **more: tiers.append(tier) or opens(tier, *it, **more)
    )
    go_on = hung(monkeypatch, kind)
    try:
        session = opened(kind, tmp_path / "kv", Engine(64), open_deadline_s=0.02)
        (tier,) = tiers
        session.session.close()
        assert tier._thread.is_alive()
    finally:
        go_on.set()
    tier._thread.join(DEADLINE_S)
    with pytest.raises(TierError, match="is closed"):  # what was opened too late
        tier.contains([])
    filled(kind, tmp_path / "kv", Engine(64))


def hung(monkeypatch: pytest.MonkeyPatch, kind: str) -> threading.Event:
    """Opening a tier hangs until what this returns is set."""
    go_on = threading.Event()
    kinds: dict[str, Callable[..., Any]] = {"directory": DirectoryTier, "disk": DiskTier}

    def slow(*given: Any, **more: Any) -> Any:
        assert go_on.wait(DEADLINE_S)
        return kinds[kind](*given, **more)

    place = {"directory": directory, "disk": disk}[kind]
    monkeypatch.setattr(place, kinds[kind].__name__, slow)
    return go_on


def test_a_store_that_another_process_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, target = Engine(64, seed=1), Engine(64, seed=2)
    filled("disk", tmp_path / "kv", source)
    other = DiskTier(tmp_path / "kv" / "rank-0", capacity_bytes=8 * MIB)
    session = opened("disk", tmp_path / "kv", target, open_deadline_s=0.02)
    assert up(session, "disk") == 0.0
    assert is_useful_without(session)
    other.close()
    until_found(session, source, target)
    assert len(warnings(caplog)) <= 2, "one for the deadline, one when the tier has given up for the first time"
    assert session.session.close().flushed


@pytest.mark.parametrize("kind", KINDS)
def test_a_mistake_in_the_settings_stops_the_start(tmp_path: Path, kind: str) -> None:
    before, threads = sorted(tmp_path.rglob("*")), threading.active_count()
    with pytest.raises(ConfigError, match="too long"):
        opened(kind, tmp_path / ("x" * 300), Engine(8))
    assert sorted(tmp_path.rglob("*")) == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_path_without_permission_is_one_error(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    try:
        session = opened(kind, tmp_path / "kv", Engine(64))
        assert is_useful_without(session)
        session.session.close()
    finally:
        tmp_path.chmod(0o700)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "Permission denied" in told


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_that_hangs_is_one_of_this_process(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    filled(kind, tmp_path / "kv", Engine(64))
    go_on = threading.Event()
    monkeypatch.setattr(store_secret, "load_or_create", lambda _path, **_: go_on.wait(DEADLINE_S))
    opens = DeferredTier.opened  # which the deadline below is not meant for
    monkeypatch.setattr(DeferredTier, "opened", lambda tier, _deadline_s, **more: opens(tier, DEADLINE_S, **more))
    try:
        with pytest.raises(TierError, match="could not be read within"):
            opened(kind, tmp_path / "kv", Engine(64), is_required=True, open_deadline_s=0.02)
        one, other = (opened(kind, tmp_path / f"kv{number}", Engine(64), open_deadline_s=0.02) for number in range(2))
    finally:
        go_on.set()
    assert one.root != other.root
    assert is_useful_without(one)
    assert "kvtier uses a temporary secret" in warnings(caplog)[0]
    one.session.close()
    other.session.close()


@pytest.mark.parametrize("trouble", [OSError(errno.EIO, "planned"), OSError(errno.ESTALE, "planned")])
def test_a_secret_that_cannot_be_read(tmp_path: Path, trouble: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any, **_: object) -> int:
        raise trouble

    monkeypatch.setattr(store_secret, "load_or_create", fail)
    session = opened("directory", tmp_path / "kv", Engine(64))
    assert is_useful_without(session)
    session.session.close()


def test_tiers_of_ranks_in_other_processes_are_down_too(tmp_path: Path) -> None:
    """As it would: by the handshake, of each rank."""
    other = DiskTier(tmp_path / "kv" / "rank-1", capacity_bytes=8 * MIB)
    made = settings("disk", tmp_path / "kv", open_deadline_s=0.5)
    ranks = [open_rank(made, LAYOUT, FINGERPRINT, Engine(8).copier(), rank=n, ranks=2) for n in range(2)]
    servers = [RankServer(it, lambda _note: None) for it in ranks]
    below = connect([server.handshake for server in servers])
    assert (below.tiers, below.down) == (("disk",), frozenset({"disk"}))
    below.executor.close(DEADLINE_S)
    for server, it in zip(servers, ranks, strict=True):
        it.close(DEADLINE_S)
        assert server.close(DEADLINE_S)
    other.close()


def test_attempts_become_rare_and_new_errors_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    tries = 0
    is_done = threading.Event()

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread() is threading.main_thread():
                return super().wait(timeout)
            assert timeout is not None
            waits.append(timeout)
            return False

    monkeypatch.setattr(
        deferred_tier, "threading", SimpleNamespace(Event=Pause, Lock=threading.Lock, Thread=threading.Thread)
    )

    def make() -> MemoryTier:
        nonlocal tries
        tries += 1
        if tries == 1:
            assert is_awaited_no_more.wait(DEADLINE_S)
        if tries <= 8:
            raise TierError("memory", "gone" if tries < 6 else "another")
        is_done.set()
        return MemoryTier(capacity_bytes=MIB)

    is_awaited_no_more = threading.Event()
    tier = DeferredTier("memory", make, 5.0)
    with caplog.at_level(logging.INFO):
        assert tier.opened(0.01, is_required=False) is tier
        is_awaited_no_more.set()
        assert is_done.wait(DEADLINE_S)
        tier._thread.join(DEADLINE_S)
    assert waits == [5.0, 10.0, 20.0, 40.0, *[RETRY_SECONDS_MAX] * 4]
    lines = [record.getMessage() for record in caplog.records]
    assert sum("tier 'memory': gone" in line for line in lines) == 1
    assert sum("tier 'memory': another" in line for line in lines) == 1
    assert lines[-1] == "tier memory is open now"
    assert tier.figures().capacity_bytes == MIB
    tier.close()
    with pytest.raises(KvError):
        tier.contains([])


def test_it_passes_on_all_of_the_interface() -> None:
    """A default of the base class would hide what the tier behind it does."""
    interface = {name for name, what in vars(Tier).items() if callable(what) and not name.startswith("_")}
    assert interface - {"read", "write"} <= vars(DeferredTier).keys()


def test_until_it_is_open_everything_fails() -> None:
    def make() -> MemoryTier:
        raise TierError("memory", "planned")

    tier = DeferredTier("memory", make, 60.0)
    assert tier.opened(DEADLINE_S, is_required=False) is tier
    for ask in (lambda: tier.contains([]), lambda: tier.delete(bytes(32)), tier.scan):
        with pytest.raises(TierError, match="is not open"):
            ask()
    assert tier.figures() == Figures()
    tier.note_use(is_up=True)
    tier.expects("a session", NextTurn.USER)
    tier.close()
    tier.close()
    assert not tier._thread.is_alive()
