"""The walk through a shared directory that counts its bytes, evicts its oldest objects and removes dead writers' files.

Any node may sweep at any time. Two sweeps at once choose the same victims, because both order by mtime.
"""

# Descriptors and plain strings: this code runs once per object.
# ruff: noqa: PTH208

import errno
import os
import re
import stat
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvtier.tier.safe_open import MISSING, directory_at, open_directory
from kvtier.tier.store_paths import NAME_BYTES, charge_bytes

TEMP_AGE_NS = 900 * 10**9
"""A temporary file that was not written for this long belongs to a dead writer."""

OBJECTS_MAX = 1 << 22
"""Most objects among which a sweep chooses its victims: 200 MB of memory. All are counted."""

ID = re.compile(r"[0-9a-f]{32}")
"""Directory of a key id, or of a fingerprint in it."""
TEMP_FILE = re.compile(r"draft_[0-9a-f]{16}_[0-9]{1,20}")
"""A temporary file: owner and number."""
_FAN = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"[0-9a-f]{64}")
_GONE = MISSING | {errno.ESTALE}


def stored_roots(root: str) -> list[tuple[str, str]]:
    """(key id, fingerprint) of each directory of objects in the store at `root`.

    Raises:
        OSError: the file system fails.
    """
    with directory_at(root, is_listed=True) as top:
        ids = sorted(filter(ID.fullmatch, os.listdir(top)))
        return [(key_id, model) for key_id in ids for model in sorted(filter(ID.fullmatch, _listed(top, key_id)))]


class Swept(NamedTuple):
    """What a sweep found and did."""

    used_bytes: int
    """Bytes of objects and temporary files that are left."""
    evictions: int
    removed_drafts: int


class StoppedError(Exception):
    """The sweep ended early because its tier is closing."""


class Sweep:
    """One sweep of the store at `root`.

    Args:
        root: of the store, with a directory per key id.
        now_ns: the time by the store's clock.
        object_bytes_max: longer files are not objects and are removed.
        is_stopping: asked before each directory; True ends the sweep.
    """

    def __init__(self, root: str, now_ns: int, object_bytes_max: int, is_stopping: Callable[[], bool]) -> None:
        self._root = root
        self._now_ns = now_ns
        self._object_bytes_max = object_bytes_max
        self._is_stopping = is_stopping
        self._used_bytes: int = 0
        self._removed_drafts: int = 0
        # 48 bytes per object: mtime, charge, and its name; `_fans` has the position of the first one in each directory.
        self._mtimes: array[int] = array("q")
        self._charges: array[int] = array("q")
        self._names = bytearray()
        self._fans: list[tuple[int, tuple[str, str, str]]] = []

    def run(self, target_bytes: int, limit_bytes: int) -> Swept:
        """Count the store; when it holds more than `limit_bytes`, evict the oldest objects down to `target_bytes`.

        Raises:
            OSError: the file system fails.
            StoppedError: `is_stopping`.
        """
        with directory_at(self._root, is_listed=True) as root:
            for path in self._directories(root):
                self._count(root, path)
            evictions = self._evict(root, target_bytes) if self._used_bytes > limit_bytes else 0
        return Swept(self._used_bytes, evictions, self._removed_drafts)

    def _directories(self, root: int) -> Iterator[tuple[str, str, str]]:
        """(key id, fingerprint, fan) of every directory of objects."""
        for key_id in filter(ID.fullmatch, os.listdir(root)):
            for fingerprint in filter(ID.fullmatch, _listed(root, key_id)):
                for fan in filter(_FAN.fullmatch, _listed(root, key_id, fingerprint)):
                    yield key_id, fingerprint, fan

    def _count(self, root: int, path: tuple[str, str, str]) -> None:
        if self._is_stopping():
            raise StoppedError
        fan = _opened(root, *path, is_listed=True)
        if fan is None:
            return
        self._fans.append((len(self._mtimes), path))
        try:
            with os.scandir(fan) as entries:
                for entry in entries:
                    is_object = _OBJECT.fullmatch(entry.name) is not None and entry.name[:2] == path[2]
                    if not is_object and not TEMP_FILE.fullmatch(entry.name):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError as error:
                        if error.errno not in _GONE:
                            raise
                        continue
                    if stat.S_ISREG(status.st_mode):
                        self._enter(fan, entry.name, status, is_object=is_object)
        finally:
            os.close(fan)

    def _enter(self, fan: int, name: str, status: os.stat_result, *, is_object: bool) -> None:
        charge = charge_bytes(status.st_size)
        # CephFS shows zero while another node creates the file. A time in the future would never be the oldest.
        mtime_ns = min(status.st_mtime_ns or self._now_ns, self._now_ns)
        is_dead = not is_object and mtime_ns < self._now_ns - TEMP_AGE_NS
        if is_dead or charge > self._object_bytes_max:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fan)
            self._removed_drafts += is_dead
            return
        self._used_bytes += charge
        if is_object and len(self._mtimes) < OBJECTS_MAX:
            self._mtimes.append(mtime_ns)
            self._charges.append(charge)
            self._names += bytes.fromhex(name)

    def _evict(self, root: int, target_bytes: int) -> int:
        """Evict the oldest objects until `target_bytes` are used. Returns their number."""
        if not self._mtimes:
            return 0
        charges = np.frombuffer(self._charges, np.int64)
        oldest = np.argsort(np.frombuffer(self._mtimes, np.int64), kind="stable")
        enough = int(np.searchsorted(np.cumsum(charges[oldest]), self._used_bytes - target_bytes)) + 1
        victims: list[int] = sorted(oldest[:enough].tolist())
        starts = [start for start, _ in self._fans]
        for position, together in groupby(victims, lambda victim: bisect_right(starts, victim) - 1):
            if self._is_stopping():
                raise StoppedError
            fan = _opened(root, *self._fans[position][1])
            if fan is None:
                continue
            try:
                for victim in together:
                    _unlink(self._names[victim * NAME_BYTES : (victim + 1) * NAME_BYTES].hex(), fan)
            finally:
                os.close(fan)
        self._used_bytes -= int(charges[victims].sum())
        return len(victims)


def _unlink(name: str, fan: int) -> None:
    """Remove an object; another node may have done it."""
    try:
        os.unlink(name, dir_fd=fan)
    except OSError as error:
        if error.errno not in _GONE:
            raise


def _listed(root: int, *path: str) -> list[str]:
    """Names in a directory below `root`; none when it is gone."""
    directory = _opened(root, *path, is_listed=True)
    if directory is None:
        return []
    try:
        return os.listdir(directory)
    finally:
        os.close(directory)


def _opened(root: int, *path: str, is_listed: bool = False) -> int | None:
    """A descriptor of the directory below `root`, without following links; None when it is gone."""
    directory = root
    for depth, name in enumerate(path, 1):
        try:
            inner = open_directory(name, directory, is_listed=is_listed and depth == len(path))
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return None
        finally:
            if directory != root:
                os.close(directory)
        directory = inner
    return directory
