"""What lies at a path never stops a start: the engine starts without what needs the path, and one ERROR names it."""

import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event

import pytest
from tests.cluster.hostile import Hostile
from tests.refusals import refuses
from tests.rig import FINGERPRINT, LAYOUT, Engine, config, places_of, prefix_of, stored
from tests.system import PEM, in_child, remount, small_file_system

from kvtier.codec import registry as codecs
from kvtier.config import machine_checks
from kvtier.config.loader import load
from kvtier.config.machine_checks import check, refuse_unusable
from kvtier.config.sections import Config, StoreConfig
from kvtier.config.tier_list import parse
from kvtier.errors import ConfigError, TierError
from kvtier.keys.secret import BYTES_MAX, read_private
from kvtier.policy import registry as evictors
from kvtier.runtime import rank as rank_module
from kvtier.runtime import store_secret as secret_module
from kvtier.runtime.control_socket import ControlSocket
from kvtier.runtime.executor import Completion
from kvtier.runtime.observers import line_file
from kvtier.runtime.observers.guards import unless_unusable
from kvtier.runtime.observers.health_record import HealthRecord
from kvtier.runtime.open import OpenedSession, open_core, open_session
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_group import OpenRanks
from kvtier.tier import registry as kinds
from kvtier.tier.files.store_root import mend_secret
from kvtier.types import Recall

IS_ROOT = os.geteuid() == 0
OTHER = 54321
HEX = "0f1e2d3c4b5a6978" * 4
CHUNKS = 4


def a_file(path: Path) -> None:
    path.write_bytes(b"of another program")
    path.chmod(0o600)


def a_directory(path: Path) -> None:
    path.mkdir()
    (path / "photo.jpg").write_bytes(b"")


def a_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def anothers_directory(path: Path) -> None:
    path.mkdir(mode=0o755)
    os.chown(path, OTHER, -1)


def anothers_file(path: Path) -> None:
    path.write_text(f"1 - {HEX}\n")
    path.chmod(0o600)
    os.chown(path, OTHER, -1)


def a_file_above(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_bytes(b"")


def nothing(path: Path) -> None:
    path.parent.rmdir()


LIES = [a_file, a_directory, a_fifo, a_loop, a_socket, a_file_above, nothing]
LIES += [anothers_directory, anothers_file] if IS_ROOT else []
USABLE = {
    "control.socket": {a_socket, nothing},  # of a process that has ended; directories are made
    "journal.path": {a_directory, nothing},
    "trace.path": {a_directory, nothing},
    "tiers.disk.path": {nothing},
    "tiers.directory.path": {nothing},
}
"""What lies at a path, and does not keep it from being used."""
if IS_ROOT:
    USABLE["journal.path"] |= {anothers_directory}
    USABLE["trace.path"] |= {anothers_directory}


def settings(name: str, path: Path, *, is_required: bool = False) -> Config:
    """With the setting `name`, and the tiers that need it."""
    tier = name.split(".")[1] if name.startswith("tiers.") else "directory"
    place = path if name.startswith("tiers.") else path.parent.parent / "store"
    texts = [f"{tier}:{place}?capacity=8MiB&retry=1h&required={is_required}"]
    flags = ["host.capacity_bytes=8MiB", "limits.open_deadline_s=20", "limits.close_deadline_s=20"]
    if not name.startswith("tiers."):
        flags.append(f"{name}={path}")
    if name == "store.keys_file":
        texts = [f"{texts[0]}&seal=on"]
    return load(environ={}, flags=flags, tiers=texts).config


def started(made: Config) -> tuple[OpenedSession, ControlSocket | None]:
    """A session as an adapter opens it, which stores."""
    refuse_unusable(made, is_start=True)
    kv = open_session(made, LAYOUT, FINGERPRINT, Engine(64).copier())
    try:
        assert stored(kv.session, "a", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS))).dropped == 0
        path = made.control.socket
        control = None if path is None else unless_unusable(partial(ControlSocket, path, lambda *_: {}))
    except BaseException:
        kv.session.close(20)
        raise
    return kv, control


def starts(name: str, made: Config) -> bool:
    """Whether what the setting `name` asks for is in use after a start."""
    kv, control = started(made)
    tier = made.tiers[0].name
    try:
        if name == "control.socket":
            return control is not None
        if name in {"journal.path", "trace.path"}:
            return (kv.journal if name == "journal.path" else kv.recorder) is not None
        return kv.session.tier_faults()[tier].writes and not kv.session.obstacle
    finally:
        if control is not None:
            control.close()
        kv.session.close(20)


NAMES = ["control.socket", "journal.path", "trace.path", "tiers.disk.path", "tiers.directory.path"]
FILES = ["store.secret_file", "store.keys_file"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A path in an empty directory."""
    (tmp_path / "in").mkdir(mode=0o700)
    return tmp_path / "in" / "here"


@pytest.mark.parametrize("lie", LIES, ids=lambda it: it.__name__)
@pytest.mark.parametrize("name", NAMES + FILES)
def test_an_engine_starts_whatever_lies_at_a_path_and_says_so(name, lie, path, caplog):
    lie(path)
    with caplog.at_level(logging.ERROR):
        is_used = starts(name, settings(name, path))
    assert is_used == (lie in USABLE.get(name, ()))
    errors = [it.getMessage() for it in caplog.records if it.levelno == logging.ERROR]
    assert bool(errors) is not is_used
    assert all(str(path) in it or name in it for it in errors)
    assert not any(it.exc_info for it in caplog.records)


@pytest.mark.parametrize("lie", [a_file, a_fifo], ids=lambda it: it.__name__)
@pytest.mark.parametrize("name", ["tiers.disk.path", "tiers.directory.path", *FILES])
def test_a_required_tier_stops_the_start_for_what_lies_at_a_path(name, lie, path):
    """The control: without `required` the same path does not."""
    lie(path)
    with pytest.raises((ConfigError, TierError), match=f"{path}|required"):
        started(settings(name, path, is_required=True))


@pytest.mark.parametrize("seal", ["off", "on"])
def test_of_required_tiers_only_one_that_seals_needs_the_keys(seal, path):
    made = settings("store.keys_file", path)
    plain = parse(f"disk:{path}.disk?capacity=64MiB&required=true&seal={seal}")
    made = replace(made, tiers=(*made.tiers, plain))
    if seal == "on":
        with refuses("store.keys_file", value=str(path)):
            refuse_unusable(made, is_start=True)
        return
    kv, _ = started(made)
    try:
        assert kv.session.tier_faults()["disk"].writes
    finally:
        kv.session.close(20)


@pytest.mark.parametrize(
    ("flag", "why"),
    [("control.socket=/x" + "y" * 120, "more than 107 bytes"), ("store.codec=none", "not one of the choices")],
)
def test_what_the_settings_alone_say_wrongly_stops_a_start(flag, why):
    with refuses(flag.partition("=")[0], why, value=flag.partition("=")[2]):
        started(load(environ={}, flags=["host.capacity_bytes=8MiB", flag]).config)


@pytest.mark.parametrize("name", ["journal.path", "trace.path", "store.secret_file", "store.keys_file"])
def test_a_command_that_checks_settings_refuses_what_a_start_goes_on_without(name, path):
    a_file(path)
    refuse_unusable(settings(name, path), is_start=True)
    with refuses(name, value=str(path)):
        refuse_unusable(settings(name, path))


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "mounted", "256k") as where:
        yield where


@pytest.mark.parametrize("how", ["read-only", "full"])
@pytest.mark.parametrize("name", NAMES + FILES)
def test_an_engine_starts_on_a_file_system_that_is_full_or_read_only(name, how, mounted, tmp_path):
    place = mounted / "in" / "here"
    place.parent.mkdir()
    if how == "full":
        with suppress(OSError), (mounted / "filler").open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        with suppress(OSError):  # names need room, too
            for number in range(4096):
                (mounted / f"{number}").symlink_to("x" * 1000)
    else:
        remount(mounted, "ro")
    made = settings(name, place)
    if not name.startswith("tiers"):
        made = replace(made, tiers=settings(FILES[0], tmp_path / "in" / "x").tiers)
    starts(name, made)


# ---- names of files --------------------------------------------------------------------------------------------------


def test_two_engines_with_the_same_process_number_and_second_have_files_of_their_own(tmp_path, monkeypatch):
    """Pods often have the same process number, and a rollout starts them together."""
    named = []
    for _ in range(2):
        monkeypatch.setattr(line_file, "_numbers", iter([1]))
        named.append(line_file.new_path(tmp_path, "requests"))
    assert len({*named}) == 2


def test_a_sibling_that_cannot_be_looked_at_does_not_end_a_journal(tmp_path, caplog):
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "journal-x.jsonl").symlink_to("journal-x.jsonl")
    name = "journal.path"
    assert starts(name, settings(name, tmp_path / "journal")), caplog.text


FILE_LIES = (a_file, a_fifo, nothing, anothers_file)


# ---- servers that refuse ---------------------------------------------------------------------------------------------

FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
REFUSALS = {
    "valkey": ("valkey:127.0.0.1:{}", b"-NOAUTH Authentication required.\r\n", "NOAUTH"),
    "valkey wrong": ("valkey:127.0.0.1:{}?password=Hunter2", b"-WRONGPASS invalid\r\n", "WRONGPASS"),
    "s3": (
        "s3:bucket/kv?endpoint=http://127.0.0.1:{}&allow_http=true&access_key_id=a&secret_access_key=Hunter2",
        FORBIDDEN,
        "HTTP 403",
    ),
}


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("server", REFUSALS)
def test_credentials_that_have_expired_keep_a_tier_away_and_stop_no_start(server, is_required, caplog):
    text, answer, why = REFUSALS[server]
    pytest.importorskip("obstore" if server == "s3" else "valkey")
    with Hostile(lambda _data: [answer]) as refusing:
        tier = parse(f"{text.format(refusing.port)}{'&' if '?' in text else '?'}retry=1h&required={is_required}")
        made = replace(config(None), tiers=(tier,), store=StoreConfig(secret=bytes.fromhex(HEX)))
        if is_required:
            with pytest.raises(TierError, match=f"{why}.*required = true"):
                started(made)
            return
        assert not starts(tier.name, made)
    (error,) = [it for it in caplog.records if it.levelno == logging.ERROR]
    assert error.getMessage().startswith(f"tier {tier.name!r}: ")
    assert error.getMessage().count(f"tier {tier.name!r}") == 1
    assert why in error.getMessage()
    assert "Hunter2" not in caplog.text


@pytest.mark.parametrize("lie", [it for it in LIES if it in FILE_LIES], ids=lambda it: it.__name__)
@pytest.mark.parametrize(
    "text",
    [
        "valkey:127.0.0.1:9?password_file={}",
        "valkey:127.0.0.1:9?tls=true&ca_file={}",
        "valkey:127.0.0.1:9?tls=true&certificate_file={}&key_file={}",
        "s3:bucket/kv?profile=p&credentials_file={}",
        "s3:bucket/kv?endpoint=https://127.0.0.1:9&access_key_id=a&secret_access_key=b&ca_file={}",
    ],
)
def test_files_of_a_tier_that_cannot_be_used_keep_it_away_and_stop_no_start(text, lie, path, caplog):
    pytest.importorskip("obstore")
    pytest.importorskip("valkey")
    lie(path)
    tier = parse(f"{text.replace('{}', str(path))}&retry=1h&connect_deadline=1s&transfer_deadline=1s")
    made = replace(config(None), tiers=(tier,), store=StoreConfig(secret=bytes.fromhex(HEX)))
    assert not starts(tier.name, made)
    assert f"tier {tier.name!r}: " in caplog.text
    key = next(word for word in re.split("[?&=]", text) if word.endswith("_file"))
    if lie is a_file and key in {"password_file", "credentials_file"}:
        return  # they have no form that a look at the file shows
    assert str(path) in caplog.text
    found = [
        it for it in check(made) if (it.level, it.setting, it.value) == ("error", f"{tier.label}.{key}", str(path))
    ]
    with refuses(f"{tier.label}.{key}", found[0].detail, value=str(path)):
        refuse_unusable(replace(made, tiers=(replace(tier, required=True),)), is_start=True)


# ---- errors of other packages ----------------------------------------------------------------------------------------

LOGIN = "the server refused redis://u:Hunter2@h"


def failing(error: BaseException) -> Callable[..., object]:
    def fail(*_: object, **_named: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize("error", [RuntimeError(LOGIN), ValueError(LOGIN), KeyboardInterrupt(LOGIN)], ids=repr)
def test_no_error_of_another_packages_tier_ends_a_start_or_shows_a_login(error, path, monkeypatch, caplog):
    kind_of = rank_module.kind_of
    monkeypatch.setattr(rank_module, "kind_of", lambda tier: replace(kind_of(tier), open=failing(error)))
    kv, _ = started(settings("tiers.directory.path", path))
    kv.session.close(20)
    assert "the server refused redis://(hidden)@h" in caplog.text
    assert "Hunter2" not in caplog.text


def test_a_system_without_threads_ends_a_start(path, monkeypatch):
    """The control: without threads no part of kvtier can work."""
    kind_of, error = rank_module.kind_of, RuntimeError("can't start new thread")
    monkeypatch.setattr(rank_module, "kind_of", lambda tier: replace(kind_of(tier), open=failing(error)))
    with pytest.raises(RuntimeError, match="new thread"):
        started(settings("tiers.directory.path", path))


class Point:
    """An entry point of a package that fails."""

    name = value = "third"
    dist = None
    load = staticmethod(failing(ValueError(LOGIN)))


def shown_by_health() -> str:
    record = HealthRecord()
    record.failed(ValueError(LOGIN))
    return record.failure


def shown_by_a_check(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    kind_of = machine_checks.kind_of
    check = failing(ValueError(LOGIN))
    monkeypatch.setattr(machine_checks, "kind_of", lambda tier: replace(kind_of(tier), check=check))
    return str(*machine_checks.check(settings("tiers.directory.path", path)))


def shown_by_a_recall(monkeypatch: pytest.MonkeyPatch, path: Path) -> str:
    answers = list[Completion]()
    rank = open_rank(settings("tiers.directory.path", path), LAYOUT, FINGERPRINT, Engine(64).copier())
    try:
        monkeypatch.setattr(rank.mover._runner, "recall", failing(ValueError(LOGIN)))
        rank.mover.complete_to(answers.append)
        rank.mover._recall(Recall("directory", 0, 1, 0))
    finally:
        rank.close(20)
    return answers[0].detail


def shown_by_a_registry(load: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        load()
    return str(refused.value)


def test_no_text_of_another_packages_error_shows_a_login(path, monkeypatch):
    class Points(list[Point]):
        names = frozenset({"third"})

        def __getitem__(self, _name: object) -> Point:
            return Point()

    monkeypatch.setattr(evictors, "entry_points", lambda **_: Points())
    shown = [
        shown_by_health(),
        shown_by_a_registry(lambda: kinds._loaded(Point(), "")),
        shown_by_a_registry(lambda: codecs._made(Point())),
        shown_by_a_registry(lambda: evictors.make_evictor("third")),
        shown_by_a_recall(monkeypatch, path),
        shown_by_a_check(monkeypatch, path),
    ]
    for text in shown:
        assert "the server refused redis://(hidden)@h" in text
        assert "Hunter2" not in text


# ---- the configured secret -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails later", "hangs"])
def test_a_start_reads_the_configured_secret_once(how, path, monkeypatch, caplog):
    """A reading that fails after another one would key a shared store with a secret that nobody knows."""
    made = settings("store.secret_file", path)
    if how == "hangs":
        made = replace(made, limits=replace(made.limits, open_deadline_s=0.05))
        go_on, calls = Event(), list[object]()
        monkeypatch.setattr(secret_module, "load_or_create", lambda *it, **_: calls.append(it) or go_on.wait(60))
        kv, _ = started(made)
        go_on.set()
        kv.session.close(20)
        assert len(calls) == 1
        assert "could not be read within 0.05 s" in caplog.text
        assert "once it can be opened" not in caplog.text
        assert "until kvtier is restarted" in caplog.text
        return
    read, errors = secret_module.configured_secret, iter([None])
    stale = failing(OSError(116, "Stale file handle"))
    monkeypatch.setattr(secret_module, "configured_secret", lambda it: read(it) if next(errors, 1) is None else stale())
    roots = set[bytes]()
    for _ in range(2):
        kv, _ = started(made)
        roots.add(kv.root)
        kv.session.close(20)
        errors = iter([None])
    assert len(roots) == 1
    assert not caplog.records


@pytest.mark.parametrize("is_required", [False, True])
def test_a_scheduler_that_cannot_read_the_secret_of_its_ranks_uses_no_tier(is_required, path, monkeypatch, caplog):
    """Ranks of other processes have read it, so their tiers are open."""
    made = settings("store.secret_file", path, is_required=is_required)
    rank = open_rank(made, LAYOUT, FINGERPRINT, Engine(64).copier())
    try:
        ranks = OpenRanks(rank.mover, rank.slots, rank.tiers, frozenset(rank.down), [rank.mover.views])
        monkeypatch.setattr(secret_module, "configured_secret", failing(OSError(116, "Stale file handle")))
        if is_required:
            with pytest.raises(TierError, match=r"Stale file handle.*required = true"):
                open_core(made, LAYOUT, FINGERPRINT, ranks)
            return
        kv = open_core(made, LAYOUT, FINGERPRINT, ranks)
        try:
            assert "Stale file handle" in kv.session.obstacle
            assert "Stale file handle" in caplog.text
            assert stored(kv.session, "a", prefix_of(CHUNKS, kv.root), places_of(range(CHUNKS))).stored == 0
        finally:
            kv.session.close(20)
    finally:
        rank.close(20)


# ---- keys that come later --------------------------------------------------------------------------------------------


def test_a_keys_file_that_comes_later_ends_the_lock(path, caplog):
    made = settings("store.keys_file", path)
    kv, _ = started(made)
    try:
        assert kv.session.obstacle
        assert "kvtier starts without keys" in caplog.text
        path.write_text(f"1 - {HEX}\n")
        path.chmod(0o600)
    finally:
        kv.session.close(20)
    assert starts("store.keys_file", made)


# ---- stores and secrets of other users -------------------------------------------------------------------------------

only_root = pytest.mark.skipif(not IS_ROOT, reason="only root gives files to another user")


@only_root
@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_a_store_of_another_user_is_used_only_where_a_setting_allows_it(kind, path, caplog):
    """Its owner knows the secret in it, and can replace every object."""
    name = f"tiers.{kind}.path"
    assert starts(name, settings(name, path))
    theirs = (path / "secret").read_bytes()
    for it in (path, *path.rglob("*")):
        os.chown(it, OTHER, -1)
    kv, _ = started(settings(name, path))
    kv.session.close(20)
    assert f"belongs to user {OTHER}" in caplog.text
    allowed = settings(name, path)
    allowed = replace(allowed, tiers=(replace(allowed.tiers[0], any_owner=True),))
    other, _ = started(allowed)
    assert other.session.tier_faults()[kind].writes
    other.session.close(20)
    again, _ = started(allowed)
    again.session.close(20)
    assert (path / "secret").read_bytes() == theirs
    assert again.root == other.root != kv.root


@only_root
def test_repair_by_root_leaves_the_secret_of_the_engines_user(path):
    """A hint to give the file to root would lock the engine out."""
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    os.chown(path, OTHER, -1)
    assert mend_secret(path) == []
    path.chmod(0o644)
    assert "chmod 600" in mend_secret(path)[0]


PROFILE = "[p]\naws_access_key_id = a\naws_secret_access_key = b\n"


@only_root
@pytest.mark.parametrize(
    ("text", "is_public"),
    [
        ("valkey:127.0.0.1:9?username=u&password_file={}", False),
        ("valkey:127.0.0.1:9?tls=true&certificate_file={1}&key_file={0}", False),
        ("valkey:127.0.0.1:9?tls=true&ca_file={}", True),
        ("valkey:127.0.0.1:9?tls=true&certificate_file={0}&key_file={1}", True),
        ("s3:bucket/kv?profile=p&credentials_file={}", False),
    ],
)
def test_credentials_of_another_user_need_a_setting_and_certificates_none(text, is_public, path):
    pytest.importorskip("obstore")
    pytest.importorskip("valkey")
    from kvtier.tier.s3.kind import _credentials
    from kvtier.tier.valkey.kind import _access

    read = _credentials if text.startswith("s3") else _access
    theirs, ours = path, path.with_name("ours")
    for each in (theirs, ours):
        each.write_text(PROFILE if read is _credentials else PEM if "tls" in text else "Hunter2\n")
    os.chown(theirs, OTHER, -1)
    text = text.format(theirs, ours)
    if not is_public:
        with pytest.raises(ConfigError, match=f"belongs to user {OTHER}.*any_owner = true"):
            read(parse(text))
        text += "&any_owner=true"
    read(parse(text))


@only_root
def test_root_is_told_whose_files_these_are(path):
    """To give them to root, as another hint says, would lock the engine out."""
    path.write_bytes(b"x")
    os.chown(path, OTHER, -1)
    with refuses("keys file", value=str(path), allowed=f"run this as user {OTHER}"):
        read_private(path, "keys file", any_reader=True)
    path.unlink()
    anothers_directory(path)
    with pytest.raises(ConfigError, match=f"run this as user {OTHER}"):
        refuse_unusable(settings("tiers.directory.path", path, is_required=True))


@pytest.mark.parametrize(
    "text", ["s3:bucket?access_key_id=a&secret_access_key=b&ca_file={}", "valkey:h?tls=true&ca_file={}"]
)
def test_a_bundle_of_certificates_that_is_too_long_is_refused_and_not_cut(text, path):
    kind = pytest.importorskip(f"kvtier.tier.{text.partition(':')[0]}.kind")
    path.write_bytes(b"x")
    os.truncate(path, BYTES_MAX + 1)
    with refuses(f"tiers.{text.partition(':')[0]}.ca_file", f"more than {BYTES_MAX} bytes", value=str(path)):
        kind._bucket(parse(text.format(path))) if "s3" in text else kind._access(parse(text.format(path)))
    os.truncate(path, BYTES_MAX)
    assert len(read_private(path, "file", any_reader=True)) == BYTES_MAX


# ---- children --------------------------------------------------------------------------------------------------------


def test_a_forked_child_keeps_no_listener_and_no_connection_of_its_engine(path):
    """Else the socket of a killed engine would listen as long as a child of it lives."""
    control = ControlSocket(path, lambda *_: {})
    listener = control._server._listener.fileno()

    def look() -> int:
        try:
            os.fstat(listener)
        except OSError:
            return 0
        return 1

    try:
        assert in_child(look) == 0
        assert os.fstat(listener)
    finally:
        control.close()
