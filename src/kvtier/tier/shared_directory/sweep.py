"""The walk through a shared directory that counts its bytes, evicts its oldest objects and removes dead writers' files.

Any node may sweep at any time. Two concurrent sweeps choose the same victims, because both order by mtime.
"""

# This code uses descriptors and plain strings, because it runs once per object.
# ruff: noqa: PTH208

import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvtier.tier.files.safe_open import VANISHED, SuppressErrno, directory_at
from kvtier.tier.files.store_paths import NAME_BYTES, OBJECT, Paths, charge_bytes

TEMP_AGE_NS = 900 * 10**9
"""A temporary file that was not written to for this long belongs to a dead writer."""

OBJECTS_MAX = 1 << 22
"""Maximum number of objects among which a sweep chooses victims, in 200 MB of memory. All objects are counted."""

ID = re.compile(r"[0-9a-f]{32}")
"""Name of a key id's directory, or of a model id's directory in it."""
TEMP_FILE = re.compile(r"draft_[0-9a-f]{16}_[0-9]{1,20}")
"""Name of a temporary file, with its owner and number."""


def _ids(name: str, directory: int | None = None) -> list[str]:
    """List the directories of ids in the directory `name`; none if it is gone."""
    with SuppressErrno(VANISHED), directory_at(name, directory, is_listed=True) as listed:
        return sorted(filter(ID.fullmatch, os.listdir(listed)))
    return []


def stored_roots(root: str) -> list[tuple[str, str]]:
    """Return the key id and model id of each directory of objects in the store at `root`.

    Raises:
        OSError: the file system fails.
    """
    with directory_at(root, is_listed=True) as top:
        return [(key_id, model) for key_id in _ids(".", top) for model in _ids(key_id, top)]


class Swept(NamedTuple):
    """The result of a sweep."""

    used_bytes: int
    """Bytes of the remaining objects and temporary files."""
    evictions: int
    removed_drafts: int


class StoppedError(Exception):
    """The sweep ended early because its tier is closing."""


class Sweep:
    """One sweep of the store at `root`.

    Args:
        root: root of the store, with a directory per key id.
        now_ns: time on the store's clock.
        object_bytes_max: size above which a file is not an object and is removed.
        is_stopping: called before each file; True ends the sweep.
    """

    def __init__(self, root: str, now_ns: int, object_bytes_max: int, is_stopping: Callable[[], bool]) -> None:
        self._root = root
        self._now_ns = now_ns
        self._object_bytes_max = object_bytes_max
        self._is_stopping = is_stopping
        self._used_bytes: int = 0
        self._removed_drafts: int = 0
        # Each object takes 48 bytes for mtime, charge and name. `_roots` has the position of the first object below
        # each root.
        self._mtimes: array[int] = array("q")
        self._charges: array[int] = array("q")
        self._names = bytearray()
        self._roots: list[tuple[int, Paths]] = []

    def run(self, target_bytes: int, limit_bytes: int) -> Swept:
        """Count the store. Evict the oldest objects down to `target_bytes` if it has more than `limit_bytes`.

        Raises:
            OSError: the file system fails.
            StoppedError: `is_stopping` returned True.
        """
        for key_id, model in stored_roots(self._root):
            self._count(Paths(self._root, f"{key_id}/{model}"))
        evictions = self._evict(target_bytes) if self._used_bytes > limit_bytes else 0
        return Swept(self._used_bytes, evictions, self._removed_drafts)

    def _count(self, paths: Paths) -> None:
        self._roots.append((len(self._mtimes), paths))
        for prefix, fan, name, status in paths.files():
            if self._is_stopping():
                raise StoppedError
            is_object = OBJECT.fullmatch(name) is not None and name.startswith(prefix)
            if is_object or TEMP_FILE.fullmatch(name):
                self._enter(fan, name, status, is_object=is_object)

    def _enter(self, fan: int, name: str, status: os.stat_result, *, is_object: bool) -> None:
        charge = charge_bytes(status.st_size)
        # CephFS shows zero while another node creates the file. A future time would never be the oldest.
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

    def _evict(self, target_bytes: int) -> int:
        """Evict the oldest objects until `target_bytes` are in use. Return their number."""
        if not self._mtimes:
            return 0
        charges = np.frombuffer(self._charges, np.int64)
        oldest = np.argsort(np.frombuffer(self._mtimes, np.int64), kind="stable")
        enough = int(np.searchsorted(np.cumsum(charges[oldest]), self._used_bytes - target_bytes)) + 1
        victims: list[int] = sorted(oldest[:enough].tolist())
        starts = [start for start, _ in self._roots]
        for position, together in groupby(victims, lambda victim: bisect_right(starts, victim) - 1):
            names = [bytes(self._names[NAME_BYTES * at : NAME_BYTES * (at + 1)]) for at in together]
            for name, fan in self._roots[position][1].each(names):
                if self._is_stopping():
                    raise StoppedError
                with SuppressErrno(VANISHED):  # another node may have removed it
                    os.unlink(name.hex(), dir_fd=fan)
        self._used_bytes -= int(charges[victims].sum())
        return len(victims)
