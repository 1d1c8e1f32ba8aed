"""What tests need from the system: waits with an end, forked children, a small file system, a listing to compare."""

import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LISTED_BYTES_MAX = 1 << 30
"""A listing omits the content of larger files, which are sparse."""
PEM = """\
-----BEGIN CERTIFICATE-----
MIIBbTCCAROgAwIBAgIUQ+UahDtOjuody5UoyapUXqs1sKowCgYIKoZIzj0EAwIw
DDEKMAgGA1UEAwwBdDAeFw0yNjExMjkxNzQwNDlaFw0yNjExMzAxNzQwNDlaMAwx
CjAIBgNVBAMMAXQwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAARxOcm0GkHMr6Gv
oPVqu6ewjz4ji3oUduw72zw3VydL3UHHhS/lBMLx1yHim4bOpqBWTyQIwK3wSdzA
fnCS+ylRo1MwUTAdBgNVHQ4EFgQUCWpgR18PDFUXhL3sXtsRxsqLoW4wHwYDVR0j
BBgwFoAUCWpgR18PDFUXhL3sXtsRxsqLoW4wDwYDVR0TAQH/BAUwAwEB/zAKBggq
hkjOPQQDAgNIADBFAiAwXuBkLwA3qqqjIJp22cqI/qiEqwky963x8RHE9SbhUAIh
AJa6zPggzvVg7s/KLJn+zm66OCSZRAmC8xrWjzIOdO0a
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
-----END PRIVATE KEY-----
"""
"""A certificate, and the marks of a key."""


def until(is_so: Callable[[], object], why: str = "it has not come true", deadline_s: float = 60.0) -> None:
    """Wait until `is_so` returns something true."""
    end_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < end_s, why
        time.sleep(0.002)


def in_child(act: Callable[[], int | None], deadline_s: float = 60.0) -> int:
    """Run `act` in a forked child. Return its exit code: what `act` returns, or 100 if it raises."""
    child = os.fork()
    if child == 0:
        code = 100
        try:
            code = act() or 0
        finally:
            os._exit(code)
    ended: list[int] = []
    until(lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or ended[-2], "the child hangs", deadline_s)
    return os.waitstatus_to_exitcode(ended[-1])


@contextmanager
def small_file_system(where: Path, size: str) -> Iterator[Path]:
    """Make `where`, and mount a file system of `size` there."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("needs a small file system of its own: mounting a tmpfs is only for root")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True, timeout=60)


def remount(where: Path, how: str) -> None:
    """Mount the file system at `where` again, read-only ("ro") or writable ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(where)], check=True, timeout=60)


def snapshot(tree: Path) -> dict[str, tuple[object, ...]]:
    """Return names, kinds, sizes, times and contents of everything at and below `tree`."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [tree, *sorted(tree.rglob("*"))]:
        status = path.lstat()
        is_read = stat.S_ISREG(status.st_mode) and status.st_size < LISTED_BYTES_MAX
        found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns, path.read_bytes() if is_read else b""
    return found
