"""Remove a store from its directory: what is ours, nothing else, and never through a symbolic link."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.cli.store_view import marker_of
from kvtier.errors import ConfigError
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.marker import BESIDE, MARKER_NAME
from kvtier.tier.safe_open import WRONG_KIND, folder_at, open_directory
from kvtier.tier.store_lock import StoreLock
from kvtier.tier.store_paths import Paths
from kvtier.tier.temp_files import NAMES as DRAFT_NAMES
from kvtier.tier.temp_files import owners_alive
from kvtier.types import ObjectName

LEFT_MAX = 100
_UNBOUNDED_BYTES = 1 << 62

_PREFIX = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True, kw_only=True)
class Purge:
    """What was removed."""

    directory: str
    objects: int = 0
    bytes: int = 0
    """Of the objects."""
    is_emptied_only: bool = False
    """Other processes had the store open: its objects are gone, the store is still there."""
    left: list[str] = field(default_factory=list[str])
    """What is not ours and so was not touched (the first hundred)."""


def purge(root: Path, *, force: bool) -> Purge:
    """Remove the store at `root`. The directory itself stays.

    While the store is removed, nobody can open it. When other processes have it open already, `force` removes its
    objects one by one, in step with them, and leaves the rest to its users.

    Raises:
        ConfigError: there is no store of ours, or others have it open and `force` is not given.
        OSError: something cannot be removed; what was removed before it is gone.
    """
    marker_of(root)
    with closing(_Hold(root)) as hold:
        if hold.is_alone:
            return _remove(root)
    if not force:
        told = f"{owners_alive(Paths(str(root)).temp_files)} tier(s) of running processes have it open"
        raise ConfigError(f"{root}: {told}; end them, or empty it under them with --force")
    return _empty(root)


class _Hold:
    """The store's tenancy, alone if nobody else is in there."""

    def __init__(self, root: Path) -> None:
        self._store_lock = StoreLock(str(root / MARKER_NAME), "directory")
        self.is_alone = self._store_lock.acquire(deadline_s=5.0)

    def close(self) -> None:
        self._store_lock.release()


def _empty(root: Path) -> Purge:
    result = Purge(directory=str(root), is_emptied_only=True)
    with closing(DirectoryTier(root, capacity_bytes=_UNBOUNDED_BYTES, direct_io="off")) as tier:
        for name, size_bytes in tier.scan():
            tier.delete(ObjectName(name))
            result.objects += 1
            result.bytes += size_bytes
    return result


def _remove(root: Path) -> Purge:
    result = Purge(directory=str(root))

    def objects(folder: int, place: str) -> None:
        for prefix in _ours(folder, _PREFIX, stat.S_ISDIR, place, result):
            _clear(folder, prefix, f"{place}/{prefix}", result, files)

    def files(folder: int, place: str) -> None:
        for name in _ours(folder, _OBJECT, stat.S_ISREG, place, result):
            result.bytes += os.lstat(name, dir_fd=folder).st_size
            os.unlink(name, dir_fd=folder)
            result.objects += 1

    def drafts(folder: int, place: str) -> None:
        for name in _ours(folder, DRAFT_NAMES, stat.S_ISREG, place, result):
            os.unlink(name, dir_fd=folder)

    with folder_at(root) as top:
        _clear(top, "objects", "objects", result, objects)
        _clear(top, "drafts", "drafts", result, drafts)
        for name in _ours(top, BESIDE, stat.S_ISREG, "", result):
            os.unlink(name, dir_fd=top)
        # Last: until here, a purge that was interrupted can be repeated.
        os.unlink(MARKER_NAME, dir_fd=top)
    return result


def _clear(parent: int, name: str, place: str, result: Purge, clear: Callable[[int, str], None]) -> None:
    """Clear the directory `name` and remove it, if then empty. One that is a link is left alone."""
    try:
        folder = open_directory(name, parent, is_listed=True)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in WRONG_KIND:
            raise
        _leave(place, result)
        return
    try:
        clear(folder, place)
    finally:
        os.close(folder)
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise


def _ours(
    folder: int, pattern: re.Pattern[str], is_kind: Callable[[int], bool], place: str, result: Purge
) -> Iterator[str]:
    """The names in `folder` that are ours; the others are noted as left."""
    for name in sorted(os.listdir(folder)):
        try:
            mode = os.lstat(name, dir_fd=folder).st_mode
        except FileNotFoundError:
            continue
        if pattern.fullmatch(name) and is_kind(mode):
            yield name
        elif place or name not in {MARKER_NAME, "objects", "drafts"}:
            _leave(f"{place}/{name}" if place else name, result)


def _leave(place: str, result: Purge) -> None:
    if len(result.left) < LEFT_MAX:
        result.left.append(place)
