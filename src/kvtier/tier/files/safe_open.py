"""Opens and creates private, regular files below a store's root, by descriptor and never through a link.

The root itself may be a link. Paths passed to these functions end at most one component below the root. Other names
are single components, relative to a directory's descriptor.
"""

# This code uses descriptors, because it runs once per object.
# ruff: noqa: PTH101

import errno
import logging
import os
import shlex
import stat
import weakref
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import socket

from kvtier.errors import UnusablePathError
from kvtier.keys.secret import ANY_OWNER, owner_hint

logger = logging.getLogger(__name__)

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

WRONG_KIND = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""errno values for a link, FIFO, socket, device or directory in place of a file, and vice versa."""

MISSING = WRONG_KIND | {errno.ENOENT}
"""`WRONG_KIND`, and the errno for a name that does not exist."""

VANISHED = MISSING | {errno.ESTALE}
"""errno values of a file that another node has removed or replaced."""

_FILE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DIRECTORY_FLAGS = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WARNED_MAX = 64
_warned: set[str] = set()


class UnusableStoreError(UnusablePathError):
    """A store's path cannot be used, and nothing there was changed. Only an operator can repair it.

    An engine reports it as a `DamagedStoreError`, and commands that check settings as an error of the configuration.
    """


class SuppressErrno:
    """Context manager that suppresses an `OSError` whose errno is one of `errnos`."""

    __slots__ = ("_errnos",)

    def __init__(self, errnos: frozenset[int]) -> None:
        self._errnos = errnos

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, OSError) and error.errno in self._errnos


class Descriptor:
    """A long-lived descriptor. It is closed once, at the latest when nothing refers to it anymore.

    A forked child closes its copy immediately. Otherwise a flock inherited by the child would outlive the parent.
    """

    __slots__ = ("__weakref__", "_number")

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        close_in_children(self)

    def __del__(self) -> None:
        with suppress(OSError):  # the file system may be gone
            self.close()

    @property
    def is_open(self) -> bool:
        """Whether the descriptor is open."""
        return self._number is not None

    def fileno(self) -> int:
        """Return the number of the descriptor.

        Raises:
            OSError: the descriptor is closed.
        """
        if self._number is None:
            raise OSError(errno.EBADF, "is closed")
        return self._number

    def close(self) -> None:
        """Close the file. Idempotent."""
        number, self._number = self._number, None
        if number is not None:
            os.close(number)


_descriptors: "weakref.WeakSet[Descriptor | socket]" = weakref.WeakSet()


def close_in_children(descriptor: Descriptor | socket) -> None:
    """Make every child forked from this process close its copy."""
    _descriptors.add(descriptor)


def _close_in_child() -> None:
    for descriptor in list(_descriptors):
        with suppress(OSError):
            descriptor.close()


os.register_at_fork(after_in_child=_close_in_child)


def open_file(name: str, flags: int, directory: int | None = None) -> tuple[int, os.stat_result]:
    """Open the regular file `name`; return its descriptor and status.

    This does not block on a FIFO and follows no link. A created file has mode 0600, whatever the umask.

    Args:
        name: relative to `directory`, or a path.
        flags: flags of `os.open`.
        directory: descriptor of a directory.

    Raises:
        OSError: the file cannot be opened, with an `errno` in `WRONG_KIND` if it is not a regular file.
    """
    descriptor = os.open(name, flags | _FILE_FLAGS, FILE_MODE, dir_fd=directory)
    try:
        status = os.fstat(descriptor)
        _refuse_other_kinds(name, status)
        is_new = flags & os.O_CREAT and status.st_nlink == 1 and status.st_uid == os.geteuid()
        if is_new and status.st_mode & FILE_MODE != FILE_MODE:
            os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status


def read_file(name: str, bytes_max: int, directory: int | None = None) -> bytes:
    """Read all bytes of the small regular file `name`.

    Raises:
        OSError: the file cannot be opened (as in `open_file`) or read; EFBIG if it is longer than `bytes_max`.
    """
    descriptor, status = open_file(name, os.O_RDONLY, directory)
    with os.fdopen(descriptor, "rb") as file:
        # One more byte reveals a file that grew.
        content = b"" if status.st_size > bytes_max else file.read(bytes_max + 1)
    if max(status.st_size, len(content)) > bytes_max:
        raise OSError(errno.EFBIG, f"longer than {bytes_max} bytes", name)
    return content


def is_at(path: str | Path, descriptor: int) -> bool:
    """Return whether the open file is still at `path`. False after an unmount or a replacement."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def write_file(name: str, draft: str, content: bytes | memoryview, directory: int | None = None) -> None:
    """Write the file `name` atomically. A directory of that name is renamed (`set_aside`).

    Args:
        name: relative to `directory`, or a path.
        draft: unused name of the temporary file.
        content: all bytes.
        directory: descriptor of a directory.

    Raises:
        OSError: the file cannot be written. `name` is unchanged and the temporary file removed.
    """
    descriptor, _ = open_file(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        rename_file(draft, name, directory, directory)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise


def rename_file(draft: str, name: str, source: int | None, target: int | None) -> None:
    """Rename `draft` in the directory `source` to `name` in `target`. A directory of that name is set aside.

    Raises:
        OSError: it cannot be renamed.
    """
    try:
        os.rename(draft, name, src_dir_fd=source, dst_dir_fd=target)
    except IsADirectoryError:
        set_aside(name, target)
        os.rename(draft, name, src_dir_fd=source, dst_dir_fd=target)


@contextmanager
def folder_at(root: Path) -> Generator[int]:
    """Open the directory `root`, which may be a link, for the `with` block.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_directory(name: str, directory: int | None = None, *, is_listed: bool = False) -> int:
    """Open the directory `name` and return its descriptor; `is_listed` makes it usable for `os.scandir`.

    Raises:
        OSError: it cannot be opened, with an `errno` in `WRONG_KIND` if it is not a directory or is a link to one.
    """
    return os.open(name, _DIRECTORY_FLAGS | (os.O_RDONLY if is_listed else os.O_PATH), dir_fd=directory)


@contextmanager
def directory_at(name: str, directory: int | None = None, *, is_listed: bool = False) -> Generator[int]:
    """Open a directory with `open_directory` for the `with` block."""
    descriptor = open_directory(name, directory, is_listed=is_listed)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(name: str, directory: int | None = None, *, replace: bool = False) -> None:
    """Create the directory `name` with mode 0700, whatever the umask. An existing one is left unchanged.

    Args:
        name: relative to `directory`, or a path.
        directory: descriptor of a directory.
        replace: rename anything with that name that is not a directory (`set_aside`).

    Raises:
        OSError: it cannot be created, with an `errno` in `WRONG_KIND` if something else has its name.
    """
    try:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=directory)
    except FileExistsError:
        try:
            os.close(open_directory(name, directory))
        except OSError as error:
            if not replace or error.errno not in WRONG_KIND:
                raise
            set_aside(name, directory)
            make_directory(name, directory)
        return
    with directory_at(name, directory) as made:
        if stat.S_IMODE(os.fstat(made).st_mode) & 0o777 != DIRECTORY_MODE:
            os.chmod(f"/proc/self/fd/{made}", DIRECTORY_MODE)  # fchmod refuses a descriptor of O_PATH


def make_root(root: Path) -> None:
    """Create the directory `root` and its missing parents, each with mode 0700.

    Raises:
        OSError: a directory cannot be created.
    """
    missing = [path for path in (root, *root.parents) if not path.exists()]
    for path in reversed(missing):
        make_directory(str(path))


def _refuse_other_kinds(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.ENXIO, "not a regular file", name)


def set_aside(name: str, directory: int | None = None) -> None:
    """Rename whatever occupies the name of a store's file. A link itself is renamed, not its target.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = f"{name}.aside-{os.urandom(4).hex()}"
    os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
    logger.warning("%s has an unexpected file type and was renamed to %s", name, aside)


def refuse_public(root: Path, *, any_owner: bool) -> os.stat_result:
    """Refuse a root that is world-writable or that another ordinary user owns. Otherwise, return its status.

    Args:
        root: root of a store.
        any_owner: the tier's setting of this name, which permits another owner.

    Raises:
        UnusableStoreError: the root is refused.
        OSError: its status cannot be read.
    """
    status = root.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IWOTH:
        raise UnusableStoreError(
            f"root {str(root)!r} has mode {mode:04o}: every user may replace cached data; "
            "allowed: a directory that others cannot write to "
            f"(chmod o-w {shlex.quote(str(root))}), such as a new one below it"
        )
    if status.st_uid not in {0, os.geteuid()} and not any_owner:
        raise UnusableStoreError(
            f"root {str(root)!r} belongs to user {status.st_uid}, who may replace cached data and knows its secret; "
            f"allowed: a directory of this user or root ({owner_hint(root, status.st_uid)}), or {ANY_OWNER}"
        )
    return status


def check_private(tier: str, root: Path, *, any_owner: bool = False) -> None:
    """Refuse a root like `refuse_public`. Warn once about one that is group-writable or owned by another user.

    Raises:
        UnusableStoreError: the root is refused.
        OSError: its status cannot be read.
    """
    status = refuse_public(root, any_owner=any_owner)
    mode = stat.S_IMODE(status.st_mode)
    if str(root) in _warned or len(_warned) >= _WARNED_MAX:
        return
    if status.st_uid != os.geteuid():
        _warned.add(str(root))
        logger.warning("tier %s: %s belongs to user %d, who may replace cached data", tier, root, status.st_uid)
    elif mode & stat.S_IWGRP:
        _warned.add(str(root))
        logger.warning("tier %s: %s has mode %04o: group %d may replace cached data", tier, root, mode, status.st_gid)
