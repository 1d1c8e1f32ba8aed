"""Keeps one file per object in a directory that several processes may share, under a hard byte cap.

The files are authoritative. The index in memory may be stale. The index snapshot only speeds up the start. A walk
rebuilds the cap file's count. Names appear and disappear only under the cap file's lock. Bytes are written and read
outside the lock. Except in a rare recount, no lock is held for longer than it takes to handle a few hundred objects. A
separate thread writes index snapshots.

Nothing is synced to the device. A file may be missing or damaged after a power loss; frame verification turns either
into a miss.
"""

# This code uses descriptors and plain strings, because it runs once per object.
# ruff: noqa: PTH108, PTH118, PTH208

import fcntl
import gc
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from heapq import nlargest
from pathlib import Path

from kvtier.errors import TierError
from kvtier.policy.base import Evictor
from kvtier.policy.lru import Lru
from kvtier.tier.base import Read, Write, clear_frames
from kvtier.tier.directory.index import DirectoryIndex
from kvtier.tier.directory.ledger_cap import ByteCap
from kvtier.tier.directory.snapshot import load_snapshot, save_snapshot
from kvtier.tier.files.base import CLOSE_DEADLINE_S
from kvtier.tier.files.direct import DirectIo, forget_cached, is_aligned, read_part, write_all
from kvtier.tier.files.directory_marker import STORE_VERSION
from kvtier.tier.files.file_per_object import FileTier
from kvtier.tier.files.ledger import Ledger
from kvtier.tier.files.safe_open import MISSING, SuppressErrno, open_file
from kvtier.tier.files.store_lock import StoreLock
from kvtier.tier.files.store_paths import Paths, charge_bytes, stat_in
from kvtier.tier.files.temp_files import TempFile
from kvtier.types import Figures, NextTurn, ObjectName

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 30.0
"""The index snapshot is written at close, and this long after a write, plus 1 ms for each object."""
_SNAPSHOT_OBJECT_S = 0.001
_SNAPSHOT_LONGEST_S = 300.0

USES_MAX = 4096
"""Maximum number of uses queued for publication to other processes. The oldest are dropped."""
USES_AT_ONCE = 64
"""Maximum number of uses that one write publishes."""
_OPEN_TRIES = 3
_SNAPSHOT_TEMP = re.compile(r"index\.[0-9]+\.[0-9a-f]{16}")


class DirectoryTier(FileTier):
    """Keeps frames as files under `root`.

    Args:
        root: the directory, created if missing. A directory with foreign files is refused.
        capacity_bytes: cap for objects and temporary files, each rounded up to 4 KiB. The cap holds at every moment,
            for any number of processes that use the same one. The marker, the cap file and the index snapshot (88 bytes
            per object) are not counted.
        name: the tier's name in metrics and errors.
        evictor: eviction policy, not shared with another tier. Default: `Lru`.
        direct_io: "auto" uses direct I/O where the file system supports it, "on" requires it, "off" disables it.
        shared: whether other processes may write to the store. A name missing from the index is then looked up on disk.
            Otherwise a miss costs no system call.
        lock_deadline_s: longest wait for other processes in an operation.
        is_sealed: whether the index snapshot omits parents, depths and groups.
        open_deadline_s: longest wait for another process that is opening the store. A process that is its only
            user also counts the store, which takes a second for 100,000 objects.
        any_owner: as in `FileSystemTier`.

    Raises:
        ConfigError: a setting is invalid.
        DamagedStoreError: the content of `root` cannot be used; nothing was changed.
        TierError: the storage failed while the tier was opened.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        capacity_bytes: int,
        name: str = "directory",
        evictor: Evictor | None = None,
        direct_io: DirectIo = "auto",
        shared: bool = True,
        lock_deadline_s: float = 2.0,
        open_deadline_s: float = 60.0,
        is_sealed: bool = False,
        any_owner: bool = False,
    ) -> None:
        super().__init__(root, name, capacity_bytes, any_owner=any_owner)
        self._shared = shared
        self._lock_deadline_s = lock_deadline_s
        self._index = DirectoryIndex(Lru() if evictor is None else evictor, is_bare=is_sealed)
        self._uses: deque[tuple[ObjectName, int]] = deque(maxlen=USES_MAX)
        """Name and time of each read that is not yet in its file's mtime."""
        self._snapshot_lock = threading.Lock()
        self._is_closing = threading.Event()
        with self._opening(STORE_VERSION):
            self._paths.make()
            self._store_lock = StoreLock(self._paths.marker, name)
            self._cap_file = Ledger(self._paths.cap_file, name, lock_deadline_s, self._store_lock.is_current)
            self._byte_cap = ByteCap(
                self._paths,
                capacity_bytes,
                self._effective_cap,
                self._cap_file,
                self._index,
                self._on_replaced,
            )
            try:
                self._load(open_deadline_s)
                self._choose_direct(self._paths.temp_files, direct_io)
                self._byte_cap.shrink()
            except BaseException:
                self._release()
                raise

    @property
    def used_bytes(self) -> int:
        """Bytes that all processes count against the cap."""
        return self._cap_file.peek()

    @property
    def object_count(self) -> int:
        """Number of objects in this process's index; other processes may have written more."""
        return len(self._index)

    @property
    def evictions(self) -> int:
        """Number of objects evicted by this process since it opened the store."""
        return self._byte_cap.evictions

    def figures(self) -> Figures:
        """Return the current figures."""
        return Figures(self.used_bytes, self.limit_bytes, self.evictions, direct_io=self.direct_io)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether the index or, in a shared store, the directory has it.

        Raises:
            TierError: the file system fails, or the store's marker is gone.
        """
        with self._operation("look for objects"):
            os.lstat(self._paths.marker)  # the index does not notice an unmounted store
            answers = self._index.contains(names)
            if self._shared and not all(answers):
                unknown = [name for name, is_known in zip(names, answers, strict=True) if not is_known]
                there: set[bytes] = set()
                for name, status in self._paths.stat_objects(unknown):
                    self._index.add_found(ObjectName(name), status.st_size, status.st_mtime_ns)
                    there.add(name)
                answers = [is_known or name in there for name, is_known in zip(names, answers, strict=True)]
            return answers

    def newest(self, most: int, until_s: float) -> list[ObjectName]:
        """Return at most `most` names of this process's index, last used first. This makes no system call."""
        del until_s
        with self._guard:
            rows = nlargest(most, self._index.rows(), key=lambda row: row.used_ns)
            return [ObjectName(row.name) for row in rows]

    def read_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read frames. A batch opens each directory once."""
        return self._read_many(reads, is_use=True)

    def peek_many(self, reads: Sequence[Read]) -> list[int | TierError | None]:
        """Read the starts of frames, without counting as a use."""
        return self._read_many(reads, is_use=False)

    def _read_many(self, reads: Sequence[Read], *, is_use: bool) -> list[int | TierError | None]:
        answers: list[int | TierError | None] = []
        with self._operation("read"), self._paths.kept():
            for read in reads:
                try:
                    answers.append(self._read(*read, is_use=is_use))
                except OSError as error:
                    answers.append(self._failed("read", read.name, error))
        return answers

    def _read(self, name: ObjectName, into: memoryview, offset: int, *, is_use: bool) -> int | None:
        view = into.cast("B")
        is_direct = self.direct_io and is_aligned(view, offset)
        opened = _open_for_reading(self._paths, name, is_direct=is_direct)
        if opened is None:
            self._index.forget(name)
            return None
        descriptor, status = opened
        try:
            count = read_part(descriptor, view, offset)
            if not is_direct:
                forget_cached(descriptor, offset, count)
            recency_ns = self._index.use(name, status.st_size, status.st_mtime_ns) if is_use else None
            if recency_ns is not None and status.st_nlink == 1:
                self._uses.append((name, recency_ns))
        finally:
            os.close(descriptor)
        return count

    def write_many(self, writes: Sequence[Write]) -> list[bool | TierError]:
        """Write frames, evicting others if necessary. Take the lock once to reserve bytes and once to publish names.

        The result is False for a frame that is larger than the cap, or if nothing can be evicted.
        """
        answers: list[bool | TierError | None] = [None] * len(writes)
        with self._operation("write"):
            self._publish_uses(USES_AT_ONCE)
            if len(writes) > 1:
                answers = self._write(writes)
            for at, answer in enumerate(answers):
                if answer is None:
                    try:
                        answers[at] = self._write(writes[at : at + 1])[0]
                    except TierError as error:
                        clear_frames(error)  # its stack frames refer to the buffers
                        answers[at] = error.with_traceback(None)
        if True in answers:
            self._save_snapshot_later()
        return [answer or False for answer in answers]

    def _write(self, writes: Sequence[Write]) -> list[bool | TierError | None]:
        """Write frames. The result is None for a frame without room, which may find room when written alone.

        Raises:
            TierError: the lock is not free.
        """
        answers: list[bool | TierError | None] = [None] * len(writes)
        together = self._byte_cap.together if len(writes) > 1 else nullcontext
        drafts: dict[int, TempFile] = {}
        written: dict[int, tuple[TempFile, os.stat_result]] = {}
        try:
            with together(sum(charge_bytes(write.frame.nbytes) for write in writes)):
                self._reserve(writes, answers, drafts)
            for at in list(drafts):
                draft = drafts.pop(at)
                with self._giving_up(draft, answers, at, writes[at].name):
                    written[at] = draft, _fill(draft, writes[at].frame.cast("B"))
            if written:
                with together():
                    for at in list(written):
                        draft, status = written.pop(at)
                        with self._giving_up(draft, answers, at, writes[at].name):
                            self._byte_cap.publish(draft, status, writes[at].name, writes[at].about)
                            answers[at] = True
        finally:
            for draft in drafts.values():
                os.close(draft.descriptor)
            if drafts or written:
                self._byte_cap.discard([*drafts.values(), *(draft for draft, _ in written.values())])
        return answers

    def _reserve(
        self, writes: Sequence[Write], answers: list[bool | TierError | None], drafts: dict[int, TempFile]
    ) -> None:
        """Add a temporary file for each frame to write, and an answer for each other frame, until there is no room."""
        for at, write in enumerate(writes):
            try:
                charge = charge_bytes(write.frame.nbytes)
                answers[at] = self._is_settled(write, charge)
                if answers[at] is None:
                    is_direct = self.direct_io and is_aligned(write.frame.cast("B"), 0)
                    draft = self._byte_cap.reserve(charge, direct_io=is_direct)
                    if draft is None:
                        return
                    drafts[at] = draft
            except OSError as error:
                answers[at] = self._failed("write", write.name, error)

    def _is_settled(self, write: Write, charge: int) -> bool | None:
        """Return the answer for a frame that exists or is larger than the cap, or None if it must be written."""
        if charge > self.capacity_bytes:
            return False
        if not self._paths.may_exist(write.name):
            return None
        there = self._byte_cap.usable(self._paths.stat_object(write.name))
        if there is None:
            return None
        self._index.add(write.name, there.st_size, there.st_mtime_ns, write.about)
        return True

    @contextmanager
    def _giving_up(
        self, draft: TempFile, answers: list[bool | TierError | None], at: int, name: ObjectName
    ) -> Generator[None]:
        """Discard the temporary file if the `with` block fails. An OSError becomes the answer for its frame."""
        try:
            yield
        except OSError as error:
            self._byte_cap.discard([draft], error)
            answers[at] = self._failed("write", name, error)
        except BaseException:
            self._byte_cap.discard([draft])
            raise

    def delete(self, name: ObjectName) -> None:
        """Delete `name` and its file."""
        with self._operation("delete", name):
            self._byte_cap.remove(name)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Pass a conversation's expected next turn to an evictor that takes hints (`Hinted`)."""
        with self._guard:
            self._index.expects(conversation, next_turn)

    def _end(self) -> None:
        self._publish_uses(USES_MAX)
        self._is_closing.set()
        if self._snapshot_lock.acquire(timeout=CLOSE_DEADLINE_S):
            self._save_snapshot()
        self._release()

    def _load(self, deadline_s: float) -> None:
        is_alone = self._store_lock.acquire(deadline_s)
        if is_alone:
            _remove_unfinished_snapshots(self._paths.root)
        with _collector_paused():
            rows = load_snapshot(self._paths.snapshot)
            if rows is not None:
                self._index.load_snapshot(rows)
            self._byte_cap.attach(is_alone=is_alone, needs_index=rows is None or not self._shared)
        if is_alone:
            self._store_lock.share(deadline_s)
        if rows is None and len(self._index):
            logger.info(
                "tier %s: no usable index snapshot at %s: the index was rebuilt from the files",
                self.name,
                self._paths.snapshot,
            )

    def _on_replaced(self) -> None:
        """Lock the marker in the directory that replaced the old one."""
        self._store_lock.move()
        self._store_lock.share(self._lock_deadline_s)

    def _publish_uses(self, most: int) -> None:
        """Write queued uses to the files' mtimes, which order eviction in other processes. Raises nothing.

        Reads do not do this themselves, because a read must not wait for a write.
        """
        for _ in range(min(most, len(self._uses))):
            with suppress(OSError, IndexError):
                name, used_ns = self._uses.popleft()
                with self._paths.found_fan(name) as fan:
                    if fan is not None:
                        os.utime(name.hex(), ns=(used_ns, used_ns), dir_fd=fan, follow_symlinks=False)

    def _save_snapshot_later(self) -> None:
        """Let a thread write the index snapshot later, unless one waits already. A killed process then loses little."""
        if self._snapshot_lock.acquire(blocking=False):
            delay_s = min(SNAPSHOT_INTERVAL_S + len(self._index) * _SNAPSHOT_OBJECT_S, _SNAPSHOT_LONGEST_S)
            name = f"kvtier {self.name} snapshot"
            threading.Thread(target=self._save_snapshot, args=(delay_s,), name=name, daemon=True).start()

    def _save_snapshot(self, delay_s: float = 0.0) -> None:
        """Write the index snapshot after `delay_s`, or when the tier closes, and release its lock."""
        self._is_closing.wait(delay_s)
        try:
            if self._store_lock.is_current():  # otherwise the disk is not mounted, and the path leads elsewhere
                save_snapshot(self._paths.snapshot, self._index.rows())
        except OSError as error:
            logger.info(
                "tier %s: the index snapshot was not written, so the next start is slower: %s", self.name, error
            )
        finally:
            self._snapshot_lock.release()

    def _release(self) -> None:
        self._byte_cap.close()
        self._store_lock.release()
        self._cap_file.close()


@contextmanager
def _collector_paused() -> Generator[None]:
    """Disable the cycle collector. Loading 100,000 names creates no cycles, and collection took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _open_for_reading(paths: Paths, name: ObjectName, *, is_direct: bool) -> tuple[int, os.stat_result] | None:
    """Return a locked descriptor of the object's file, and its status, or None if there is no regular file.

    `ByteCap` may reuse an evicted file for another object, but never a locked one. The name is checked again under the
    lock, because the file may have been reused before the lock was taken.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
    with paths.found_fan(name) as fan, SuppressErrno(MISSING):
        if fan is None:
            return None
        for _ in range(_OPEN_TRIES):
            descriptor, status = open_file(name.hex(), flags, fan)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                now = stat_in(fan, name)
                if now is not None and os.path.samestat(now, status):
                    return descriptor, status
            except BlockingIOError:
                now = None
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if now is None:
                break
    return None


def _fill(draft: TempFile, frame: memoryview) -> os.stat_result:
    """Write and close the temporary file, and return its status."""
    try:
        write_all(draft.descriptor, frame, is_sized=draft.size_bytes == frame.nbytes)
        return os.fstat(draft.descriptor)
    finally:
        # A reused file is locked, and a child forked meanwhile would keep the lock.
        fcntl.flock(draft.descriptor, fcntl.LOCK_UN)
        os.close(draft.descriptor)


def _remove_unfinished_snapshots(root: str) -> None:
    """Remove unfinished index snapshots. Call this only under the exclusive store lock."""
    for name in os.listdir(root):
        if _SNAPSHOT_TEMP.fullmatch(name):
            with suppress(IsADirectoryError):  # not a snapshot
                os.unlink(os.path.join(root, name))
