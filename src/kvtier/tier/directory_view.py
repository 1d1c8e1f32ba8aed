"""The view of a directory store for `kvtier inspect`."""

import errno
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import disk_usage

from kvtier.errors import ConfigError
from kvtier.tier.cap_file import read_cap_file
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.directory_marker import BESIDE, MARKER_NAME, Marker, read_marker
from kvtier.tier.disk_marker import MARKER_NAME as DISK_MARKER_NAME
from kvtier.tier.safe_open import WRONG_KIND, folder_at, open_directory, open_file
from kvtier.tier.store_lock import StoreLock
from kvtier.tier.store_paths import Paths, charge_bytes, walk
from kvtier.tier.store_view import LEFT_MAX, UNBOUNDED_BYTES, FileReader, ObjectFile, Purge, Usage
from kvtier.tier.temp_files import NAMES as TEMP_NAMES
from kvtier.tier.temp_files import owners_alive, reserved

_PREFIX = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"[0-9a-f]{64}")


class DirectoryView:
    """The directory store at `root`.

    Raises:
        ConfigError: `root` has none.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)
        self._marker = _marker_of(root)
        self._paths = Paths(str(root))

    def objects(self) -> list[ObjectFile]:
        """All objects, by name."""
        path = self._paths.object
        found = walk(self._paths)
        objects = [ObjectFile(it.name, it.size_bytes, it.mtime_ns / 1e9, path(it.name)) for it in found]
        return sorted(objects, key=lambda stored: stored.name)

    def usage(self) -> Usage:
        """Usage from the marker, the cap file and the temporary files."""
        temp_files = reserved(self._paths.temp_files).values()
        return Usage(
            self._marker.store_id,
            self._marker.version,
            self._marker.created,
            charged_bytes=sum(charge_bytes(it.size_bytes) for it in walk(self._paths)),
            open_in=owners_alive(self._paths.temp_files),
            recorded_bytes=read_cap_file(self._paths.cap_file),
            temp_files=len(temp_files),
            temp_bytes=sum(temp_files),
            free_bytes=disk_usage(self.root).free,
        )

    @contextmanager
    def opened(self, stored: ObjectFile) -> Generator[FileReader]:
        """See `StoreView`."""
        with self._paths.found_fan(stored.name) as fan:
            if fan is None:
                raise FileNotFoundError(errno.ENOENT, "does not exist", stored.path)
            descriptor, _ = open_file(stored.name.hex(), os.O_RDONLY, fan)
        with closing(FileReader(descriptor, os.fstat(descriptor).st_size)) as reader:
            yield reader

    @contextmanager
    def opened_tier(self) -> Generator[DirectoryTier]:
        """See `StoreView`."""
        with closing(DirectoryTier(self.root, capacity_bytes=UNBOUNDED_BYTES, direct_io="off")) as tier:
            yield tier

    def purge(self, *, force: bool) -> Purge:
        """Remove the store. No process can open it meanwhile."""
        lock = StoreLock(str(self.root / MARKER_NAME), "directory")
        try:
            if lock.acquire(deadline_s=5.0):
                return _remove(self.root)
        finally:
            lock.release()
        if not force:
            count = owners_alive(self._paths.temp_files)
            raise ConfigError(
                f"{self.root}: {count} tier(s) of running processes have it open; end them, or remove its objects "
                "with --force"
            )
        result = Purge(directory=str(self.root), is_emptied_only=True)
        with self.opened_tier() as tier:
            for name, size_bytes in tier.scan():
                tier.delete(name)
                result.objects += 1
                result.bytes += size_bytes
        return result


def view_at(root: Path) -> DirectoryView | None:
    """The view of the directory store at `root`; None if it has none.

    Raises:
        ConfigError: its marker is damaged, or of an unknown version.
    """
    try:
        is_store = (root / MARKER_NAME).is_file()
    except OSError:
        return None
    return DirectoryView(root) if is_store else None


def _marker_of(root: Path) -> Marker:
    marker = read_marker(root)
    if marker is None:
        if (root / "rank-0" / DISK_MARKER_NAME).exists():
            raise ConfigError(f"{root} is of the disk tier; allowed here: one of its stores, such as {root / 'rank-0'}")
        why = f"holds no {MARKER_NAME}" if root.is_dir() else "does not exist"
        raise ConfigError(f"{root} {why}, so it is not a kvtier store; allowed here: a store's directory")
    return marker


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

    def temp_files(folder: int, place: str) -> None:
        for name in _ours(folder, TEMP_NAMES, stat.S_ISREG, place, result):
            os.unlink(name, dir_fd=folder)

    with folder_at(root) as top:
        _clear(top, "objects", "objects", result, objects)
        _clear(top, "drafts", "drafts", result, temp_files)
        for name in _ours(top, BESIDE, stat.S_ISREG, "", result):
            os.unlink(name, dir_fd=top)
        # The marker last, so that an interrupted purge can be repeated.
        os.unlink(MARKER_NAME, dir_fd=top)
    return result


def _clear(parent: int, name: str, place: str, result: Purge, clear: Callable[[int, str], None]) -> None:
    """Clear the directory `name` and remove it when empty. A link is kept."""
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
    """Names of the store's files in `folder`. Foreign ones are recorded in `result`."""
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
