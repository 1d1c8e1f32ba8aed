"""Keeps the hard byte cap of a directory store: reserves bytes, evicts to make space, releases bytes.

Every method holds the cap file's lock for a bounded number of files at a time. Only this module creates and removes
files under objects' names.

The index is built from a walk through the files without the lock. A recount walks under the lock, so no file appears
meanwhile. Recounts are rare. They happen when a process opens the store as its only user, the cap file is damaged, or
no victim is left. During a recount, other processes' writes fail at their deadline. Reads continue.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from kvtier.errors import TierError
from kvtier.tier.base import About
from kvtier.tier.directory.index import DirectoryIndex
from kvtier.tier.files.full_disk import EffectiveCap, is_full_error
from kvtier.tier.files.ledger import Ledger
from kvtier.tier.files.safe_open import open_file
from kvtier.tier.files.store_paths import Found, Paths, charge_bytes, stat_in, walk
from kvtier.tier.files.temp_files import TempFile, TempFiles, reserved
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)

_EXAMINED_MAX = 64
"""Maximum number of victims examined per hold of the lock. Other processes get it in between."""
_EVICTED_MAX = 16
"""Maximum number of files removed per hold of the lock."""
_TOGETHER_MAX = 64
"""Maximum number of files removed per hold of the lock for a batch."""
_UNLINK_FAILURES_MAX = 8
_FOREIGN_SHARE = 16
"""The directory is walked when objects missing from the index take more than 1/16 of the cap."""
_WALK_EVERY = 100
"""Minimum time between two walks, in multiples of a walk's duration. So walking takes at most 1 % of the time."""
_LOCKED_BY_OTHERS = {errno.EWOULDBLOCK, errno.EACCES}


class ByteCap:
    """Keeps the bytes of one store within its cap.

    Args:
        paths: paths of the store.
        capacity_bytes: the configured cap.
        effective_cap: the cap while the file system is full.
        cap_file: the byte count and the lock.
        index: indexed objects and their eviction order.
        on_replaced: called under the lock when the directory was replaced, for example by a remount. Operations fail
            until the call succeeds.
    """

    def __init__(
        self,
        paths: Paths,
        capacity_bytes: int,
        effective_cap: EffectiveCap,
        cap_file: Ledger,
        index: DirectoryIndex,
        on_replaced: Callable[[], None],
    ) -> None:
        self._paths = paths
        self._capacity_bytes = capacity_bytes
        self._effective_cap = effective_cap
        self._cap_file = cap_file
        self._index = index
        self._temp_files = TempFiles(paths)
        self._on_replaced = on_replaced
        self._undeleted: list[TempFile] = []  # their removal failed and is retried
        self._is_replaced = False
        self._holder = 0
        """The thread that is in `together`, or 0."""
        self._together_stop = 0
        """Number of evictions at which that thread should leave the lock to others."""
        self._walking = threading.Lock()
        self._walk_again_s = self._count_again_s = 0.0
        self.evictions = 0

    def attach(self, *, is_alone: bool, needs_index: bool) -> None:
        """Remove temporary files of dead writers, and index the files if `needs_index`.

        A process that is alone (`is_alone`) recounts, because a killed process may have counted bytes that it never
        wrote.
        """
        with self._locked():
            self._release(self._temp_files.clear_stale(is_alone=is_alone))
            if is_alone:
                self._recount()
        if needs_index and not is_alone:
            self._index_files()
        self._walk_again_s = self._count_again_s = 0.0

    def shrink(self) -> None:
        """Evict down to the cap, which may be lower than before. Release the lock between steps."""
        while True:
            with self._locked():
                used_bytes = self._count()
                if used_bytes <= self._capacity_bytes:
                    return
                used_bytes, _, has_victims = self._evict_down(used_bytes, self._capacity_bytes, None)
                if not has_victims:
                    return  # the rest is being written or not indexed; a write will recount

    @contextmanager
    def together(self, charge: int = 0) -> Generator[None]:
        """Hold the lock for the calls of a `with` block of this thread, which together reserve `charge` bytes.

        Raises:
            TierError: the lock is not free.
            OSError: the file system fails.
        """
        if charge:
            self._index_foreign_objects(charge)
        with self._locked():
            self._holder, self._together_stop = threading.get_ident(), self.evictions + _TOGETHER_MAX
            try:
                yield
            finally:
                self._holder = 0

    def reserve(self, charge: int, *, direct_io: bool) -> TempFile | None:
        """Return a temporary file with `charge` bytes reserved, or None if there is no space.

        Within `together`, None may also mean that no space was found quickly.

        Raises:
            TierError: the lock is not free.
            OSError: the file system fails.
        """
        if self._holder == threading.get_ident():
            return None if self.evictions >= self._together_stop else self._reserve(charge, direct_io, 0.0)[0]
        self._index_foreign_objects(charge)
        end_s = time.monotonic() + self._cap_file.deadline_s
        while True:
            with self._locked():
                draft, may_go_on = self._reserve(charge, direct_io, end_s)
            if draft is not None or not may_go_on:
                return draft

    def _reserve(self, charge: int, direct_io: bool, end_s: float) -> tuple[TempFile | None, bool]:  # noqa: FBT001
        """Return a temporary file, or None and whether another try before `end_s` may find space."""
        self._retry_removal()
        used_bytes = self._count()
        target_bytes = self._effective_cap.allows(used_bytes) - charge
        if target_bytes < 0:
            return None, False
        most = 1 if self._effective_cap.is_reduced else _EVICTED_MAX  # the next write may also fail
        used_bytes, draft, has_victims = self._evict_down(used_bytes, target_bytes, (charge, direct_io), most)
        if draft is None and used_bytes <= target_bytes:
            draft = self._create(used_bytes, charge, direct_io=direct_io)
        if draft is not None or has_victims:
            return draft, most > 1 and time.monotonic() < end_s
        may_recount = self._may_recount()  # other processes wrote the rest, or a crash left too high a count
        if may_recount:
            self._recount()
        return None, may_recount

    def _create(self, used_bytes: int, charge: int, *, direct_io: bool) -> TempFile:
        self._cap_file.write(used_bytes + charge)
        try:
            return self._temp_files.create(charge, direct_io=direct_io)
        except BaseException as error:
            self._cap_file.write(used_bytes)
            if is_full_error(error):
                self._effective_cap.record_full(used_bytes, error)
            raise

    def publish(self, draft: TempFile, written: os.stat_result, name: ObjectName, about: About) -> None:
        """Rename `draft` to its object's name. An existing object is kept instead."""
        with self._locked(), self._paths.fan(name) as fan:
            there = self.usable(stat_in(fan, name))
            if there is None:
                self._temp_files.publish(draft, name.hex(), fan)
            else:
                self._release(self._temp_files.remove(draft))
            held = there or written
            self._index.add(name, held.st_size, held.st_mtime_ns, about)

    def discard(self, drafts: Iterable[TempFile], error: BaseException | None = None) -> None:
        """Remove temporary files and release their bytes, now or when the lock is next held. Raises nothing.

        The bytes now in use become the cap if `error` is ENOSPC or EDQUOT.
        """
        left = list(drafts)
        try:
            with self._locked():
                while left:
                    self._release(self._temp_files.remove(left[-1]))
                    left.pop()
                if is_full_error(error):
                    self._effective_cap.record_full(self._cap_file.read() or self._cap_file.peek(), error)
        except (TierError, OSError):
            self._undeleted += left

    def remove(self, name: ObjectName) -> None:
        """Remove the object's file, if it exists."""
        with self._locked():
            there = self._paths.remove_object(name)
            if there is not None:
                self._release(charge_bytes(there.st_size))
            self._index.forget(name)

    def usable(self, status: os.stat_result | None) -> os.stat_result | None:
        """Return `status`, or None for a file larger than the cap, which cannot be an object."""
        return None if status is None or charge_bytes(status.st_size) > self._capacity_bytes else status

    def close(self) -> None:
        """Remove this process's temporary files, as far as possible. Raises nothing."""
        with suppress(TierError, OSError), self._locked():
            self._retry_removal()

    def _index_foreign_objects(self, charge: int) -> None:
        """Index other processes' objects if a write lacks space and they take much of the cap.

        Otherwise only this process's objects would be evicted. The walk takes no lock: changes during
        it are detected when an object is used.
        """
        used_bytes = self._cap_file.peek()
        foreign_bytes = used_bytes - self._index.known_bytes
        limit_bytes = self._effective_cap.now_bytes
        if used_bytes + charge <= limit_bytes or foreign_bytes <= limit_bytes // _FOREIGN_SHARE:
            return
        if time.monotonic() >= self._walk_again_s and not self._walking.locked():
            self._index_files()

    def _index_files(self) -> tuple[int, list[bytes]]:
        """Make the index match the result of a walk. Return the objects' bytes, and the names of oversized files.

        Raises:
            OSError: the file system fails, or another thread walks for longer than the deadline.
        """
        start_s = time.monotonic()
        used_bytes = 0
        oversized: list[bytes] = []

        def usable() -> Iterator[Found]:
            nonlocal used_bytes
            for file in walk(self._paths):
                charge = charge_bytes(file.size_bytes)
                if charge > self._capacity_bytes:
                    oversized.append(file.name)
                else:
                    used_bytes += charge
                    yield file

        if not self._walking.acquire(timeout=self._cap_file.deadline_s):
            raise OSError(errno.EAGAIN, "another thread is listing the store", self._paths.root)
        try:
            self._index.merge(usable())
        finally:
            self._walking.release()
        self._walk_again_s = time.monotonic() + max(1.0, _WALK_EVERY * (time.monotonic() - start_s))
        return used_bytes, oversized

    def _locked(self) -> AbstractContextManager[None]:
        return nullcontext() if self._holder == threading.get_ident() else self._taken()

    @contextmanager
    def _taken(self) -> Generator[None]:
        with self._cap_file.locked() as is_replaced:
            self._is_replaced |= is_replaced
            if self._is_replaced:
                self._on_replaced()
                self._is_replaced = False
            with self._paths.kept():
                yield

    # The methods below run under the lock.

    def _evict_down(
        self, used_bytes: int, target_bytes: int, wanted: tuple[int, bool] | None, most: int = _EVICTED_MAX
    ) -> tuple[int, TempFile | None, bool]:
        """Evict at most `most` objects, until at most `target_bytes` are in use.

        The last victim's file may be reused as the temporary file `wanted` (charge, direct I/O).

        Returns:
            The bytes then in use, the temporary file, and whether there may be more victims.
        """
        if used_bytes <= target_bytes:
            return used_bytes, None, True
        draft: TempFile | None = None
        failures = 0
        stop = self.evictions + most
        try:
            for _ in range(_EXAMINED_MAX):
                if used_bytes <= target_bytes or self.evictions == stop:
                    break
                victim = self._index.victim()
                if victim is None:
                    return used_bytes, draft, False
                there = self._stat_or_forget(victim)
                freed_bytes = 0 if there is None else charge_bytes(there.st_size)
                if freed_bytes > used_bytes:
                    return used_bytes, draft, False  # the file grew after it was counted, so the count is wrong
                if there is None or self._index.spare(victim, there.st_mtime_ns):
                    continue
                is_last = used_bytes - freed_bytes <= target_bytes
                try:
                    draft = self._evict(victim, there, wanted if is_last else None, used_bytes)
                except OSError:
                    failures += 1
                    if failures == _UNLINK_FAILURES_MAX:
                        raise
                    self._index.postpone(victim)
                else:
                    used_bytes -= freed_bytes
        finally:
            self._cap_file.write(used_bytes + (draft.reserved_bytes if draft is not None else 0))
        return used_bytes, draft, True

    def _stat_or_forget(self, name: ObjectName) -> os.stat_result | None:
        there = self._paths.stat_object(name)
        if there is None:
            self._index.forget(name)
        return there

    def _evict(
        self, victim: ObjectName, there: os.stat_result, wanted: tuple[int, bool] | None, used_bytes: int
    ) -> TempFile | None:
        """Evict `victim`, by reusing its file as the `wanted` temporary file or by unlinking it."""
        draft = None
        with self._paths.fan(victim) as fan:
            if wanted is not None:
                # A temporary file counts from its rename on, so the larger size is counted first.
                self._cap_file.write(used_bytes + max(0, wanted[0] - charge_bytes(there.st_size)))
                draft = self._recycle(victim.hex(), fan, there.st_size, *wanted)
            if draft is None:
                os.unlink(victim.hex(), dir_fd=fan)
        self._index.forget(victim)
        self.evictions += 1
        return draft

    def _recycle(self, name: str, fan: int, size_bytes: int, charge: int, direct_io: bool) -> TempFile | None:  # noqa: FBT001
        """Reuse the object's file as a temporary file. Return None if it is being read or has another hard link.

        Overwriting is two to four times as fast as unlink and create, which allocate an inode and blocks. Readers lock
        the file, so no reader sees new bytes under the old name.
        """
        descriptor, status = open_file(name, os.O_WRONLY | (os.O_DIRECT if direct_io else 0), fan)
        if status.st_nlink > 1:  # the other link may lie outside the store
            os.close(descriptor)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _LOCKED_BY_OTHERS:
                return None
            raise
        try:
            draft = self._temp_files.adopt(name, fan, descriptor, charge, min(size_bytes, charge))
            if size_bytes > charge:
                os.ftruncate(descriptor, charge)
        except OSError:
            os.close(descriptor)
            raise
        return draft

    def _count(self) -> int:
        """Return the number of bytes in use."""
        used_bytes = self._cap_file.read()
        # A count above the cap comes from a higher cap or is damaged, so it alone is no reason to evict.
        if used_bytes is None or (used_bytes > self._capacity_bytes and self._may_recount()):
            return self._recount()
        return used_bytes

    def _may_recount(self) -> bool:
        """Return whether enough time has passed since the last recount."""
        return time.monotonic() >= self._count_again_s

    def _recount(self) -> int:
        """Index and count all files, while none can appear. Return the number of bytes in use."""
        self._temp_files.clear_stale(is_alone=False)
        used_bytes, oversized = self._index_files()
        for name in oversized:  # such as planted sparse files
            self._paths.remove_object(name)
        if oversized:
            logger.warning(
                "%d files in %s were larger than the cap of %d bytes and were removed; the first was %s",
                len(oversized), self._paths.objects, self._capacity_bytes, oversized[0].hex(),
            )  # fmt: skip
        # A file that reserves more than the cap was planted.
        used_bytes += sum(it for it in reserved(self._paths.temp_files) if it <= self._capacity_bytes)
        self._cap_file.write(used_bytes)
        self._count_again_s = self._walk_again_s
        return used_bytes

    def _release(self, freed_bytes: int) -> None:
        """Subtract `freed_bytes` from the count after a file was removed."""
        if freed_bytes == 0:
            return
        used_bytes = self._cap_file.read()
        if used_bytes is None or used_bytes < freed_bytes:  # changed by another program
            self._recount()
        else:
            self._cap_file.write(used_bytes - freed_bytes)

    def _retry_removal(self) -> None:
        while self._undeleted:
            self._release(self._temp_files.remove(self._undeleted[-1]))
            self._undeleted.pop()
