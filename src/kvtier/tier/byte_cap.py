"""ByteCap in a store's directory: reserving it, making it by eviction, giving it back. The hard cap is kept here.

Every method takes the ledger's lock. A file appears under an object's name, or goes from there, nowhere else.
"""

# Descriptors and plain strings on paths that run once per object.

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
"""What is evicted under one hold of the lock when a store is opened with a lower cap."""
_UNLINK_FAILURES_MAX = 8
_STRANGERS_SHARE = 16
"""When more than this fraction (one in 16) of the cap is held by objects that we do not know of, we look for them."""
_WALK_EVERY = 100
"""A walk is repeated after this many times its own duration at the earliest, so that it costs one per cent at most."""
_LOCKED_BY_OTHERS = {errno.EWOULDBLOCK, errno.EACCES}


class ByteCap:
    """The bytes of one store.

    Args:
        paths: where the store lies.
        capacity_bytes: the cap.
        found: less than that while the file system is full.
        ledger: the count and the lock.
        index: who is there, and who should go.
        drafts: this process's drafts.
        replaced: called under the lock when the directory was replaced, as when a disk came back; until it succeeds,
            nothing else is done.
    """

    def __init__(
        self,
        paths: Paths,
        capacity_bytes: int,
        found: EffectiveCap,
        ledger: CapFile,
        index: DirectoryIndex,
        drafts: TempFiles,
        replaced: Callable[[], None],
    ) -> None:
        self._paths = paths
        self._capacity_bytes = capacity_bytes
        self._effective_cap = found
        self._cap_file = ledger
        self._index = index
        self._temp_files = drafts
        self._replaced = replaced
        self._left: list[TempFile] = []  # drafts that could not be removed when they should have been
        self._is_replaced = False
        self._walking = threading.Lock()
        self._walk_again_s = 0.0
        self._count_again_s = 0.0
        self.evictions = 0

    def settle(self, *, is_alone: bool) -> None:
        """Clear away what dead processes left, and say that this one lives.

        Who `is_alone` in the store also takes over exactly what is there; others do so later, when they need room.
        """
        with self._locked():
            # A process that died may have counted bytes that it never wrote.
            if self._temp_files.clear_stale() or is_alone:
                self._recount()
            self._temp_files.attach()

    def shrink(self) -> None:
        """Evict what is above the cap, which may be lower than the last time. In steps: others get their turn."""
        while True:
            with self._locked():
                used_bytes = self._count()
                if used_bytes <= self._capacity_bytes:
                    return
                target_bytes = max(self._capacity_bytes, used_bytes - _SHRINK_BYTES)
                used_bytes, _ = self._evict_down(used_bytes, target_bytes, None)
                if used_bytes > target_bytes:
                    return  # the rest is being written; its writers will find no room to come back to

    def reserve(self, charge: int, *, direct_io: bool) -> TempFile | None:
        """A draft with `charge` bytes counted for it; None when there is no room."""
        self._meet_strangers(charge)
        with self._locked():
            self._remove_left()
            used_bytes = self._count()
            target_bytes = self._effective_cap.allows(used_bytes) - charge
            if target_bytes < 0:
                return None
            if used_bytes > target_bytes:
                most = 1 if self._effective_cap.is_reduced else None  # the next write may find no room either
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
        """Give the finished `draft` its name; when another writer was faster, that one's file stays."""
        with self._locked(), self._paths.fan(name) as fan:
            there = self.usable(stat_in(fan, name))
            if there is None:
                self._give_name(draft, name.hex(), fan)
            else:
                self._give_back(self._temp_files.remove(draft))
            held = there or written
            self._index.learn(name, held.st_size, held.st_mtime_ns, about)

    def discard(self, draft: TempFile, error: BaseException | None = None) -> None:
        """Remove a draft and give its bytes back: now, or when the lock can next be had. Raises nothing.

        When `error` is that of a full file system, the cap becomes what is held.
        """
        try:
            with self._locked():
                self._give_back(self._temp_files.remove(draft))
                if is_full_error(error):
                    self._effective_cap.record_full(self._count(), error)
        except (TierError, OSError):
            self._left.append(draft)

    def remove(self, name: ObjectName) -> None:
        """Remove the object's file, if it is there."""
        with self._locked():
            there = self._paths.remove_object(name)
            if there is not None:
                self._give_back(charge_bytes(there.st_size))
            self._index.forget(name)

    def usable(self, status: os.stat_result | None) -> os.stat_result | None:
        """`status` of an object's file, or None where the file is larger than the cap and so cannot be an object."""
        return None if status is None or charge_bytes(status.st_size) > self._capacity_bytes else status

    def leave(self) -> None:
        """Remove what this process has left behind, as far as possible. Raises nothing."""
        with suppress(TierError, OSError), self._locked():
            self._remove_left()
            self._temp_files.detach()

    def _meet_strangers(self, charge: int) -> None:
        """Learn what other processes have written, if that is much and there is no room: or we would only evict ours.

        Without the lock: what comes or goes meanwhile is found out when it is used.
        """
        used_bytes = self._cap_file.peek()
        strange_bytes = used_bytes - self._index.known_bytes
        limit_bytes = self._effective_cap.now_bytes
        if used_bytes + charge <= limit_bytes or strange_bytes <= limit_bytes // _STRANGERS_SHARE:
            return
        if time.monotonic() < self._walk_again_s or not self._walking.acquire(blocking=False):
            return
        try:
            start_s = time.monotonic()
            self._index.meet(list(walk(self._paths.objects)))
            self._walk_again_s = time.monotonic() + max(1.0, _WALK_EVERY * (time.monotonic() - start_s))
        finally:
            self._walking.release()

    @contextmanager
    def _locked(self) -> Generator[None]:
        with self._cap_file.locked() as is_replaced:
            self._is_replaced |= is_replaced
            if self._is_replaced:
                self._replaced()
                self._is_replaced = False
            yield

    # Below here the lock is held.

    def _evict_down(
        self, used_bytes: int, target_bytes: int, wanted: tuple[int, bool] | None, most: int | None = None
    ) -> tuple[int, TempFile | None]:
        """Evict, `most` objects at most, until at most `target_bytes` are used; what is used then, without the draft.

        With `wanted` (the charge of a draft, and whether for direct I/O), the last victim's file may become that draft.
        """
        stop = None if most is None else self.evictions + most
        used_bytes, draft = self._evict_known(used_bytes, target_bytes, wanted, stop)
        if used_bytes > target_bytes and self.evictions != stop:
            # Nothing that we know of is left: others wrote what is there, or the count is too high after a crash.
            used_bytes, draft = self._evict_known(self._recount(), target_bytes, wanted, stop)
        return used_bytes, draft

    def _evict_known(
        self, used_bytes: int, target_bytes: int, wanted: tuple[int, bool] | None, stop: int | None
    ) -> tuple[int, TempFile | None]:
        draft: TempFile | None = None
        failures = 0
        try:
            # Each name comes up twice at most: spared once for a use by another process, then removed.
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
                    break  # the file has grown since it was counted, so the count is wrong
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
        """Take `victim`'s name away; its file becomes the `wanted` draft, or goes."""
        draft = None
        with self._paths.fan(victim) as fan:
            if wanted is not None:
                # A draft counts by its name as soon as it has one, so a larger one is counted before.
                self._cap_file.write(used_bytes + max(0, wanted[0] - charge_bytes(there.st_size)))
                draft = self._recycle(victim.hex(), fan, there.st_size, *wanted)
            if draft is None:
                os.unlink(victim.hex(), dir_fd=fan)
        self._index.forget(victim)
        self.evictions += 1
        return draft

    def _recycle(self, name: str, fan: int, size_bytes: int, charge: int, direct_io: bool) -> TempFile | None:  # noqa: FBT001
        """Turn the object's file into a draft; None when it is being read, or has another name.

        Writing over a file is two to four times as fast as removing one and making another: no inode and no blocks have
        to be found. Readers lock the file while they read, so none ever sees the new bytes under the old name.
        """
        descriptor, status = open_file(name, os.O_WRONLY | (os.O_DIRECT if direct_io else 0), fan)
        if status.st_nlink > 1:  # the file has another name, perhaps outside, and is not written to
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
            draft = self._temp_files.take(name, fan, descriptor, charge)
            if size_bytes > charge:
                os.ftruncate(descriptor, charge)
        except OSError:
            os.close(descriptor)
            raise
        return draft

    def _give_name(self, draft: TempFile, name: str, fan: int) -> None:
        try:
            self._temp_files.give(draft, name, fan)
        except IsADirectoryError:
            set_aside(name, fan)
            self._temp_files.give(draft, name, fan)

    def _count(self) -> int:
        used_bytes = self._cap_file.read()
        # A count above the cap is of a time with a higher cap, or damaged: nothing is evicted for it alone.
        if used_bytes is None or (used_bytes > self._capacity_bytes and time.monotonic() >= self._count_again_s):
            return self._recount()
        return used_bytes

    def _recount(self) -> int:
        """Count what is there and learn its names. Exact, because nothing comes or goes while we hold the lock."""
        start_s = time.monotonic()
        found = list(walk(self._paths.objects))
        self._count_again_s = time.monotonic() + max(1.0, _WALK_EVERY * (time.monotonic() - start_s))
        oversized = [file for file in found if charge_bytes(file.size_bytes) > self._capacity_bytes]
        if oversized:
            found = [file for file in found if charge_bytes(file.size_bytes) <= self._capacity_bytes]
            self._remove_oversized(oversized)
        self._index.correct(found)
        self._temp_files.clear_stale()
        used_bytes = sum(reserved(self._paths.drafts)) + sum(charge_bytes(file.size_bytes) for file in found)
        self._cap_file.write(used_bytes)
        return used_bytes

    def _give_back(self, freed_bytes: int) -> None:
        """Count `freed_bytes` less, after the file is gone."""
        if freed_bytes == 0:
            return
        used_bytes = self._cap_file.read()
        if used_bytes is None or used_bytes < freed_bytes:  # files or ledger were changed by other means
            self._recount()
        else:
            self._cap_file.write(used_bytes - freed_bytes)

    def _remove_left(self) -> None:
        while self._left:
            self._give_back(self._temp_files.remove(self._left[-1]))
            self._left.pop()

    def _remove_oversized(self, found: list[Found]) -> None:
        """Remove files that are larger than all objects together may be: a sparse file has any length."""
        for file in found:
            self._paths.remove_object(file.name)
        logger.warning(
            "%d files in %s were larger than the cap of %d bytes and were removed, the first: %s",
            len(found), self._paths.objects, self._capacity_bytes, found[0].name.hex(),
        )  # fmt: skip
