"""The view of a directory store for `kvtier inspect`."""

import errno
import os
import re
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage

from kvtier.errors import ConfigError
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.directory_marker import BESIDE, MARKER_NAME, read_marker
from kvtier.tier.files.ledger import read_ledger
from kvtier.tier.files.safe_open import folder_at, open_file
from kvtier.tier.files.store_lock import StoreLock, is_locked
from kvtier.tier.files.store_paths import Paths, charge_bytes, walk
from kvtier.tier.files.temp_files import NAMES as TEMP_NAMES
from kvtier.tier.files.temp_files import reserved
from kvtier.tier.store_view import UNBOUNDED_BYTES, FileReader, ObjectFile, Purge, Usage, remove_files

_FILES = re.compile(rf"objects/[0-9a-f]{{2}}/[0-9a-f]{{64}}|drafts/({TEMP_NAMES.pattern})|{BESIDE.pattern}")
_FOLDERS = re.compile(r"objects(/[0-9a-f]{2})?|drafts")


class DirectoryView:
    """The directory store at `root`.

    Raises:
        ConfigError: there is no store at `root`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)
        marker = read_marker(root)
        if marker is None:
            raise ConfigError(f"{root} is not a directory store; allowed here: a directory with {MARKER_NAME}")
        self._marker = marker
        self._paths = Paths(str(root))

    def objects(self) -> list[ObjectFile]:
        """Return all objects, sorted by name."""
        path = self._paths.object
        found = walk(self._paths)
        objects = [ObjectFile(it.name, it.size_bytes, it.mtime_ns / 1e9, path(it.name)) for it in found]
        return sorted(objects, key=lambda stored: stored.name)

    def usage(self) -> Usage:
        """Return the usage, from the marker, the cap file and the temporary files."""
        temp_files = reserved(self._paths.temp_files)
        return Usage(
            store_id=self._marker.store_id,
            version=self._marker.version,
            created=self._marker.created,
            charged_bytes=sum(charge_bytes(it.size_bytes) for it in walk(self._paths)),
            open_in=is_locked(self._paths.marker),
            recorded_bytes=read_ledger(self._paths.cap_file),
            temp_files=len(temp_files),
            temp_bytes=sum(temp_files),
            free_bytes=disk_usage(self.root).free,
        )

    @contextmanager
    def opened(self, stored: ObjectFile) -> Generator[FileReader]:
        """Open the object for the `with` block."""
        with self._paths.found_fan(stored.name) as fan:
            if fan is None:
                raise FileNotFoundError(errno.ENOENT, "does not exist", stored.path)
            descriptor, _ = open_file(stored.name.hex(), os.O_RDONLY, fan)
        with closing(FileReader(descriptor, os.fstat(descriptor).st_size)) as reader:
            yield reader

    @contextmanager
    def opened_tier(self) -> Generator[DirectoryTier]:
        """Open the store for the `with` block, as a tier that evicts nothing."""
        with closing(DirectoryTier(self.root, capacity_bytes=UNBOUNDED_BYTES, direct_io="off")) as tier:
            yield tier

    def purge(self, *, force: bool) -> Purge:
        """Remove the store. If a process has it open, remove only its objects if `force` is set, and raise if not."""
        lock = StoreLock(str(self.root / MARKER_NAME), "directory")
        try:
            if lock.acquire(deadline_s=5.0):
                result = Purge(directory=str(self.root))
                with folder_at(self.root) as top:
                    remove_files(top, MARKER_NAME, _FILES, _FOLDERS, result)
                return result
        finally:
            lock.release()
        if not force:
            raise ConfigError(
                f"{self.root}: running processes have it open; end them, or remove its objects with --force"
            )
        result = Purge(directory=str(self.root), is_emptied_only=True)
        with self.opened_tier() as tier:
            for name, size_bytes in tier.scan():
                tier.delete(name)
                result.objects += 1
                result.bytes += size_bytes
        return result


def view_at(root: Path) -> DirectoryView | None:
    """Return the view of the directory store at `root`, or None if there is none.

    Raises:
        ConfigError: the marker is damaged or of an unknown version.
    """
    is_store = False
    with suppress(OSError):
        is_store = (root / MARKER_NAME).is_file()
    return DirectoryView(root) if is_store else None
