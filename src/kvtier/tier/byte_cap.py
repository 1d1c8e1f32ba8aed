"""The hard byte cap of a directory store: reserve bytes, evict to make space, release bytes.

Every method takes the cap file's lock. Only this module creates and removes files under objects' names.
"""

import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

from kvtier.errors import TierError
from kvtier.tier.base import About
from kvtier.tier.cap_file import CapFile
from kvtier.tier.directory_index import DirectoryIndex
from kvtier.tier.effective_cap import EffectiveCap, is_full_error
from kvtier.tier.safe_open import open_file, set_aside
from kvtier.tier.store_paths import Found, Paths, charge_bytes, stat_in, walk
from kvtier.tier.temp_files import TempFile, TempFiles, reserved
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)

_SHRINK_BYTES = 1 << 30
"""Bytes evicted per hold of the lock when a store is opened with a lower cap."""
_UNLINK_FAILURES_MAX = 8
_FOREIGN_SHARE = 16
"""The directory is walked when more than 1/16 of the cap is held by objects missing from the index."""
_WALK_EVERY = 100
"""Shortest time between two walks, in multiples of a walk's duration: walking takes 1 % of the time at most."""
_LOCKED_BY_OTHERS = {errno.EWOULDBLOCK, errno.EACCES}


class ByteCap:
    """The bytes of one store.

    Args:
        paths: of the store.
        capacity_bytes: the configured cap.
        effective_cap: the cap while the file system is full.
        cap_file: the byte count and the lock.
        index: indexed objects and their eviction order.
        temp_files: this process's temporary files.
        on_replaced: called under the lock when the directory was replaced, as by a remount. Operations fail until it
            succeeds.
    """

    def __init__(
        self,
        paths: Paths,
        capacity_bytes: int,
        effective_cap: EffectiveCap,
        cap_file: CapFile,
        index: DirectoryIndex,
        temp_files: TempFiles,
        on_replaced: Callable[[], None],
    ) -> None:
        self._paths = paths
        self._capacity_bytes = capacity_bytes
        self._effective_cap = effective_cap
        self._cap_file = cap_file
        self._index = index
        self._temp_files = temp_files
        self._on_replaced = on_replaced
        self._undeleted: list[TempFile] = []  # removal failed, to be retried
        self._is_replaced = False
        self._walking = threading.Lock()
        self._walk_again_s = 0.0
        self._count_again_s = 0.0
        self.evictions = 0

    def recover(self, *, is_alone: bool) -> None:
        """Remove temporary files of dead processes, and lock this owner's lock file.

        With the store to itself (`is_alone`) the process also recounts; otherwise it does when it needs space.
        """
        with self._locked():
            # A killed process may have counted bytes that it never wrote.
            if self._temp_files.clear_stale() or is_alone:
                self._recount()
            self._temp_files.attach()

    def shrink(self) -> None:
        """Evict down to the cap, which may be lower than before. In steps, so that others get the lock between."""
        while True:
            with self._locked():
                used_bytes = self._count()
                if used_bytes <= self._capacity_bytes:
                    return
                target_bytes = max(self._capacity_bytes, used_bytes - _SHRINK_BYTES)
                used_bytes, _ = self._evict_down(used_bytes, target_bytes, None)
                if used_bytes > target_bytes:
                    return  # the rest is being written

    def reserve(self, charge: int, *, direct_io: bool) -> TempFile | None:
        """A temporary file with `charge` bytes reserved; None when there is no space."""
        self._index_foreign_objects(charge)
        with self._locked():
            self._retry_removal()
            used_bytes = self._count()
            target_bytes = self._effective_cap.allows(used_bytes) - charge
            if target_bytes < 0:
                return None
            if used_bytes > target_bytes:
                most = 1 if self._effective_cap.is_reduced else None  # the next write may fail, too
                used_bytes, draft = self._evict_down(used_bytes, target_bytes, (charge, direct_io), most)
                if draft is not None or used_bytes > target_bytes:
                    return draft
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
                self._rename(draft, name.hex(), fan)
            else:
                self._release(self._temp_files.remove(draft))
            held = there or written
            self._index.add(name, held.st_size, held.st_mtime_ns, about)

    def discard(self, draft: TempFile, error: BaseException | None = None) -> None:
        """Remove a temporary file and release its bytes, now or under the next lock. Raises nothing.

        When `error` is ENOSPC or EDQUOT, the cap becomes the bytes held.
        """
        try:
            with self._locked():
                self._release(self._temp_files.remove(draft))
                if is_full_error(error):
                    self._effective_cap.record_full(self._count(), error)
        except (TierError, OSError):
            self._undeleted.append(draft)

    def remove(self, name: ObjectName) -> None:
        """Remove the object's file, if it exists."""
        with self._locked():
            there = self._paths.remove_object(name)
            if there is not None:
                self._release(charge_bytes(there.st_size))
            self._index.forget(name)

    def usable(self, status: os.stat_result | None) -> os.stat_result | None:
        """`status`, or None for a file larger than the cap, which cannot be an object."""
        return None if status is None or charge_bytes(status.st_size) > self._capacity_bytes else status

    def close(self) -> None:
        """Remove this process's temporary files and lock file, as far as possible. Raises nothing."""
        with suppress(TierError, OSError), self._locked():
            self._retry_removal()
            self._temp_files.detach()

    def _index_foreign_objects(self, charge: int) -> None:
        """Index objects of other processes when they hold much and space is needed; else only ours would be evicted.

        Without the lock: changes during the walk are detected on use.
        """
        used_bytes = self._cap_file.peek()
        foreign_bytes = used_bytes - self._index.known_bytes
        limit_bytes = self._effective_cap.now_bytes
        if used_bytes + charge <= limit_bytes or foreign_bytes <= limit_bytes // _FOREIGN_SHARE:
            return
        if time.monotonic() < self._walk_again_s or not self._walking.acquire(blocking=False):
            return
        try:
            start_s = time.monotonic()
            self._index.add_missing(list(walk(self._paths)))
            self._walk_again_s = time.monotonic() + max(1.0, _WALK_EVERY * (time.monotonic() - start_s))
        finally:
            self._walking.release()

    @contextmanager
    def _locked(self) -> Generator[None]:
        with self._cap_file.locked() as is_replaced:
            self._is_replaced |= is_replaced
            if self._is_replaced:
                self._on_replaced()
                self._is_replaced = False
            yield

    # Below here the lock is held.

    def _evict_down(
        self, used_bytes: int, target_bytes: int, wanted: tuple[int, bool] | None, most: int | None = None
    ) -> tuple[int, TempFile | None]:
        """Evict up to `most` objects, until at most `target_bytes` are used. Returns the bytes used then.

        With `wanted` (charge, direct I/O), the last victim's file may be reused as that temporary file.
        """
        stop = None if most is None else self.evictions + most
        used_bytes, draft = self._evict_known(used_bytes, target_bytes, wanted, stop)
        if used_bytes > target_bytes and self.evictions != stop:
            # The index is empty: other processes wrote the rest, or a crash left the count too high.
            used_bytes, draft = self._evict_known(self._recount(), target_bytes, wanted, stop)
        return used_bytes, draft

    def _evict_known(
        self, used_bytes: int, target_bytes: int, wanted: tuple[int, bool] | None, stop: int | None
    ) -> tuple[int, TempFile | None]:
        draft: TempFile | None = None
        failures = 0
        try:
            # Each name comes up at most twice: once spared for a use by another process, then removed.
            for _ in range(2 * len(self._index) + _UNLINK_FAILURES_MAX):
                is_over = used_bytes <= target_bytes or self.evictions == stop
                victim = None if is_over else self._index.victim()
                if victim is None:
                    break
                there = self._paths.stat_object(victim)
                if there is None:
                    self._index.forget(victim)
                    continue
                freed_bytes = charge_bytes(there.st_size)
                if freed_bytes > used_bytes:
                    break  # the file grew after it was counted: the count is wrong
                if self._index.spare(victim, there.st_mtime_ns):
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
        return used_bytes, draft

    def _evict(
        self, victim: ObjectName, there: os.stat_result, wanted: tuple[int, bool] | None, used_bytes: int
    ) -> TempFile | None:
        """Evict `victim`: reuse its file as the `wanted` temporary file, or unlink it."""
        draft = None
        with self._paths.fan(victim) as fan:
            if wanted is not None:
                # A temporary file counts from its rename on, so a larger one is counted first.
                self._cap_file.write(used_bytes + max(0, wanted[0] - charge_bytes(there.st_size)))
                draft = self._recycle(victim.hex(), fan, there.st_size, *wanted)
            if draft is None:
                os.unlink(victim.hex(), dir_fd=fan)
        self._index.forget(victim)
        self.evictions += 1
        return draft

    def _recycle(self, name: str, fan: int, size_bytes: int, charge: int, direct_io: bool) -> TempFile | None:  # noqa: FBT001
        """Reuse the object's file as a temporary file; None when it is being read or has another hard link.

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
            draft = self._temp_files.adopt(name, fan, descriptor, charge)
            if size_bytes > charge:
                os.ftruncate(descriptor, charge)
        except OSError:
            os.close(descriptor)
            raise
        return draft

    def _rename(self, draft: TempFile, name: str, fan: int) -> None:
        try:
            self._temp_files.publish(draft, name, fan)
        except IsADirectoryError:
            set_aside(name, fan)
            self._temp_files.publish(draft, name, fan)

    def _count(self) -> int:
        used_bytes = self._cap_file.read()
        # A count above the cap is from a higher cap, or damaged: it alone evicts nothing.
        if used_bytes is None or (used_bytes > self._capacity_bytes and time.monotonic() >= self._count_again_s):
            return self._recount()
        return used_bytes

    def _recount(self) -> int:
        """Count and index all files. Exact, because names change only under the lock."""
        start_s = time.monotonic()
        found = list(walk(self._paths))
        self._count_again_s = time.monotonic() + max(1.0, _WALK_EVERY * (time.monotonic() - start_s))
        oversized = [file for file in found if charge_bytes(file.size_bytes) > self._capacity_bytes]
        if oversized:
            found = [file for file in found if charge_bytes(file.size_bytes) <= self._capacity_bytes]
            self._remove_oversized(oversized)
        self._index.replace(found)
        self._temp_files.clear_stale()
        used_bytes = sum(reserved(self._paths.temp_files)) + sum(charge_bytes(file.size_bytes) for file in found)
        self._cap_file.write(used_bytes)
        return used_bytes

    def _release(self, freed_bytes: int) -> None:
        """Subtract `freed_bytes`, after the file was removed."""
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

    def _remove_oversized(self, found: list[Found]) -> None:
        """Remove files larger than the cap, such as planted sparse files."""
        for file in found:
            self._paths.remove_object(file.name)
        logger.warning(
            "%d files in %s were larger than the cap of %d bytes and were removed, the first: %s",
            len(found), self._paths.objects, self._capacity_bytes, found[0].name.hex(),
        )  # fmt: skip
