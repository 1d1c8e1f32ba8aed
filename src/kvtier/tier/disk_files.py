"""The segment files of one store: made, counted and removed, within the cap and with a reserve left to others."""

# Descriptors and plain strings.
# ruff: noqa: PTH103, PTH108, PTH116, PTH118, PTH208

import errno
import logging
import os
import re
import time
from collections import Counter
from contextlib import suppress

from kvtier.tier.disk_segment import Segment

logger = logging.getLogger(__name__)

GROW_RETRY_S = 30.0
"""After the file system had no room, it is asked again after this long."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FILE = re.compile(r"\d{8}\.segment")


class SegmentFiles:
    """Files of equal size in a directory. For one thread at a time, but for `used_bytes`.

    Args:
        directory: where the files lie; made when it is missing.
        tier: name of the tier, for the log.
        capacity_bytes: the most that all files together take on the device.
        segment_bytes: of each file; a multiple of 4096.
        reserve_bytes: what is left free on the file system for others.
        direct_io: open files with O_DIRECT.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: str,
        tier: str,
        *,
        capacity_bytes: int,
        segment_bytes: int,
        reserve_bytes: int,
        direct_io: bool,
    ) -> None:
        self.segment_bytes = segment_bytes
        self._directory = directory
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._reserve_bytes = reserve_bytes
        self._direct_io = direct_io
        self._charges: dict[int, int] = {}
        self._grow_again_s = 0.0
        os.makedirs(directory, mode=0o700, exist_ok=True)

    @property
    def used_bytes(self) -> int:
        """What all files take on the device."""
        return sum(self._charges.copy().values())

    def charge(self, segment: Segment) -> None:
        """Count what `segment` takes now: a file system may add blocks of its own to a file that fills.

        Raises:
            OSError: the file system fails.
        """
        self._charges[segment.number] = max(segment.allocated_bytes, segment.size_bytes)

    def may_grow(self) -> bool:
        """Whether there is room for another file.

        Raises:
            OSError: the file system fails.
        """
        if self.used_bytes + self.segment_bytes > self._capacity_bytes or time.monotonic() < self._grow_again_s:
            return False
        return self._free_bytes() - self.segment_bytes >= self._reserve_bytes

    def are_too_large(self) -> bool:
        """Whether others need the room, or the file system has taken more for our files than it said.

        Raises:
            OSError: the file system fails.
        """
        return self.used_bytes > self._capacity_bytes or self._free_bytes() < self._reserve_bytes

    def make(self, number: int) -> Segment | None:
        """File `number`, allocated; None when there is no room.

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
                raise OSError(errno.ENOSPC, why, self._directory)
            return None
        path = os.path.join(self._directory, f"{number:08d}.segment")
        try:
            _allocate(path, self.segment_bytes)
            segment = Segment(path, number, self.segment_bytes, direct_io=self._direct_io)
        except OSError as error:
            with suppress(OSError):
                os.unlink(path)
            if error.errno not in _NO_ROOM or is_first:
                raise
            self._rest(str(error))
            return None
        self.charge(segment)
        if self.used_bytes > self._capacity_bytes:
            self.remove(segment)
            self._rest("the file system took more than its length for the file")
            return None
        return segment

    def remove(self, segment: Segment) -> None:
        """Unlink a file.

        Raises:
            OSError: the file system refuses.
        """
        segment.remove()
        self._charges.pop(segment.number, None)

    def load(self, store_id: bytes) -> list[Segment]:
        """The segments that are there, with their headers: those that hold nothing, then the one begun first first.

        Files of another size are removed. The cap may be lower than the last time: then as many of the first are, too.

        Raises:
            OSError: the device or the file system fails.
        """
        found: list[Segment] = []
        strange: Counter[str] = Counter()
        try:
            for file in sorted(os.listdir(self._directory)):
                path = os.path.join(self._directory, file)
                if not _FILE.fullmatch(file):
                    continue
                size_bytes = os.stat(path).st_size
                if size_bytes != self.segment_bytes:  # the settings have changed, or it was never finished
                    strange[f"{size_bytes} bytes long"] += size_bytes > 0
                    os.unlink(path)
                    continue
                found.append(Segment(path, int(file[:8]), size_bytes, direct_io=self._direct_io))
                reason = found[-1].load_header(store_id)
                strange[reason] += reason not in {"", "not begun"}
                self.charge(found[-1])
            for reason, count in (+strange).items():
                logger.warning(
                    "tier %s: %d segments in %s count as empty: %s", self._tier, count, self._directory, reason
                )
            found.sort(key=lambda segment: segment.generation)
            while self.used_bytes > self._capacity_bytes:
                self.remove(found.pop(0))
        except BaseException:
            for segment in found:
                segment.close()
            raise
        return found

    def _rest(self, reason: str) -> None:
        self._grow_again_s = time.monotonic() + GROW_RETRY_S
        logger.warning("tier %s: no room for more than %d segments: %s", self._tier, len(self._charges), reason)

    def _free_bytes(self) -> int:
        told = os.statvfs(self._directory)
        return told.f_bavail * told.f_frsize


def _allocate(path: str, size_bytes: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)
