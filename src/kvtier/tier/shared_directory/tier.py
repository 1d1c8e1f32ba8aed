"""Keeps one file per object in a directory that many nodes share, on a network file system. Operations take no lock.

root/kvtier-store.json                       marker, whose version differs from that of a store of one machine
root/usage/                                  claims and the record of the last sweep, see `claims`
root/<key id>/<model id>/<2 hex>/<64 hex>    one object; temporary files lie in the same directory

An object is written under a temporary name, synced and renamed. So a reader sees a whole object or none. Frame
verification turns anything else into a miss.
"""

# This code uses descriptors, because it runs once per object.
# ruff: noqa: PTH208

import errno
import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from heapq import nlargest
from pathlib import Path

from kvtier.tier.base import About, Figures, OneByOneTier, within
from kvtier.tier.files.direct import DirectIo, forget_cached, is_aligned, read_part, write_all
from kvtier.tier.files.directory_marker import SHARED_VERSION
from kvtier.tier.files.file_per_object import FileTier
from kvtier.tier.files.full_disk import is_full_error
from kvtier.tier.files.safe_open import VANISHED, SuppressErrno, directory_at, open_file, rename_file
from kvtier.tier.files.store_paths import charge_bytes, stat_in, walk
from kvtier.tier.shared_directory.claimed_cap import TAKE_WAIT_S, SharedCap
from kvtier.tier.shared_directory.sweep import ID
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)


class SharedDirectoryTier(FileTier, OneByOneTier):
    """Keeps frames as files below `root`, written by any number of nodes.

    Args:
        root: the directory, the same for all nodes, created if missing. A directory with foreign files is refused.
        key_id: 16 bytes that identify the secret (`keys.secret.key_id`).
        model: 16 bytes that identify the model (`keys.secret.model_id`).
        capacity_bytes: cap for the objects of all key ids and models and for temporary files, each rounded up to
            4 KiB. The lowest cap holds if nodes have different ones. `claims` describes how precisely it is kept.
        name: the tier's name in metrics and errors.
        direct_io: "auto" uses direct I/O where the file system supports it, "on" requires it, "off" disables it.
        wait_s: how long a write waits for room before it is dropped.
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
        key_id: bytes,
        model: bytes,
        capacity_bytes: int,
        name: str = "shared_directory",
        direct_io: DirectIo = "off",
        wait_s: float = TAKE_WAIT_S,
        any_owner: bool = False,
    ) -> None:
        key = key_id.hex()
        super().__init__(root, name, capacity_bytes, f"{key}/{model.hex()}", any_owner=any_owner)
        self._owner = os.urandom(8).hex()
        self._numbers = itertools.count()
        with self._opening(SHARED_VERSION):
            if is_on_drive(self.root):
                logger.warning(
                    "tier %s: %s is on a drive of this machine, which other nodes do not see; is the file system "
                    "mounted?",
                    name,
                    self.root,
                )
            _warn_foreign(name, self.root, key)
            self._paths.make_objects()
            self._choose_direct(self._paths.objects, direct_io)
        self._cap = SharedCap(str(self.root), name, self._effective_cap, capacity_bytes, self._touch, wait_s)

    def figures(self) -> Figures:
        """Return the current figures. The used bytes are an upper bound for all nodes at this node's last count."""
        return Figures(self._cap.used_bytes, self.limit_bytes, self._cap.evictions, direct_io=self.direct_io)

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return for each name whether its file exists, with one round trip each.

        Raises:
            TierError: the file system fails, or the store's marker is gone.
        """
        with self._operation("look for objects"):
            os.lstat(self._paths.marker)
            there = {name for name, status in self._paths.stat_objects(names) if status.st_size > 0}
            return [name in there for name in names]

    def newest(self, most: int, until_s: float) -> list[ObjectName]:
        """Return at most `most` names, newest first.

        The order is by mtime, among the files that a walk finds in time.
        """
        with self._operation("list the newest"):
            files = nlargest(most, within(until_s, walk(self._paths)), key=lambda file: file.mtime_ns)
            return [ObjectName(file.name) for file in files]

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read the frame from `offset` into `into`. Return None if it is absent or vanishes meanwhile."""
        return self._read(name, into, offset, is_use=True)

    def peek_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read the start of one frame, without counting as a use."""
        return self._read(name, into, offset, is_use=False)

    def _read(self, name: ObjectName, into: memoryview, offset: int, *, is_use: bool) -> int | None:
        with self._operation("read", name):
            view = into.cast("B")
            is_direct = self.direct_io and is_aligned(view, offset)
            with self._paths.found_fan(name) as fan:
                if fan is None:
                    return None
                try:
                    return self._read_in(fan, name, view, offset, is_direct=is_direct, is_use=is_use)
                except OSError as error:
                    if not self._is_gone(error, fan, name):
                        raise
                    return None

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:  # noqa: ARG002 - age decides
        """Write `frame` under `name`. Return whether the name now exists.

        The result is False if the frame is larger than the cap, or no room was found in time.
        """
        with self._operation("write", name):
            charge = charge_bytes(frame.nbytes)
            if charge > self.capacity_bytes:
                return False
            with self._paths.fan(name) as fan:
                there = stat_in(fan, name)
                if there is not None and there.st_size > 0:
                    self._cap.used(name, there.st_mtime_ns)
                    return True
                if not self._cap.take(charge):
                    return False
                try:
                    return self._publish(name, frame.cast("B"), fan)
                except OSError as error:
                    if is_full_error(error):
                        self._effective_cap.record_full(max(0, self._cap.used_bytes - charge), error)
                    raise
                finally:
                    self._cap.finish(charge)

    def delete(self, name: ObjectName) -> None:
        """Delete `name` and its file. Its bytes count until the next sweep."""
        with self._operation("delete", name), self._paths.found_fan(name) as fan, SuppressErrno(VANISHED):
            if fan is not None:
                os.unlink(name.hex(), dir_fd=fan)

    def _end(self) -> None:
        self._cap.close()

    def _read_in(
        self, fan: int, name: ObjectName, view: memoryview, offset: int, *, is_direct: bool, is_use: bool
    ) -> int | None:
        descriptor, status = open_file(name.hex(), os.O_RDONLY | (os.O_DIRECT if is_direct else 0), fan)
        try:
            count = read_part(descriptor, view, offset)
            if count < view.nbytes and os.fstat(descriptor).st_size > offset + count:  # the cached size was too small
                count += read_part(descriptor, view[count:], offset + count)
            if not is_direct:
                forget_cached(descriptor, offset, count)
        finally:
            os.close(descriptor)
        if status.st_size == 0 and count == 0:
            return None  # its writer's machine failed before the bytes arrived
        if is_use:
            self._cap.used(name, status.st_mtime_ns)
        return count

    def _is_gone(self, error: OSError, fan: int, name: ObjectName) -> bool:
        """Return whether `error` came from a file that another node removed, and not from the storage.

        Raises:
            OSError: the store is gone.
        """
        if error.errno == errno.EIO:  # some file systems give this error for the bytes of a removed file
            return stat_in(fan, name) is None
        if error.errno == errno.ESTALE:
            os.lstat(self._paths.marker)
        return error.errno in VANISHED

    def _publish(self, name: ObjectName, frame: memoryview, fan: int) -> bool:
        """Write the object's file. Return False if a sweep mistook the temporary file for a dead writer's."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | (os.O_DIRECT if self.direct_io and is_aligned(frame, 0) else 0)
        draft, spelled = f"draft_{self._owner}_{next(self._numbers)}", name.hex()
        descriptor, _ = open_file(draft, flags, fan)
        try:
            try:
                write_all(descriptor, frame, is_sized=True)
                # Otherwise a reader elsewhere would wait until this node has sent the bytes, forever if it is gone.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            rename_file(draft, spelled, fan, fan)
        except FileNotFoundError:
            return False
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=fan)
            raise
        self._share_use(spelled, fan)
        return True

    def _share_use(self, spelled: str, fan: int) -> None:
        """Open the object once for reading.

        CephFS lets a writer keep exclusive use of its closed file. Readers then need an answer from the writer's node,
        which may be gone. Opening the file for reading makes the use shared.
        """
        with suppress(OSError):
            os.close(open_file(spelled, os.O_RDONLY, fan)[0])

    def _touch(self, name: ObjectName) -> None:
        with self._paths.found_fan(name) as fan, SuppressErrno(VANISHED):
            if fan is not None:
                os.utime(name.hex(), dir_fd=fan, follow_symlinks=False)


def is_on_drive(path: Path) -> bool:
    """Return whether `path` is on a drive of this machine; a network file system has no device."""
    return os.major(path.stat().st_dev) != 0


def _warn_foreign(tier: str, root: Path, key: str) -> None:
    """Warn if the store has only other secrets' objects: the other nodes probably use another secret."""
    with directory_at(str(root), is_listed=True) as directory:
        keys = {name for name in os.listdir(directory) if ID.fullmatch(name)}
    if keys and key not in keys:
        logger.warning(
            "tier %s: %s has objects of %d other secrets and none of this one: nodes share objects only when their "
            "secrets are equal",
            tier,
            root,
            len(keys),
        )
