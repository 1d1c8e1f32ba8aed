"""A store of the disk tier, seen from outside: `kvtier inspect` where DIR holds segments.

Reading takes no lock and disturbs nobody: what was written since the last sync is not seen, and a segment that is begun
anew meanwhile shows as damaged.
"""

# Descriptors.
# ruff: noqa: PTH208

import fcntl
import os
import stat
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import disk_usage
from time import time

from kvtier.cli.store_purge import Purge
from kvtier.cli.store_verify import BadObject, Verification
from kvtier.cli.store_view import Listing, ObjectRow, ObjectView, StoreStat, by_fingerprint, viewed, with_head
from kvtier.codec.frame import verify_frame
from kvtier.codec.head import FIXED_BYTES, Head, head_bytes_told, read_head
from kvtier.errors import ConfigError, CorruptChunkError
from kvtier.tier.disk import DiskTier
from kvtier.tier.disk_files import SEGMENTS_NAME, segment_files
from kvtier.tier.disk_format import VERSION
from kvtier.tier.disk_marker import ALLOWED, MARKER_NAME
from kvtier.tier.disk_segment import file_name
from kvtier.tier.disk_status import STATUS_NAME, TEMP_NAME, UNCHANGED_S, DiskStatus, read_status
from kvtier.tier.disk_view import StoredObject, census, read_marker, segments_at
from kvtier.tier.safe_open import WRONG_KIND, directory_at, folder_at, open_file
from kvtier.types import ObjectName

_UNBOUNDED_BYTES = 1 << 62
_NEVER_S = 86400.0

SILENT_S = 3 * UNCHANGED_S
"""A process that has told nothing for so long hangs in its device, or is stopped."""


def is_disk(root: Path) -> bool:
    """Whether `root` is a store of the disk tier."""
    try:
        return stat.S_ISREG(os.stat(root / MARKER_NAME, follow_symlinks=False).st_mode)  # noqa: PTH116
    except OSError:
        return False


def check_disk(root: Path) -> None:
    """Refuse what is no store of the disk tier.

    Raises:
        ConfigError: it is none; the message names the one that may be meant.
    """
    if is_disk(root):
        return
    if is_disk(root / "rank-0"):
        raise ConfigError(f"{root} is of the disk tier; allowed here: one of its stores, such as {root / 'rank-0'}")
    raise ConfigError(
        f"{root} is no store of the disk tier, the only one that this is for; allowed: a directory with {MARKER_NAME}, "
        "such as rank-0 in the one that disk.path names"
    )


def listing(root: Path, *, limit: int, after: str = "") -> Listing:
    """See `store_view.listing`."""
    found = census(root)
    start = bisect_right(found, after.lower(), key=lambda stored: stored.name.hex())
    page = found[start : start + limit]
    more = page[-1].name.hex() if start + limit < len(found) else None
    return Listing(directory=str(root), objects=[_row(stored) for stored in page], total=len(found), next=more)


def statistics(root: Path, advance: Callable[[float], None]) -> StoreStat:
    """See `store_view.statistics`."""
    marker = read_marker(root)
    rows: list[ObjectRow] = []
    for stored in census(root):
        rows.append(_row(stored))
        advance(1)
    told = health(root).status
    segments: list[tuple[int, os.stat_result]] = []
    with suppress(FileNotFoundError, NotADirectoryError), segments_at(root) as folder:
        segments = segment_files(folder)
    return StoreStat(
        directory=str(root),
        store_id=marker.store_id.hex() if marker else "unknown",
        version=VERSION,
        created=marker.created if marker else "unknown",
        objects=len(rows),
        bytes=sum(row.size_bytes for row in rows),
        charged_bytes=sum(status.st_blocks * 512 for _, status in segments),
        ledger_bytes=None,
        capacity_bytes=told.capacity_bytes if told else None,
        drafts=0,
        draft_bytes=0,
        open_in=int(_is_open(root)),
        free_bytes=disk_usage(root).free,
        unreadable=sum(row.problem is not None for row in rows),
        oldest_age_s=max((row.age_s for row in rows), default=None),
        newest_age_s=min((row.age_s for row in rows), default=None),
        fingerprints=by_fingerprint(rows),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """How a store fares, as the process told that has it open or had it open last."""

    directory: str
    state: str
    """``in use``, ``left alone``, ``silent`` (a process has it open but tells nothing), ``not open``."""
    age_s: float | None
    """How long ago that was told; None: never."""
    amplification: float | None
    status: DiskStatus | None

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with it now."""
        return self.state in {"in use", "not open"}


def health(root: Path) -> StoreHealth:
    """How the store at `root` fares. Reads two small files.

    Raises:
        ConfigError: there is no store of the disk tier.
    """
    check_disk(root)
    status, is_open = read_status(root), _is_open(root)
    age_s = None if status is None else max(time() - status.time_s, 0.0)
    return StoreHealth(
        directory=str(root),
        state=_state(status, age_s, is_open=is_open),
        age_s=age_s,
        amplification=None if status is None else status.amplification,
        status=status,
    )


def _state(status: DiskStatus | None, age_s: float | None, *, is_open: bool) -> str:
    if not is_open:
        return "not open"
    if status is None or age_s is None or not status.is_open or age_s > SILENT_S:
        return "silent"
    return "left alone" if status.is_up is False else "in use"


def find(root: Path, prefix: str) -> StoredObject:
    """See `store_view.find`.

    Raises:
        ConfigError: there is none, or more than one.
    """
    matching = [stored for stored in census(root) if stored.name.hex().startswith(prefix.lower())]
    if len(matching) != 1:
        raise ConfigError(f"name {prefix!r}: {len(matching)} objects in {root} begin with it; allowed: one")
    return matching[0]


def view(stored: StoredObject) -> ObjectView:
    """The head and the section table of one object."""
    row = _row(stored)
    return ObjectView(object=row, path=stored.path) if row.problem else viewed(row, stored.path, _head(stored))


def verify(root: Path, advance: Callable[[float], None]) -> Verification:
    """Read and check every object; calls `advance` with the bytes of each."""
    result = Verification(directory=str(root))
    for stored in census(root):
        reason = _problem(stored)
        advance(stored.size_bytes)
        result.checked += 1
        result.bytes += stored.size_bytes
        if reason:
            result.bad += 1
            result.bad_objects.append(BadObject(name=stored.name.hex(), size_bytes=stored.size_bytes, reason=reason))
    return result


def repair(root: Path, result: Verification) -> None:
    """Drop what `result` found bad.

    Raises:
        ConfigError: another process has the store open: its readers drop what is bad by themselves.
    """
    if not result.bad_objects:
        return
    with closing(_opened(root)) as tier:
        for bad in result.bad_objects:
            tier.delete(ObjectName(bytes.fromhex(bad.name)))
            result.dropped += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What a store took on its device before and after, and what it holds."""

    directory: str
    objects: int
    bytes_before: int
    bytes_after: int
    copied_bytes: int


def compact(root: Path) -> Compaction:
    """Copy together what is left in segments that are mostly empty, and give those that hold nothing back.

    Raises:
        ConfigError: there is no store that is known here, or another process has it open.
    """
    with closing(_opened(root)) as tier:
        before, copied = tier.used_bytes, tier.write_bytes["upkeep"]
        tier.compact()
        return Compaction(
            directory=str(root),
            objects=tier.object_count,
            bytes_before=before,
            bytes_after=tier.used_bytes,
            copied_bytes=tier.write_bytes["upkeep"] - copied,
        )


def purge(root: Path) -> Purge:
    """Remove the store at `root`; the directory itself and what is not ours stay.

    Raises:
        ConfigError: another process has it open.
        OSError: something cannot be removed.
    """
    result = Purge(directory=str(root))
    for stored in census(root):
        result.objects += 1
        result.bytes += stored.size_bytes
    with folder_at(root) as top:
        marker, _ = open_file(MARKER_NAME, os.O_RDWR, top)
        try:
            try:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{root}: a running process has it open; end it first") from None
            _remove(top, result)
        finally:
            os.close(marker)
    result.left += [path.name for path in sorted(root.iterdir()) if path.name != SEGMENTS_NAME]
    return result


def _remove(top: int, result: Purge) -> None:
    """Remove the files of the store in the directory `top`; what of `segments` is not ours is noted as left."""
    try:
        with directory_at(SEGMENTS_NAME, top, is_listed=True) as folder:
            for number, status in segment_files(folder):
                if stat.S_ISREG(status.st_mode):
                    os.unlink(file_name(number), dir_fd=folder)
            result.left = [f"{SEGMENTS_NAME}/{name}" for name in sorted(os.listdir(folder))]
        if not result.left:
            os.rmdir(SEGMENTS_NAME, dir_fd=top)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in WRONG_KIND:
            raise
        result.left = [SEGMENTS_NAME]
    for name in (STATUS_NAME, TEMP_NAME):
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=top)
    # Last: until here, a purge that was interrupted can be repeated.
    os.unlink(MARKER_NAME, dir_fd=top)


def _opened(root: Path) -> DiskTier:
    """The store, with room for all names that it may hold, and left as it is but for what it is told to do."""
    marker = read_marker(root)
    if marker is None:
        raise ConfigError(f"{root} holds no disk store that is known here; allowed: {ALLOWED}")
    return DiskTier(
        root,
        capacity_bytes=_UNBOUNDED_BYTES,
        segment_bytes=marker.segment_bytes,
        sync_interval_s=_NEVER_S,
        open_deadline_s=0.5,
    )


def _row(stored: StoredObject) -> ObjectRow:
    bare = ObjectRow(
        name=stored.name.hex(),
        size_bytes=stored.size_bytes,
        used=stored.begun_s,
        age_s=max(time() - stored.begun_s, 0.0),
    )
    try:
        return with_head(bare, _head(stored))
    except CorruptChunkError as error:
        return replace(bare, problem=error.detail)
    except OSError as error:
        return replace(bare, problem=f"cannot be read: {error.strerror}")


def _head(stored: StoredObject) -> Head:
    with stored.path_opened() as read:
        needed = min(head_bytes_told(read(FIXED_BYTES)), stored.size_bytes)
        head = read_head(read(needed))
    if head.identity.name != stored.name:
        raise CorruptChunkError(stored.name, f"belongs to another object, {head.identity.name.hex()[:12]}")
    return head


def _problem(stored: StoredObject) -> str:
    """What is wrong with an object; "" when nothing is."""
    try:
        with stored.path_opened() as read:
            head = verify_frame(read(stored.size_bytes))
    except CorruptChunkError as error:
        return error.detail
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if head.identity.name == stored.name else f"belongs to another object, {head.identity.name.hex()[:12]}"


def _is_open(root: Path) -> bool:
    with folder_at(root) as top:
        descriptor, _ = open_file(MARKER_NAME, os.O_RDONLY, top)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
