"""Creates, counts and removes the segment files of one store, within the cap and without using the reserve."""

import errno
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kvtier.tier.disk.format import BLOCK_BYTES, Header, is_foreign, read_header
from kvtier.tier.disk.segment import Segment, file_name
from kvtier.tier.files.full_disk import FULL_ERRNOS, EffectiveCap
from kvtier.tier.files.safe_open import (
    MISSING,
    Descriptor,
    SuppressErrno,
    directory_at,
    is_at,
    make_directory,
    open_directory,
    open_file,
)

SEGMENTS_NAME = "segments"

logger = logging.getLogger(__name__)

_FULL_ERRNOS = FULL_ERRNOS | {errno.EFBIG}
_FILE = re.compile(r"(\d{8})\.segment", re.ASCII)
_TAKEN_MAX = 16
"""Maximum number of names tried for a new file."""


class SegmentFiles:
    """Files of equal size in a directory. Not thread-safe, except `used_bytes`.

    Args:
        root: the store's directory.
        tier: name of the tier, for the log.
        capacity_bytes: the configured cap for all files on the device.
        effective_cap: the cap while the file system is full.
        segment_bytes: size of each file, a multiple of 4096.
        reserve_bytes: free space to leave to other programs.
        direct_io: open files with O_DIRECT.

    Raises:
        OSError: the directory cannot be created.
    """

    def __init__(
        self,
        root: Path,
        tier: str,
        *,
        capacity_bytes: int,
        effective_cap: EffectiveCap,
        segment_bytes: int,
        reserve_bytes: int,
        direct_io: bool,
    ) -> None:
        self.segment_bytes = segment_bytes
        self._path = str(root)
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._effective_cap = effective_cap
        self._reserve_bytes = reserve_bytes
        self._direct_io = direct_io
        self._charges: dict[int, int] = {}
        folder = f"{root}/{SEGMENTS_NAME}"
        make_directory(folder, replace=True)
        self._folder = Descriptor(open_directory(folder, is_listed=True))

    @property
    def is_current(self) -> bool:
        """Whether the directory that was opened is still at its path."""
        return self._folder.is_open and is_at(f"{self._path}/{SEGMENTS_NAME}", self._folder.fileno())

    @property
    def used_bytes(self) -> int:
        """Bytes of all files on the device."""
        return sum(self._charges.copy().values())

    def update(self, segments: Iterable[Segment]) -> None:
        """Recount the bytes of `segments`, because the file system may add blocks while a file fills.

        Raises:
            OSError: the file system fails.
        """
        for segment in segments:
            self._charge(segment)

    def may_grow(self) -> bool:
        """Return whether the cap and the reserve allow another file.

        Raises:
            OSError: the file system fails.
        """
        limit_bytes = self._effective_cap.now_bytes if self._charges else self._capacity_bytes
        if self.used_bytes + self.segment_bytes > limit_bytes:
            return False
        return self._free_bytes() - self.segment_bytes >= self._reserve_bytes

    def are_too_large(self) -> bool:
        """Return whether the files exceed the cap or leave less than the reserve free.

        Raises:
            OSError: the file system fails.
        """
        return self.used_bytes > self._capacity_bytes or self._free_bytes() < self._reserve_bytes

    def make(self) -> Segment | None:
        """Create and allocate a file. Return None if there is no space.

        Raises:
            OSError: the file system fails, or has no space for the first file.
        """
        is_first = not self._charges
        if not self.may_grow():
            if is_first:
                why = (
                    f"{os.strerror(errno.ENOSPC)} for a first segment of {self.segment_bytes} bytes: "
                    f"{self._free_bytes()} bytes are free, of which disk.reserve_bytes keeps {self._reserve_bytes}"
                )
                raise OSError(errno.ENOSPC, why, self._path)
            return None
        folder = self._folder.fileno()
        number, descriptor = self._create()
        try:
            try:
                os.posix_fallocate(descriptor, 0, self.segment_bytes)
            finally:
                os.close(descriptor)
            segment = Segment(folder, number, direct_io=self._direct_io)
        except OSError as error:
            with suppress(OSError):
                os.unlink(file_name(number), dir_fd=folder)
            if error.errno not in _FULL_ERRNOS or is_first:
                raise
            self._effective_cap.record_full(self.used_bytes, error)
            return None
        self._charge(segment)
        if self.used_bytes > self._capacity_bytes:
            self.remove(segment)
            self._effective_cap.record_full(
                self.used_bytes, OSError(errno.ENOSPC, "a file takes more blocks than its length")
            )
            return None
        return segment

    def remove(self, segment: Segment) -> None:
        """Unlink and close a file. If its name now belongs to another file, that one is kept.

        Raises:
            OSError: the unlink fails; nothing changed.
        """
        folder = self._folder.fileno()
        if segment.is_in(folder):
            os.unlink(segment.name, dir_fd=folder)
        segment.close()
        self._charges.pop(segment.number, None)

    def load(self, store_id: bytes) -> list[Segment]:
        """Load the existing segments with their headers, empty ones first, then by generation.

        Files of another size or with further hard links are removed. If the rest exceeds the cap, its first files are
        removed, too.

        Raises:
            OSError: the device or the file system fails.
        """
        found: list[Segment] = []
        rejected: Counter[str] = Counter()
        folder = self._folder.fileno()
        try:
            for number, status in segment_files(folder):
                if not stat.S_ISREG(status.st_mode):
                    rejected["not a regular file"] += 1
                    continue
                is_linked = status.st_nlink > 1  # the other link may lie outside the store
                if is_linked or status.st_size != self.segment_bytes:  # the settings changed, or the file is unfinished
                    reason = "has another hard link" if is_linked else f"{status.st_size} bytes long"
                    rejected[reason] += status.st_size > 0
                    os.unlink(file_name(number), dir_fd=folder)
                    continue
                found.append(Segment(folder, number, direct_io=self._direct_io))
                reason = found[-1].load_header(store_id)
                rejected[reason] += reason not in {"", "not begun"}
                self._charge(found[-1])
            for reason, times in (+rejected).items():
                logger.warning("tier %s: %d segments in %s count as empty (%s)", self._tier, times, self._path, reason)
            found.sort(key=lambda segment: segment.generation)
            while self.used_bytes > self._capacity_bytes:
                self.remove(found.pop(0))
        except BaseException:
            for segment in found:
                segment.close()
            raise
        return found

    def close(self) -> None:
        """Close the directory. Idempotent."""
        self._folder.close()

    def _charge(self, segment: Segment) -> None:
        self._charges[segment.number] = max(segment.allocated_bytes, segment.size_bytes)

    def _create(self) -> tuple[int, int]:
        """Create an empty file; return its number and descriptor. Names that are already taken are skipped."""
        for number in range(len(self._charges) + _TAKEN_MAX):
            if number not in self._charges:
                with suppress(FileExistsError):
                    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
                    return number, open_file(file_name(number), flags, self._folder.fileno())[0]
        raise OSError(errno.EEXIST, "other files have the names of new segments", self._path)

    def _free_bytes(self) -> int:
        status = os.statvfs(self._folder.fileno())
        return status.f_bavail * status.f_frsize


def segment_files(folder: int) -> list[tuple[int, os.stat_result]]:
    """Return the number and status of each entry of directory `folder` that has a segment's name.

    Raises:
        OSError: the file system fails.
    """
    matches = (_FILE.fullmatch(name) for name in sorted(os.listdir(folder)))
    numbers = (int(match[1]) for match in matches if match is not None)
    return [(number, os.stat(file_name(number), dir_fd=folder, follow_symlinks=False)) for number in numbers]


def newest_head(root: int) -> tuple[Header | None, str]:
    """Return the newest segment's header, and the name of a foreign file among the segments ("" for none).

    Args:
        root: descriptor of the store's directory.

    Raises:
        OSError: the file system fails.
    """
    headers: list[Header] = []
    foreign = ""
    with SuppressErrno(MISSING), directory_at(SEGMENTS_NAME, root, is_listed=True) as folder:
        for number, status in segment_files(folder):
            name = file_name(number)
            if not stat.S_ISREG(status.st_mode):
                continue
            descriptor, _ = open_file(name, os.O_RDONLY, folder)
            try:
                block = os.pread(descriptor, BLOCK_BYTES, 0)
            finally:
                os.close(descriptor)
            header = read_header(block)
            if isinstance(header, Header) and header.segment_bytes == status.st_size:
                headers.append(header)
            elif is_foreign(block):
                foreign = name
    return max(headers, key=lambda header: header.generation, default=None), foreign
