"""Below a store's root nothing is followed through a link, nothing blocks, and what is made is private."""

import errno
import fcntl
import gc
import logging
import os
import socket
import stat
import threading

import pytest
from tests.system import in_child

from kvtier.errors import ConfigError, TierError
from kvtier.tier.files import safe_open
from kvtier.tier.files.safe_open import (
    Descriptor,
    check_private,
    make_directory,
    open_directory,
    open_file,
    read_file,
    set_aside,
    write_file,
)
from kvtier.tier.files.store_lock import lock_file
from kvtier.tier.operation_guard import OperationGuard


def plant(kind, path, target):
    if kind == "link":
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "socket"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_CREAT | os.O_RDWR, os.O_WRONLY])
def test_only_a_regular_file_is_opened_and_at_once(tmp_path, monkeypatch, kind, flags):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    (tmp_path / "outside").write_bytes(b"precious")
    plant(kind, tmp_path / "it", tmp_path / "outside")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what counts
        open_file("it", flags)
    assert caught.value.errno in safe_open.WRONG_KIND
    assert set(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "outside").read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["link", "fifo", "file"])
def test_only_a_directory_is_opened_or_made(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    plant(kind, tmp_path / "it", tmp_path / "elsewhere")
    if kind == "file":
        (tmp_path / "it").write_bytes(b"x")
    for call in (open_directory, make_directory):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what counts
            call(str(tmp_path / "it"))
        assert caught.value.errno in safe_open.WRONG_KIND
    set_aside(str(tmp_path / "it"))
    make_directory(str(tmp_path / "it"))
    assert (tmp_path / "it").is_dir()
    assert (tmp_path / "elsewhere").is_dir()
    assert len(list(tmp_path.glob("it.aside-*"))) == 1


def test_a_small_file_is_read_within_its_limit(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_file(str(tmp_path / "f"), 5) == b"12345"
    os.truncate(tmp_path / "f", 1 << 41)  # sparse
    with pytest.raises(OSError, match="longer than 5 bytes") as caught:
        read_file(str(tmp_path / "f"), 5)
    assert caught.value.errno == errno.EFBIG


def test_a_small_file_is_written_whole_and_a_draft_never_stays(tmp_path):
    write_file(str(tmp_path / "f"), str(tmp_path / "draft"), b"one")
    write_file(str(tmp_path / "f"), str(tmp_path / "draft"), b"two")
    assert (tmp_path / "f").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o600
    (tmp_path / "d" / "inner").mkdir(parents=True)
    write_file(str(tmp_path / "d"), str(tmp_path / "draft"), b"three")
    assert (tmp_path / "d").read_bytes() == b"three"
    assert [(each / "inner").is_dir() for each in tmp_path.glob("d.aside-*")] == [True]
    with pytest.raises(FileNotFoundError):
        write_file(str(tmp_path / "missing" / "f"), str(tmp_path / "draft"), b"four")
    assert not (tmp_path / "draft").exists()


def test_a_root_that_all_may_write_to_is_refused_and_one_of_a_group_is_reported_once(tmp_path, caplog):
    tmp_path.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        check_private("t", tmp_path)
        assert not caplog.records
        tmp_path.chmod(0o2770)
        check_private("t", tmp_path)
        check_private("t", tmp_path)
    assert [record.getMessage() for record in caplog.records] == [
        f"tier t: {tmp_path} has mode 2770: group {tmp_path.stat().st_gid} may replace cached data"
    ]
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match=rf"has mode 1777.*chmod o-w {tmp_path}"):
        check_private("t", tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory to another user")
def test_a_root_of_another_user_is_refused_and_reported_where_it_is_allowed(tmp_path, caplog):
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match=rf"belongs to user 12345.*chown 0 {tmp_path}.*any_owner = true"):
        check_private("t", tmp_path)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_private("t", tmp_path, any_owner=True)
    assert "belongs to user 12345" in caplog.text
    os.chown(tmp_path, 0, -1)
    assert check_private("t", tmp_path) is None


def test_a_gate_is_closed_in_a_forked_child_even_when_a_thread_held_its_lock():
    gate = OperationGuard("t")
    holding, leave = threading.Event(), threading.Event()

    def hold():
        with gate._changed:
            holding.set()
            leave.wait(30)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert holding.wait(30)

    def try_it():
        with pytest.raises(TierError, match="this is a fork of it"), gate:
            pass
        return int(gate.close())

    assert in_child(try_it) == 0
    leave.set()
    thread.join(30)
    with gate:
        pass
    assert gate.close()


def test_a_forked_child_closes_its_copies_and_so_keeps_no_lock(tmp_path):
    number, _ = open_file(str(tmp_path / "f"), os.O_CREAT | os.O_RDWR)
    descriptor = Descriptor(number)
    fcntl.flock(number, fcntl.LOCK_EX)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(descriptor.is_open)
    descriptor.close()
    other, _ = open_file(str(tmp_path / "f"), os.O_RDWR)
    assert lock_file(other, fcntl.LOCK_EX, 30.0)
    for number in (other, reading, writing):
        os.close(number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    descriptor.close()
    with pytest.raises(OSError, match="is closed"):
        descriptor.fileno()


def test_a_descriptor_of_a_file_system_that_is_gone_ends_without_an_error(monkeypatch):
    """As one of FUSE does whose server has ended. The negative control says that `close` itself reports it."""
    number, other = os.pipe()
    closed = []

    def close(which):
        closed.append(which)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        descriptor = Descriptor(number)
        del descriptor  # an error here fails the test as unraisable
        gc.collect()
        with pytest.raises(OSError, match="not connected"):
            Descriptor(other).close()
    assert closed == [number, other]
    os.close(number)
    os.close(other)
