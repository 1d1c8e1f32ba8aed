"""The view of a disk store for `kvtier inspect`.

Writes since the last sync are not visible, and a segment evicted meanwhile appears damaged.
"""

import fcntl
import os
import re
import stat
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from shutil import disk_usage
from time import time

from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT
from kvtier.tier.disk.format import VERSION, Entries, names_in
from kvtier.tier.disk.marker import ALLOWED, MARKER_NAME, DiskMarker, parse_marker
from kvtier.tier.disk.segment import Segment, file_name
from kvtier.tier.disk.segment_files import SEGMENTS_NAME, newest_head, segment_files
from kvtier.tier.disk.status import FILES as STATUS_FILES
from kvtier.tier.disk.status import SILENT_S, StoreHealth, read_status
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files.safe_open import directory_at, folder_at, open_file
from kvtier.tier.files.store_lock import is_locked
from kvtier.tier.files.store_root import DamagedMarkerError, read_marker
from kvtier.tier.store_view import UNBOUNDED_BYTES, FileReader, ObjectFile, Purge, Usage, remove_files

_NEVER_S = 86400.0
_FILES = re.compile(rf"{SEGMENTS_NAME}/[0-9]{{8}}\.segment|{STATUS_FILES.pattern}")
_FOLDERS = re.compile(SEGMENTS_NAME)


def is_disk(root: Path) -> bool:
    """Return whether `root` is a disk store."""
    try:
        return stat.S_ISREG(os.stat(root / MARKER_NAME, follow_symlinks=False).st_mode)  # noqa: PTH116
    except OSError:
        return False


def view_at(root: Path) -> "DiskView | None":
    """Return the view of one rank's disk store at `root`, or None if there is none."""
    return DiskView(root) if is_disk(root) else None


class DiskView:
    """The disk store at `root`.

    Raises:
        ConfigError: there is no store at `root`; the message names the one that may be meant.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.place = str(root)
        if not is_disk(root):
            if is_disk(root / "rank-0"):
                raise ConfigError(
                    f"{root} belongs to the disk tier; allowed here: one of its stores, such as {root / 'rank-0'}"
                )
            raise ConfigError(
                f"{root} is not a disk store; allowed: a directory with {MARKER_NAME}, such as rank-0 of a disk tier"
            )

    def objects(self) -> list[ObjectFile]:
        """Return all objects of the index, sorted by name.

        Raises:
            ConfigError: the store's version is unknown.
            OSError: a segment cannot be read.
        """
        marker = self._marker()
        loaded: list[tuple[int, int, Entries]] = []
        with suppress(FileNotFoundError, NotADirectoryError), self._segments() as folder:
            for number, status in segment_files(folder):
                if status.st_size != marker.segment_bytes or not stat.S_ISREG(status.st_mode):
                    continue
                with closing(Segment(folder, number, direct_io=False, read_only=True)) as segment:
                    entries = segment.load(marker.store_id)
                    if not isinstance(entries, str):
                        loaded.append((segment.generation, number, entries))
        found: dict[bytes, ObjectFile] = {}
        for generation, number, entries in sorted(loaded, key=lambda item: item[0]):
            path = str(self.root / SEGMENTS_NAME / file_name(number))
            places = zip(names_in(entries), entries["block"].tolist(), entries["size_bytes"].tolist(), strict=True)
            for name, block, size_bytes in places:
                found[name] = ObjectFile(name, size_bytes, generation / 1e9, path, number, block * ALIGNMENT)
        return [found[name] for name in sorted(found)]

    def usage(self) -> Usage:
        """Return the usage, from the marker, the status file and the segments."""
        marker, status = self._marker(), read_status(self.root)
        segments: list[tuple[int, os.stat_result]] = []
        with suppress(FileNotFoundError, NotADirectoryError), self._segments() as folder:
            segments = segment_files(folder)
        return Usage(
            store_id=marker.store_id.hex(),
            version=VERSION,
            created=marker.created,
            charged_bytes=sum(file.st_blocks * 512 for _, file in segments),
            open_in=is_locked(str(self.root / MARKER_NAME)),
            capacity_bytes=status.capacity_bytes if status else None,
            free_bytes=disk_usage(self.root).free,
        )

    @contextmanager
    def opened(self, stored: ObjectFile) -> Generator[FileReader]:
        """Open the object for the `with` block."""
        with self._segments() as folder:
            descriptor, _ = open_file(file_name(stored.number), os.O_RDONLY, folder)
        with closing(FileReader(descriptor, stored.size_bytes, stored.offset)) as reader:
            yield reader

    @contextmanager
    def opened_tier(self) -> Generator[DiskTier]:
        """Open the store for the `with` block, as a tier that evicts nothing.

        The tier does not sync at intervals.
        """
        tier = DiskTier(
            self.root,
            capacity_bytes=UNBOUNDED_BYTES,
            segment_bytes=self._marker().segment_bytes,
            sync_interval_s=_NEVER_S,
            open_deadline_s=0.5,
        )
        with closing(tier):
            yield tier

    def health(self) -> StoreHealth:
        """Return the store's health, from two small files."""
        status, state = read_status(self.root), "not open"
        age_s = None if status is None else max(time() - status.time_s, 0.0)
        if is_locked(str(self.root / MARKER_NAME)):
            is_silent = status is None or age_s is None or not status.is_open or age_s > SILENT_S
            state = "silent" if is_silent else "backed off" if status and status.is_up is False else "in use"
        return StoreHealth(
            directory=str(self.root),
            state=state,
            age_s=age_s,
            amplification=None if status is None else status.amplification,
            status=status,
        )

    def purge(self, *, force: bool) -> Purge:  # noqa: ARG002 - a disk store is never shared
        """Remove the store. `force` changes nothing, because a process never shares an open disk store."""
        result = Purge(directory=str(self.root))
        for stored in self.objects():
            result.objects += 1
            result.bytes += stored.size_bytes
        with folder_at(self.root) as top:
            marker, _ = open_file(MARKER_NAME, os.O_RDWR, top)
            try:
                try:
                    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ConfigError(f"{self.root}: a running process has it open; end it first") from None
                remove_files(top, MARKER_NAME, _FILES, _FOLDERS, result)
            finally:
                os.close(marker)
        return result

    def _marker(self) -> DiskMarker:
        """Return the marker, rebuilt from the newest segment if it is damaged."""
        with suppress(DamagedMarkerError):
            marker = read_marker(self.root / MARKER_NAME, parse_marker)
            if marker is not None:
                return marker
        with folder_at(self.root) as folder:
            head, _ = newest_head(folder)
        if head is None:
            raise ConfigError(f"{self.root} holds no disk store of a known version; allowed: {ALLOWED}")
        return DiskMarker(head.store_id, head.segment_bytes, "unknown")

    @contextmanager
    def _segments(self) -> Generator[int]:
        """Open the segments' directory for the `with` block."""
        with folder_at(self.root) as top, directory_at(SEGMENTS_NAME, top, is_listed=True) as folder:
            yield folder
