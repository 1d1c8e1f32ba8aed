"""Handles a store's root directory and its marker: mistakes in its path, failing storage, foreign files, repairs."""

import errno
import fcntl
import os
import re
import shlex
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from kvtier.errors import ConfigError, DamagedStoreError, TierError
from kvtier.keys.secret import SECRET_BYTES, load
from kvtier.tier.files.fingerprint_notes import NOTE
from kvtier.tier.files.safe_open import (
    WRONG_KIND,
    UnusableStoreError,
    folder_at,
    make_root,
    open_file,
    read_file,
    set_aside,
)
from kvtier.tier.files.store_lock import REPAIR_WAIT_S, lock_file

MISTAKES = frozenset({
    errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL,
})  # fmt: skip
"""errno values of errors that last until an operator acts. Any other means that the storage failed."""

M = TypeVar("M")
"""The content of a marker."""

_DAMAGED = WRONG_KIND | {errno.EFBIG, errno.EACCES}
"""errno values of a file that cannot be a marker."""

_MARKER_BYTES_MAX = 4096
_NAMED_MAX = 3
_EARLY = re.compile(r"secret|\.(secret|kvtier-disk\.json)\.[0-9a-f]+")
_ASIDE = re.compile(r"\.aside-[0-9a-f]+$")
_FILE_SYSTEMS = re.compile(r"lost\+found|\.snapshots?|\.nfs[0-9a-f]+|\.Trash-\d+")
RANK = re.compile(r"rank-\d+")
"""Directory of one rank's disk store."""


class DamagedMarkerError(UnusableStoreError):
    """The marker is damaged. Only `repair_marker` makes a new one, because nothing else proves who owns the files."""


@contextmanager
def opening(tier: str, root: Path, allowed: str) -> Generator[None]:
    """Translate errors while the store at `root` is opened.

    Raises:
        ConfigError: no file can have this path.
        DamagedStoreError: the content of `root` cannot be used before an operator acts.
        TierError: the storage fails.
    """
    if "\0" in str(root):
        raise ConfigError(f"root {str(root)!r} cannot be used: it contains a null byte; allowed: a path without one")
    try:
        yield
    except UnusableStoreError as error:
        raise DamagedStoreError(tier, str(error)) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"root {str(root)!r} cannot be used: {error}; allowed: a shorter path") from error
        if error.errno in MISTAKES:
            detail = (
                f"root {str(root)!r} cannot be used: {error}; allowed: {allowed}; this user must be able to write to it"
            )
            raise DamagedStoreError(tier, detail) from error
        raise TierError(tier, f"root {str(root)!r} cannot be opened: {error}") from error


def refuse_foreign_files(root: Path, is_ours: Callable[[str], bool], allowed: str) -> None:
    """Refuse a directory with files that neither kvtier nor the file system created.

    A secret and notes are allowed, because both may be written before the store. A file that `set_aside` renamed counts
    under its old name.

    Args:
        root: the directory, which may be missing.
        is_ours: returns whether kvtier may have created a file of this name in a directory without a store.
        allowed: allowed values, for the message.

    Raises:
        UnusableStoreError: there are foreign files; the message names the first few.
        OSError: the directory cannot be listed.
    """
    if not root.exists():
        return
    names = sorted(path.name for path in root.iterdir())
    passes = (_FILE_SYSTEMS, _EARLY, NOTE)
    before = {name: _ASIDE.sub("", name) for name in names}
    found = [it for it in names if not any(each.fullmatch(before[it]) for each in passes) and not is_ours(before[it])]
    if found:
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        named = ", ".join(map(repr, found[:_NAMED_MAX]))
        raise UnusableStoreError(
            f"root {str(root)!r} holds other files ({named}{more}) and no kvtier store; nothing was changed; "
            f"allowed: {allowed}"
        )


def command(what: str, root: Path) -> str:
    """Return the command of `kvtier inspect` for the store at `root`, for messages."""
    return f"kvtier inspect {what} {shlex.quote(str(root))}"


def read_marker(path: Path, parse: Callable[[bytes, Path], M]) -> M | None:
    """Read the marker at `path`. Return None if it is missing.

    Args:
        path: path of the marker.
        parse: makes a marker from its bytes and path; raises UnusableStoreError for another version. Any other error
            means that the bytes are damaged.

    Raises:
        UnusableStoreError: `parse` raised it, or the marker is damaged (`DamagedMarkerError`).
        OSError: it cannot be read.
    """
    try:
        return parse(read_file(str(path), _MARKER_BYTES_MAX), path)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UnusableStoreError(f"root {str(path.parent)!r} is not a directory; nothing was changed") from error
    except OSError as error:
        if error.errno not in _DAMAGED:
            raise
        why = error.strerror
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = repr(error)
    how = f"to mend the store: {command('repair', path.parent)}"
    raise DamagedMarkerError(f"{path} is not a valid marker ({why}); nothing was changed; {how}")


def find_marker(path: Path, parse: Callable[[bytes, Path], M], is_new: Callable[[str], bool], allowed: str) -> M | None:
    """Read the marker at `path`. Return None if opening the store would make one.

    Args:
        path: path of the marker.
        parse: as in `read_marker`.
        is_new: the `is_ours` of `refuse_foreign_files`.
        allowed: as in `refuse_foreign_files`.

    Raises:
        UnusableStoreError: as in `read_marker`, or there are other files and no marker.
        OSError: it cannot be read.
    """
    found = read_marker(path, parse)
    if found is None:
        try:
            refuse_foreign_files(
                path.parent, is_new, f"{allowed}; to mend a store there: {command('repair', path.parent)}"
            )
        except UnusableStoreError:
            found = read_marker(path, parse)  # another process may have created it meanwhile
            if found is None:
                raise
    return found


def open_marker(
    path: Path, parse: Callable[[bytes, Path], M], is_new: Callable[[str], bool], allowed: str, content: bytes
) -> M:
    """Open the marker at `path`. Create it with `content` in a missing or empty directory.

    Concurrent processes all get the same marker. No other directory gets one, and a damaged marker stays.

    Args:
        path: path of the marker.
        parse: as in `read_marker`.
        is_new: the `is_ours` of `refuse_foreign_files`.
        allowed: as in `refuse_foreign_files`.
        content: content of a new marker.

    Raises:
        UnusableStoreError: as in `find_marker`. Nothing was changed.
        OSError: it cannot be read or written.
    """
    found = find_marker(path, parse, is_new, allowed)
    if found is None:
        make_root(path.parent)
        write_marker(path, content)
        found = read_marker(path, parse)  # ours or a concurrent process's
    if found is None:
        raise UnusableStoreError(
            f"root {str(path.parent)!r} lost its marker while the store was created; another program may delete files "
            "there"
        )
    return found


def write_marker(path: Path, content: bytes, *, replaces: bool = False) -> None:
    """Write a marker atomically and durably if there is none. Concurrent processes all find the same one.

    Args:
        path: path of the marker.
        content: its bytes.
        replaces: replace a regular file, and rename anything else with that name.

    Raises:
        OSError: the marker cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor, _ = open_file(str(draft), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        if replaces and path.is_file() and not path.is_symlink():
            draft.replace(path)
            return
        if replaces and os.path.lexists(path):
            set_aside(str(path))
        with suppress(FileExistsError):
            try:
                path.hardlink_to(draft)  # unlike a rename, it does not overwrite
            except PermissionError:  # without hard links, the last of several creators wins
                draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def repair_marker(path: Path, read: Callable[[], object], content: Callable[[], bytes]) -> list[str]:
    """Write the marker at `path` again if it is missing or damaged. Return what was done, in sentences.

    Processes that have the store open share a lock on its directory (`StoreLock`), and repairs exclude each other.

    Args:
        path: path of the marker.
        read: reads the marker, like `read_marker`.
        content: makes the bytes of a new marker; raises UnusableStoreError if the directory is not a store's.

    Raises:
        UnusableStoreError: `read` or `content` raised this error, or a running process has the store open or repairs
            it.
        OSError: the marker cannot be read or written.
    """
    if _is_valid(read):
        return []
    fresh = content()
    with folder_at(path.parent) as folder:
        with suppress(OSError):  # NFS cannot lock a directory
            if not lock_file(folder, fcntl.LOCK_EX, REPAIR_WAIT_S):
                raise UnusableStoreError(
                    f"{path.parent}: a running process has the store open or repairs it; end it first"
                )
        if _is_valid(read):  # another repair was faster, and a process may already use its marker
            return []
        write_marker(path, fresh, replaces=True)
    return [f"{path} was written again"]


def _is_valid(read: Callable[[], object]) -> bool:
    with suppress(DamagedMarkerError):
        return read() is not None
    return False


def mend_secret(path: Path) -> list[str]:
    """Rename the file at the path of a store's own secret unless it is a secret. Return what was done, in sentences.

    A secret whose mode prevents its use stays, because its owner may still restrict it.

    Raises:
        OSError: the file cannot be renamed.
    """
    try:
        load(path, is_inside=True, any_owner=True)  # the engine's user may own it when root repairs
    except ConfigError as error:
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and status.st_size == SECRET_BYTES:
            return [f"{error}; nothing was changed there"]
        set_aside(str(path))
        return [f"{path} was not a secret and was renamed; the next start makes a new one and finds no earlier objects"]
    return []
