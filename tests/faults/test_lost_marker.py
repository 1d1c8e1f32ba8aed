"""A store whose marker or secret is lost or damaged: engines start without it, and a repair brings it back."""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.memory_tier import MemoryTier
from tests.refusals import refuses
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
from tests.system import snapshot, until

from kvtier.cli.main import run
from kvtier.config.sections import Config, StoreConfig
from kvtier.connect.model_files import note_fingerprint
from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.inspection import repair_store
from kvtier.keys.secret import Secret, model_id
from kvtier.observe import metric_definitions as table
from kvtier.runtime import store_secret
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.open import OpenedSession, open_session
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk import marker as disk_marker
from kvtier.tier.disk import tier as disk
from kvtier.tier.disk.format import segment_bytes_for
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files.safe_open import folder_at
from kvtier.tier.registry import TierContext, TierSettings, kind_of
from kvtier.tier.shared_directory.kind import SharedDirectorySettings
from kvtier.tier.shared_directory.tier import SharedDirectoryTier

KINDS = ["directory", "disk", "shared_directory"]
SETTINGS = {"directory": DirectorySettings, "disk": DiskSettings, "shared_directory": SharedDirectorySettings}
CHUNKS = 10
TOKENS = CHUNKS * 16
MIB = 1 << 20


def marker_of(kind: str, root: Path) -> Path:
    return root / "rank-0" / "kvtier-disk.json" if kind == "disk" else root / "kvtier-store.json"


def store_of(kind: str, root: Path) -> Path:
    """The directory of the marker."""
    return marker_of(kind, root).parent


def tier_settings(kind: str, path: Path, **more: Any) -> TierSettings:
    own: dict[str, Any] = {"reserve_bytes": 0} if kind == "disk" else {}
    return SETTINGS[kind](path=path, capacity_bytes=(8 if kind == "disk" else 64) * MIB, retry_s=0.05, **own, **more)


def opened(
    kind: str, path: Path, engine: Engine, *, is_required: bool = False, is_second: bool = True
) -> OpenedSession:
    """A session with the tier at `path`, and with another one next to it."""
    tiers = [tier_settings(kind, path, required=is_required)]
    if is_second:
        other = DirectorySettings(name="other", path=path.parent / "other", capacity_bytes=8 * MIB)
        tiers = [*tiers, other] if kind != "shared_directory" else [other, *tiers]
    return open_session(config_of(*tiers), LAYOUT, FINGERPRINT, engine.copier())


def config_of(*tiers: TierSettings) -> Config:
    is_shared = any(isinstance(tier, SharedDirectorySettings) for tier in tiers)
    store = StoreConfig(secret=Secret(bytes(32))) if is_shared else StoreConfig()
    return replace(config(None, host_chunks=6), tiers=tiers, store=store)


def filled(kind: str, path: Path, engine: Engine) -> None:
    first = opened(kind, path, engine, is_required=True, is_second=False)
    assert stored(first.session, "a", prefix_of(CHUNKS, first.root), places_of(range(CHUNKS))).dropped == 0
    assert first.session.close().flushed


def until_up(session: OpenedSession, tier: str) -> None:
    until(lambda: session.metrics.get(table.TIER_UP, tier=tier, way="read"), "the tier does not come in")


def works_with_the_other_tier(session: OpenedSession, engine: Engine) -> None:
    """More than host memory holds is stored, and comes back from the other tier as it was."""
    prefix = prefix_of(CHUNKS, session.root, seed=7)
    for group, fresh in zip(engine.groups, Engine(64, seed=1).groups, strict=True):
        for layer, content in zip(group, fresh, strict=True):
            layer[:] = content
    assert stored(session.session, "meanwhile", prefix, places_of(range(CHUNKS))).dropped == 0
    comes_back(session, prefix, engine)


def comes_back(session: OpenedSession, prefix: Any, engine: Engine) -> None:
    """What was stored from blocks of seed 1 is found and loaded into the blocks of the session's `engine`."""
    until(
        lambda: looked_up(session.session, "found", prefix).tokens == TOKENS or session.session.release("found"),
        "the objects are not found",
    )
    for layer in (layer for group in engine.groups for layer in group):
        layer[:] = 0
    assert loaded(session.session, "found", prefix, TOKENS, load_places(TOKENS)).tokens == TOKENS
    session.session.release("found")
    assert engine.same(Engine(64, seed=1), load_places(TOKENS))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damage(how: str, path: Path, precious: Path) -> None:
    """Do to the file at `path` what a mistake or a fault does while no engine runs."""
    content = path.read_bytes()
    if how in {"removed", "link", "FIFO", "directory"}:
        path.unlink()
    match how:
        case "empty":
            path.write_bytes(b"")
        case "ten bytes":
            path.write_bytes(content[:10])
        case "odd checksum":
            path.write_text('{"version": 1, "store_id": "", "created": "", "checksum": []}')
        case "flipped":
            flip(path, 8 * content.index(b"version") + 3)
        case "link":
            precious.write_bytes(content)
            path.symlink_to(precious)
        case "FIFO":
            os.mkfifo(path)
        case "directory":
            path.mkdir()


DAMAGES = ["removed", "empty", "ten bytes", "odd checksum", "flipped", "link", "FIFO", "directory"]


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_starts_without_the_store_and_uses_it_after_a_repair(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, root, precious = Engine(64, seed=1), tmp_path / "kv", tmp_path / "precious"
    filled(kind, root, engine)
    damage(how, marker_of(kind, root), precious)
    before, outside = snapshot(store_of(kind, root)), snapshot(precious) if precious.exists() else {}
    with pytest.raises(DamagedStoreError, match=r"kvtier inspect repair .*required = true"):
        opened(kind, root, engine, is_required=True)
    caplog.clear()
    session = opened(kind, root, engine)
    assert session.metrics.get(table.TIER_UP, tier=kind, way="read") == 0.0
    works_with_the_other_tier(session, engine)
    (told,) = errors(caplog)
    assert f"kvtier inspect repair {store_of(kind, root)}" in told
    assert "kvtier starts without this tier" in told
    assert snapshot(store_of(kind, root)) == before
    session.session.close()

    # It may also be repaired while the engine runs.
    session = opened(kind, root, engine)
    caplog.clear()
    capsys.readouterr()
    assert run(["inspect", "repair", str(store_of(kind, root)), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert str(marker_of(kind, root)) in answer["done"][0]
    until_up(session, kind)
    comes_back(session, prefix_of(CHUNKS, session.root), engine)
    assert errors(caplog) == []
    assert session.session.close().flushed
    assert outside == (snapshot(precious) if precious.exists() else {})
    assert run(["inspect", "repair", f"{kind}:{root}"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out


def make(kind: str, root: Path) -> Any:
    """A tier of its own, without an engine."""
    if kind == "disk":
        return DiskTier(root, capacity_bytes=8 * MIB, direct_io="off", open_deadline_s=0.1)
    if kind == "directory":
        return DirectoryTier(root, capacity_bytes=8 * MIB, direct_io="off")
    return SharedDirectoryTier(root, key_id=bytes(16), model=bytes(16), capacity_bytes=8 * MIB)


def plain_marker(kind: str, root: Path) -> Path:
    return root / ("kvtier-disk.json" if kind == "disk" else "kvtier-store.json")


def plain_store(kind: str, root: Path) -> None:
    tier = make(kind, root)
    assert tier.write(object_name(1), frame_of(1))
    tier.close()


def holds(tier: Any) -> bool:
    into = empty_frame(2 * BLOCK_BYTES)
    return tier.read(object_name(1), into) == into.nbytes and into == frame_of(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_a_marker_changes_nothing_until_it_is_repaired(root: Path, kind: str) -> None:
    plain_store(kind, root)
    marker = plain_marker(kind, root)
    good, refused = marker.read_bytes(), 0
    for bit in range(0, 8 * len(good), 53):
        flip(marker, bit)
        before, tier = snapshot(root), None
        with suppress(DamagedStoreError):
            tier = make(kind, root)
        if tier is None:
            refused += 1
            assert snapshot(root) == before
            assert run(["inspect", "repair", str(root)]) == 0
            tier = make(kind, root)
        assert holds(tier)
        tier.close()
        marker.write_bytes(good)
    assert refused > 10


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("kind", ["directory", "disk"])
def test_a_store_that_a_process_has_open_is_not_repaired(
    tmp_path: Path, root: Path, kind: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_store(kind, root)
    tier = make(kind, root)
    if kind == "disk":
        tier._write_status()
        tier._is_closing = True  # its keeper would mend a removed marker
        tier._wake.set()
        tier._keeper.join(DEADLINE_S)
    content = plain_marker(kind, root).read_bytes()
    damage(how, plain_marker(kind, root), tmp_path / "precious")
    before = snapshot(root)
    assert run(["inspect", "repair", str(root)]) == 2
    assert "a running process has the store open" in capsys.readouterr().err
    assert snapshot(root) == before
    if not plain_marker(kind, root).is_dir():
        plain_marker(kind, root).unlink(missing_ok=True)
        plain_marker(kind, root).write_bytes(content)
    tier.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_with_foreign_files_or_another_version_is_not_repaired(
    tmp_path: Path, root: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain_store(kind, root)
    marker = plain_marker(kind, root)
    content = marker.read_bytes()
    marker.unlink()
    if kind == "disk":
        shutil.rmtree(root / "segments")  # which would prove whose it is
        (root / "segments").mkdir()
    (root / "thesis.txt").write_text("years of work")
    before = snapshot(root)
    place = f"disk:{root.rename(tmp_path / 'rank-0').parent}" if kind == "disk" else f"{kind}:{root}"
    assert run(["inspect", "repair", place]) == 2
    assert "holds other files ('thesis.txt')" in capsys.readouterr().err
    if kind == "disk":
        (tmp_path / "rank-0").rename(root)
    assert snapshot(root) == before
    (root / "thesis.txt").unlink()
    marker.write_bytes(b'{"version": 9, "store_id": "x", "created": "y"}')
    before = snapshot(root)
    assert run(["inspect", "repair", str(root)]) == 2
    assert "version 9, newer than the one known here" in capsys.readouterr().err
    with pytest.raises(DamagedStoreError, match="version 9"):
        make(kind, root)
    assert snapshot(root) == before
    marker.write_bytes(content)


def test_a_place_without_a_store_and_a_kind_without_a_repair_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").write_text("to the editor")
    before = snapshot(tmp_path)
    for place, words in (
        (tmp_path, "holds no kvtier store that can be repaired; nothing was changed"),
        (tmp_path / "letter", "is not a directory"),
        (tmp_path / "none", "is not a directory"),
        (f"directory:{tmp_path / 'none'}", "No such file or directory"),
        (f"disk:{tmp_path}", "holds no kvtier store that can be repaired"),
        (f"directory:{tmp_path}", "holds no kvtier store that can be repaired"),
        ("valkey:127.0.0.1:1?password=hunter2", "holds no kvtier store that can be repaired"),
        ("Valkey:127.0.0.1:1?password=hunter2", "is not a directory"),
    ):
        assert run(["inspect", "repair", str(place)]) == 2, place
        told = capsys.readouterr().err
        assert words in told
        assert "hunter2" not in told
    assert snapshot(tmp_path) == before


@contextmanager
def as_another_user() -> Any:
    """A directory, and no rights of root while the block runs."""
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
        if is_root:
            os.chown(where, 65534, 65534)
            os.seteuid(65534)
        try:
            yield Path(where)
        finally:
            if is_root:
                os.seteuid(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_marker_that_may_not_be_read_is_renamed_by_a_repair(kind: str) -> None:
    with as_another_user() as where:
        root = where / ("rank-0" if kind == "disk" else "kv")
        plain_store(kind, root)
        plain_marker(kind, root).chmod(0)
        with pytest.raises(DamagedStoreError, match="kvtier inspect repair"):
            make(kind, root)
        settings = tier_settings(kind, where if kind == "disk" else root)
        (told,) = kind_of(settings).repair(settings)  # type: ignore[misc]
        assert "written again" in told
        tier = make(kind, root)
        assert holds(tier)
        tier.close()


def test_one_command_repairs_the_stores_of_all_kinds_in_a_directory(tmp_path: Path) -> None:
    engine, root = Engine(64, seed=1), tmp_path / "kv"
    for kind in ("directory", "disk"):
        filled(kind, root, engine)
    for kind in ("directory", "disk"):
        marker_of(kind, root).write_bytes(b"damaged")
        assert run(["inspect", "repair", str(root)]) == 0
        assert b"version" in marker_of(kind, root).read_bytes()


@pytest.mark.parametrize("how", ["ten bytes", "FIFO"])
@pytest.mark.parametrize("kind", ["directory", "disk"])
def test_a_repair_that_waited_for_another_one_leaves_its_marker(
    tmp_path: Path, root: Path, kind: str, how: str
) -> None:
    """Else a process that has the store open by the first one's marker would lose its lock."""
    plain_store(kind, root)
    marker = plain_marker(kind, root)
    good = marker.read_bytes()
    damage(how, marker, tmp_path / "precious")
    with folder_at(root) as other, ThreadPoolExecutor(1) as threads:
        fcntl.flock(other, fcntl.LOCK_EX)
        repairing = threads.submit(repair_store, root)
        time.sleep(0.2)
        assert not repairing.done()
        (root / "new").write_bytes(good)
        (root / "new").rename(marker)
        inode = marker.stat().st_ino
        fcntl.flock(other, fcntl.LOCK_UN)
        assert repairing.result(DEADLINE_S) == []
    assert (marker.stat().st_ino, marker.read_bytes()) == (inode, good)


def test_a_disk_store_whose_marker_is_replaced_while_it_opens_is_not_open(root: Path) -> None:
    """The lock that it waited for is that of a file without a name, and would keep no process out."""
    plain_store("disk", root)
    marker = plain_marker("disk", root)
    with marker.open("rb") as other, ThreadPoolExecutor(1) as threads:
        fcntl.flock(other, fcntl.LOCK_EX)
        opening = threads.submit(DiskTier, root, capacity_bytes=8 * MIB, direct_io="off", open_deadline_s=DEADLINE_S)
        time.sleep(0.2)
        (root / "new").write_bytes(marker.read_bytes())
        (root / "new").rename(marker)
        fcntl.flock(other, fcntl.LOCK_UN)
        with pytest.raises(TierError, match="in use by another process"):
            opening.result(DEADLINE_S)
    tier = make("disk", root)
    assert holds(tier)
    tier.close()


def test_a_repaired_store_without_segments_gets_segments_of_the_usual_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cap is above the largest size that a marker may have."""
    for module in (disk, disk_marker):
        monkeypatch.setattr(module, "SEGMENT_BYTES_MAX", 4 * MIB)
    plain_marker("disk", tmp_path).write_bytes(b"damaged")
    assert run(["inspect", "repair", str(tmp_path)]) == 0
    tier = make("disk", tmp_path)
    assert tier._pool.files.segment_bytes == segment_bytes_for(8 * MIB) < 4 * MIB
    tier.close()


# What else may be at the path.


@pytest.mark.parametrize("what", ["a file", "a home", "a store without its marker", "public", "a loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_at_the_path_an_engine_starts_and_changes_nothing(
    tmp_path: Path, kind: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, root = Engine(64, seed=1), tmp_path / "kv"
    match what:
        case "a file":
            root.write_text("a letter")
        case "a home":
            (root / "Documents").mkdir(parents=True)
            (root / "Documents" / "thesis.txt").write_text("years of work")
        case "a store without its marker":
            filled(kind, root, engine)
            marker_of(kind, root).unlink()
            (root / "secret").unlink(missing_ok=True)
        case "public":
            filled(kind, root, engine)
            root.chmod(0o777)
        case "a loop":
            root.symlink_to(root)
    before = snapshot(root)
    caplog.clear()
    with pytest.raises(DamagedStoreError, match="required = true"):
        opened(kind, root, engine, is_required=True, is_second=False)
    session = opened(kind, root, engine)
    note_fingerprint(config_of(tier_settings(kind, root)), SimpleNamespace(digest=FINGERPRINT, canonical="{}"))  # type: ignore[arg-type]
    works_with_the_other_tier(session, engine)
    assert len(errors(caplog)) == 1, errors(caplog)
    session.session.close()
    until(lambda: "kvtier note" not in {thread.name for thread in threading.enumerate()})
    assert snapshot(root) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["nul\0byte", "x" * 300])
def test_a_path_that_no_file_can_have_stops_the_start(tmp_path: Path, kind: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used|not a path"):
        opened(kind, tmp_path / path, Engine(8), is_second=False)


def test_segments_for_smaller_chunks_do_not_stop_the_start(tmp_path: Path) -> None:
    tmp_path /= "a drive of mine"
    plain = DiskTier(tmp_path / "rank-0", capacity_bytes=8 * MIB, segment_bytes=1 << 14, direct_io="off")
    plain.close()
    settings = tier_settings("disk", tmp_path)
    with pytest.raises(DamagedStoreError, match=r"kvtier inspect purge '.* of mine/rank-0'"):
        kind_of(settings).open(settings, TierContext(layout=LAYOUT))
    assert run(["inspect", "purge", str(tmp_path / "rank-0"), "--yes"]) == 0
    kind_of(settings).open(settings, TierContext(layout=LAYOUT)).close()
    small = DiskSettings(path=tmp_path / "new", capacity_bytes=MIB, reserve_bytes=0)
    with refuses("tiers.disk.capacity_bytes", "too small", value=str(MIB)):
        kind_of(small).open(small, TierContext(layout=LAYOUT, ranks=64))


# The secret next to a store.


@pytest.mark.parametrize("how", ["removed", "empty", "ten bytes", "link", "FIFO", "directory", "public"])
@pytest.mark.parametrize("kind", ["directory", "disk"])
def test_an_engine_starts_whatever_its_secret_is(
    tmp_path: Path, kind: str, how: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, root = Engine(64, seed=1), tmp_path / "kv"
    filled(kind, root, engine)
    file, content = root / "secret", (root / "secret").read_bytes()
    if how == "public":
        file.chmod(0o644)
    else:
        damage(how, file, tmp_path / "precious")
    before = snapshot(file) if how != "removed" else {}
    if how != "removed":
        with pytest.raises(TierError, match=r"secret file .*/secret.*: .* required = true"):
            opened(kind, root, engine, is_required=True)
    caplog.clear()
    session = opened(kind, root, engine)
    works_with_the_other_tier(session, engine)
    until_up(session, kind)
    session.session.close()
    told = errors(caplog)
    assert len(told) == (how != "removed")
    if how == "removed":
        assert len(file.read_bytes()) == 32
        return
    assert "kvtier uses a temporary secret" in told[0]
    assert f"kvtier inspect repair {root}" in told[0]
    assert snapshot(file) == before
    capsys.readouterr()
    assert run(["inspect", "repair", str(root)]) == 0
    if how == "public":
        assert re.search(r"has mode 0644, .*\(chmod 600 .*; nothing was changed there", capsys.readouterr().out)
        assert file.read_bytes() == content
        file.chmod(0o600)
    else:
        assert "was not a secret and was renamed" in capsys.readouterr().out
    caplog.clear()
    one = opened(kind, root, engine, is_required=True)
    prefix = prefix_of(CHUNKS, one.root, seed=0 if how == "public" else 3)
    if how != "public":
        assert stored(one.session, "b", prefix, places_of(range(CHUNKS))).dropped == 0
    one.session.close()
    two = opened(kind, root, engine, is_required=True)
    assert two.root == one.root
    assert looked_up(two.session, "again", prefix).tokens == TOKENS
    two.session.close()
    assert errors(caplog) == []


def test_a_kind_whose_check_fails_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind may be of another package, and its check runs where a secret would be made."""

    def fails(_settings: TierSettings) -> Any:
        raise ValueError("a mistake of the kind")

    engine, root = Engine(64, seed=1), tmp_path / "kv"
    filled("directory", root, engine)
    marker_of("directory", root).unlink()
    (root / "secret").unlink()
    tier = tier_settings("directory", root)
    monkeypatch.setattr(store_secret, "kind_of", lambda _tier: replace(kind_of(tier), check=fails))
    session = opened("directory", root, engine)
    works_with_the_other_tier(session, engine)
    session.session.close()


@pytest.mark.parametrize("how", ["link", "FIFO", "directory"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_note_of_another_file_type_harms_nothing(tmp_path: Path, root: Path, kind: str, how: str) -> None:
    plain_store(kind, store_of(kind, root))
    settings = tier_settings(kind, root, seal="off")  # a store that seals has no notes
    model = model_id(config_of(settings).store.secret, FINGERPRINT)
    note = root / f"note-model-{model.hex()[:16]}.json"
    note.write_bytes(b"precious")
    damage(how, note, tmp_path / "precious")
    note_fingerprint(config_of(settings), SimpleNamespace(digest=FINGERPRINT, canonical="{}"))  # type: ignore[arg-type]
    until(lambda: "kvtier note" not in {thread.name for thread in threading.enumerate()})
    assert json.loads(note.read_bytes())["model"] == model.hex()
    assert not note.is_symlink()
    if how == "link":
        assert (tmp_path / "precious").read_bytes() == b"precious"
    tier = make(kind, store_of(kind, root))
    assert holds(tier)
    tier.close()


# The log.


def test_a_damaged_store_is_one_error_until_its_text_changes(caplog: pytest.LogCaptureFixture) -> None:
    first = [DamagedStoreError("memory", "a marker is lost")] * 3
    tries: list[Exception] = [*first, TierError("memory", str(OSError(errno.EIO, "planned")))]
    tries += [DamagedStoreError("memory", "another")] * 2
    is_open = threading.Event()

    def make_it() -> MemoryTier:
        if tries:
            raise tries.pop(0)
        is_open.set()
        return MemoryTier(capacity_bytes=MIB)

    with caplog.at_level(logging.INFO):
        tier = DeferredTier("memory", make_it, 0.01)
        assert tier.opened(DEADLINE_S, is_required=False) is tier
        assert is_open.wait(DEADLINE_S)
        tier._thread.join(DEADLINE_S)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == ["ERROR", "WARNING", "ERROR", "INFO"]
    assert "a marker is lost; kvtier starts without this tier" in lines[0][1]
    assert tier.contains([object_name(1)]) == [False]
    tier.close()
