"""The segment files of one store: made, counted and removed, within the cap and with a reserve left to others."""

# Descriptors.

import errno
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from itertools import count

from kvtier.tier.disk_format import BLOCK_BYTES, Header, is_foreign, read_header
from kvtier.tier.disk_segment import Segment, file_name
from kvtier.tier.effective_cap import FULL_ERRNOS, EffectiveCap
from kvtier.tier.safe_open import (
    WRONG_KIND,
    Descriptor,
    directory_at,
    make_directory,
    open_directory,
    open_file,
    set_aside,
)

SEGMENTS_NAME = "segments"

logger = logging.getLogger(__name__)

_NO_ROOM = FULL_ERRNOS | {errno.EFBIG}
_FILE = re.compile(r"(\d{8})\.segment", re.ASCII)
_TAKEN_MAX = 16
"""Names that something else has, tried at once for a new file."""


class SegmentFiles:
    """Files of equal size in a directory. For one thread at a time, but for `used_bytes`.

    Args:
        root: descriptor of the store's directory.
        place: its path, for the log.
        tier: name of the tier, for the log.
        capacity_bytes: the most that all files together take on the device.
        found: less than that while the file system is full.
        segment_bytes: of each file; a multiple of 4096.
        reserve_bytes: what is left free on the file system for others.
        direct_io: open files with O_DIRECT.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(
        self,
        root: int,
        place: str,
        tier: str,
        *,
        capacity_bytes: int,
        found: EffectiveCap,
        segment_bytes: int,
        reserve_bytes: int,
        direct_io: bool,
    ) -> None:
        self.segment_bytes = segment_bytes
        self._place = place
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._effective_cap = found
        self._reserve_bytes = reserve_bytes
        self._direct_io = direct_io
        self._charges: dict[int, int] = {}
        self._taken: set[int] = set()
        """Numbers whose names belong to something else than a segment."""
        self._folder: Descriptor | None = None
        self._root = Descriptor(os.dup(root))
        self._home()

    def __del__(self) -> None:
        # Like the segments of a pool that another has replaced: a thread may still use it.
        self.close()

    @property
    def used_bytes(self) -> int:
        """What all files take on the device."""
        return sum(self._charges.copy().values())

    def charge(self, segment: Segment) -> None:
        """Count what `segment` takes now: a file system may add blocks of its own to a file that fills.

        Raises:
            OSError: the file system fails.
        """
        self._count(segment, self._home())

    def may_grow(self) -> bool:
        """Whether there is room for another file.

        Raises:
            OSError: the file system fails.
        """
        limit_bytes = self._effective_cap.now_bytes if self._charges else self._capacity_bytes
        if self.used_bytes + self.segment_bytes > limit_bytes:
            return False
        return self._free_bytes() - self.segment_bytes >= self._reserve_bytes

    def are_too_large(self) -> bool:
        """Whether others need the room, or the file system has taken more for our files than it said.

        Raises:
            OSError: the file system fails.
        """
        return self.used_bytes > self._capacity_bytes or self._free_bytes() < self._reserve_bytes

    def make(self) -> Segment | None:
        """One more file, allocated; None when there is no room.

        Raises:
            OSError: the file system fails, or has no room even for a first file.
        """
        is_first = not self._charges
        if not self.may_grow():
            if is_first:
                why = (
                    f"{os.strerror(errno.ENOSPC)} for a first segment of {self.segment_bytes} bytes: "
                    f"{self._free_bytes()} are free, of which disk.reserve_bytes leaves {self._reserve_bytes} to others"
                )
                raise OSError(errno.ENOSPC, why, self._place)
            return None
        folder = self._home()
        number, descriptor = self._create(folder)
        try:
            try:
                os.posix_fallocate(descriptor, 0, self.segment_bytes)
            finally:
                os.close(descriptor)
            segment = Segment(folder, number, direct_io=self._direct_io)
        except OSError as error:
            with suppress(OSError):
                os.unlink(file_name(number), dir_fd=folder)
            if error.errno not in _NO_ROOM or is_first:
                raise
            self._effective_cap.record_full(self.used_bytes, error)
            return None
        self.charge(segment)
        if self.used_bytes > self._capacity_bytes:
            self.remove(segment)
            self._effective_cap.record_full(
                self.used_bytes, OSError(errno.ENOSPC, "a file takes more room than its length")
            )
            return None
        return segment

    def remove(self, segment: Segment) -> None:
        """Unlink and close a file; what else has its name stays.

        Raises:
            OSError: the file system refuses; then it is as before.
        """
        folder = self._home()
        if segment.allocated_bytes(folder) is not None:
            os.unlink(segment.name, dir_fd=folder)
        segment.close()
        self._charges.pop(segment.number, None)

    def lost(self, segments: Iterable[Segment]) -> list[Segment]:
        """Those of `segments` whose files were removed or replaced; the others are counted as by `charge`.

        Raises:
            OSError: the file system fails.
        """
        folder = self._home()
        return [segment for segment in segments if not self._count(segment, folder)]

    def load(self, store_id: bytes) -> list[Segment]:
        """The segments that are there, with their headers: those that hold nothing, then the one begun first first.

        Files of another size are removed, and names of files that have another one. The cap may be lower than the last
        time: then as many of the first are, too.

        Raises:
            OSError: the device or the file system fails.
        """
        found: list[Segment] = []
        strange: Counter[str] = Counter()
        folder = self._home()
        try:
            for number, status in segment_files(folder):
                if not stat.S_ISREG(status.st_mode):
                    strange["no regular file"] += 1
                    self._taken.add(number)
                    continue
                is_linked = status.st_nlink > 1  # the other name is perhaps outside: it is not written to
                if is_linked or status.st_size != self.segment_bytes:  # settings have changed, or it was never finished
                    reason = "has another name" if is_linked else f"{status.st_size} bytes long"
                    strange[reason] += status.st_size > 0
                    os.unlink(file_name(number), dir_fd=folder)
                    continue
                found.append(Segment(folder, number, direct_io=self._direct_io))
                reason = found[-1].load_header(store_id)
                strange[reason] += reason not in {"", "not begun"}
                self.charge(found[-1])
            for reason, times in (+strange).items():
                logger.warning("tier %s: %d segments in %s count as empty: %s", self._tier, times, self._place, reason)
            found.sort(key=lambda segment: segment.generation)
            while self.used_bytes > self._capacity_bytes:
                self.remove(found.pop(0))
        except BaseException:
            for segment in found:
                segment.close()
            raise
        return found

    def close(self) -> None:
        """Close the directories. Twice is fine."""
        self._root.close()
        if self._folder is not None:
            self._folder.close()

    def _home(self) -> int:
        """The descriptor of the directory of segments; made where it is missing or something else has its name.

        Raises:
            OSError: it cannot be made.
        """
        root = self._root.fileno()
        with suppress(FileNotFoundError):
            status = os.stat(SEGMENTS_NAME, dir_fd=root, follow_symlinks=False)
            if self._folder is not None and os.path.samestat(status, os.fstat(self._folder.fileno())):
                return self._folder.fileno()
        try:
            make_directory(SEGMENTS_NAME, root)
        except OSError as error:
            if error.errno not in WRONG_KIND:
                raise
            set_aside(SEGMENTS_NAME, root)
            make_directory(SEGMENTS_NAME, root)
        former, self._folder = self._folder, Descriptor(open_directory(SEGMENTS_NAME, root, is_listed=True))
        if former is not None:
            former.close()
            logger.warning("tier %s: %s/%s was removed or replaced", self._tier, self._place, SEGMENTS_NAME)
        self._taken.clear()
        return self._folder.fileno()

    def _count(self, segment: Segment, folder: int) -> bool:
        """Count what `segment` takes; whether its file is in the directory `folder`."""
        allocated_bytes = segment.allocated_bytes(folder)
        self._charges[segment.number] = max(allocated_bytes or 0, segment.size_bytes)
        return allocated_bytes is not None

    def _create(self, folder: int) -> tuple[int, int]:
        """The number and the descriptor of an empty new file."""
        while True:
            number = next(number for number in count() if number not in self._charges and number not in self._taken)
            try:
                return number, open_file(file_name(number), os.O_CREAT | os.O_EXCL | os.O_RDWR, folder)[0]
            except FileExistsError:
                if len(self._taken) >= _TAKEN_MAX:
                    raise
                self._taken.add(number)

    def _free_bytes(self) -> int:
        told = os.statvfs(self._root.fileno())
        return told.f_bavail * told.f_frsize


def segment_files(folder: int) -> list[tuple[int, os.stat_result]]:
    """The number and the status of everything in the directory `folder` that has a segment's name.

    Raises:
        OSError: the file system fails.
    """
    matches = (_FILE.fullmatch(name) for name in sorted(os.listdir(folder)))
    numbers = (int(match[1]) for match in matches if match is not None)
    return [(number, os.stat(file_name(number), dir_fd=folder, follow_symlinks=False)) for number in numbers]


def newest_head(root: int) -> tuple[Header | None, str]:
    """The head of the segment that was begun last, and the name of a file among the segments that is not ours.

    Args:
        root: descriptor of the store's directory.

    Raises:
        OSError: the file system fails.
    """
    heads: list[Header] = []
    strange = ""
    try:
        with directory_at(SEGMENTS_NAME, root, is_listed=True) as folder:
            for number, status in segment_files(folder):
                name = file_name(number)
                if not stat.S_ISREG(status.st_mode):
                    continue
                descriptor, _ = open_file(name, os.O_RDONLY, folder)
                try:
                    block = os.pread(descriptor, BLOCK_BYTES, 0)
                finally:
                    os.close(descriptor)
                head = read_header(block)
                if isinstance(head, Header) and head.segment_bytes == status.st_size:
                    heads.append(head)
                elif is_foreign(block):
                    strange = name
    except OSError as error:
        if error.errno not in {*WRONG_KIND, errno.ENOENT}:
            raise
    return max(heads, key=lambda head: head.generation, default=None), strange
