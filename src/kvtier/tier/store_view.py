"""The view of a store for `kvtier inspect`, which reads the objects from outside the process that uses the store.

A kind of tier may declare how to open its views (`TierKind.inspect`). Otherwise, a `ScannedTier` shows the open tier.
"""

import errno
import os
import re
import stat
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from kvtier.errors import TierError
from kvtier.tier.base import Tier
from kvtier.tier.files.direct import forget_cached, read_part
from kvtier.tier.files.safe_open import MISSING, SuppressErrno, directory_at
from kvtier.types import ObjectName

UNBOUNDED_BYTES = 1 << 62
"""Cap of a tier that must not evict."""

_DELETES = 16
"""Number of concurrent deletions in a purge."""

LEFT_MAX = 100
"""Maximum number of foreign files that a `Purge` names."""


class ObjectFile(NamedTuple):
    """Location of an object's frame."""

    name: bytes
    size_bytes: int
    used_s: float | None
    """Last known use, in seconds since 1970; in a disk store the start of its segment. None if unknown."""
    path: str
    number: int = 0
    """Number of the segment in a disk store."""
    offset: int = 0
    """Bytes from the start of the file."""
    store: int = 0
    """Number of the view, if several are inspected together."""
    model: str = ""
    """The model id in hexadecimal digits, if the object's location shows it; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Identity of a store, and the figures that its own files record."""

    store_id: str = ""
    version: int = 0
    created: str = ""
    charged_bytes: int = 0
    """Bytes counted against the cap: whole blocks of 4 KiB per object, or whole segments."""
    recorded_bytes: int | None = None
    """Bytes in use according to the cap file, including temporary files; None without a valid cap file."""
    capacity_bytes: int | None = None
    """The cap, if known."""
    temp_files: int = 0
    temp_bytes: int = 0
    """Bytes reserved by temporary files."""
    open_in: int | None = None
    """1 if a running process has the store open, 0 if none has, None if unknown. For several stores, the sum."""
    free_bytes: int | None = None
    """Free space of the file system; None if the store does not use one."""


@dataclass(slots=True, kw_only=True)
class Purge:
    """Result of removing a store."""

    directory: str
    objects: int = 0
    bytes: int = 0
    """Bytes of the removed objects."""
    is_emptied_only: bool = False
    """Whether only the objects were removed and not the store, because other processes had it open."""
    left: list[str] = field(default_factory=list[str])
    """The first hundred foreign files, which were kept."""


def remove_files(top: int, marker: str, files: re.Pattern[str], folders: re.Pattern[str], result: Purge) -> None:
    """Remove a store's files and the directories that become empty, and record everything else in `result`.

    Links are kept and never followed. The marker goes last, so that an interrupted purge can be repeated.

    Args:
        top: descriptor of the store's root.
        marker: name of the marker.
        files: paths of the store's files, relative to the root. Those below `objects/` are counted as objects.
        folders: paths of the store's directories.
        result: result of the purge, to be updated.

    Raises:
        OSError: a file cannot be removed; earlier ones are gone.
    """
    _remove_below(top, "", marker, files, folders, result)
    os.unlink(marker, dir_fd=top)


def _remove_below(
    folder: int, inside: str, marker: str, files: re.Pattern[str], folders: re.Pattern[str], result: Purge
) -> None:
    """Apply `remove_files` to the directory `inside`, open as `folder`. Foreign directories are not opened."""
    for name in sorted(os.listdir(folder)):
        path = f"{inside}/{name}" if inside else name
        with SuppressErrno(MISSING):  # a foreign file may vanish meanwhile
            status = os.lstat(name, dir_fd=folder)
            if stat.S_ISREG(status.st_mode) and files.fullmatch(path):
                os.unlink(name, dir_fd=folder)
                if path.startswith("objects/"):
                    result.objects += 1
                    result.bytes += status.st_size
            elif stat.S_ISDIR(status.st_mode) and folders.fullmatch(path):
                with directory_at(name, folder, is_listed=True) as below:
                    _remove_below(below, path, marker, files, folders, result)
                with SuppressErrno(frozenset({errno.ENOTEMPTY, errno.EEXIST})):
                    os.rmdir(name, dir_fd=folder)
            elif path != marker and len(result.left) < LEFT_MAX:
                result.left.append(path)


class ObjectReader(Protocol):
    """One opened object."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the frame, according to the store."""
        ...

    def read(self, into: memoryview, offset: int = 0) -> int:
        """Read from `offset` of the frame, and return the number of bytes read. Raises OSError."""
        ...


class Health(Protocol):
    """The health of a store, a dataclass whose fields form the JSON output."""

    directory: str

    @property
    def is_well(self) -> bool:
        """Whether the store has no problem at present."""
        ...

    def rows(self) -> Sequence[tuple[str, str]]:
        """Return the labels and values to show, as text."""
        ...


class StoreView(Protocol):
    """One store, seen from outside. It takes no lock and writes nothing, except in `opened_tier` and `purge`.

    A store that records its health also has a method ``health``, without arguments, which returns a `Health`.
    """

    @property
    def place(self) -> str:
        """The store's location, for people."""
        ...

    def objects(self) -> Iterable[ObjectFile]:
        """Yield all objects, each once.

        Raises:
            ConfigError: the store's version is unknown.
            OSError: the store cannot be read.
        """
        ...

    def usage(self) -> Usage:
        """Return the usage that the store itself records."""
        ...

    def opened(self, stored: ObjectFile) -> AbstractContextManager[ObjectReader]:
        """Open the object for the `with` block. Thread-safe.

        Raises:
            FileNotFoundError: the object no longer exists.
            OSError: the object cannot be opened.
        """
        ...

    def opened_tier(self) -> AbstractContextManager[Tier]:
        """Open the store for the `with` block, as a tier that evicts nothing.

        Raises:
            ConfigError: the store cannot be opened.
            TierError: another process has the store open, and it is not shared.
        """
        ...

    def purge(self, *, force: bool) -> Purge:
        """Remove the store; the directory itself and foreign files are kept.

        Args:
            force: if other processes have a shared store open, remove its objects and keep the store.

        Raises:
            ConfigError: other processes have the store open.
            OSError: a file cannot be removed; earlier ones are gone.
        """
        ...


class FileReader:
    """An `ObjectReader` of part of an open file."""

    def __init__(self, descriptor: int, size_bytes: int, offset: int = 0) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self.size_bytes = size_bytes

    def read(self, into: memoryview, offset: int = 0) -> int:
        """Read from `offset` of the frame, and return the number of bytes read."""
        return read_part(self._descriptor, into, self._offset + offset)

    def close(self) -> None:
        """Drop the bytes read from the page cache, and close the file."""
        forget_cached(self._descriptor, self._offset, self.size_bytes)
        os.close(self._descriptor)


class ScannedTier:
    """The view of an open tier of any kind, through its `scan` and `read`.

    Args:
        tier: the tier.
        place: the tier's location, for people.
        model: the model id of all its objects, in hexadecimal digits; empty if only the objects' headers show it.
    """

    def __init__(self, tier: Tier, place: str, model: str = "") -> None:
        self._tier = tier
        self.place = place
        self.model = model
        self._used_bytes = 0

    def objects(self) -> Iterator[ObjectFile]:
        """Yield all objects, each once."""
        self._used_bytes = 0
        for name, size_bytes in self._tier.scan():
            self._used_bytes += size_bytes
            yield ObjectFile(name, size_bytes, None, self.place, model=self.model)

    def usage(self) -> Usage:
        """Return the usage that the store records. The charged bytes are those that `objects` last counted."""
        figures = self._tier.figures()
        return Usage(
            charged_bytes=self._used_bytes,
            recorded_bytes=figures.used_bytes or None,
            capacity_bytes=figures.capacity_bytes,
        )

    @contextmanager
    def opened(self, stored: ObjectFile) -> Generator[ObjectReader]:
        """Open the object for the `with` block."""
        yield _TierReader(self._tier, stored)

    @contextmanager
    def opened_tier(self) -> Generator[Tier]:
        """Open the store for the `with` block, as a tier that evicts nothing."""
        yield self._tier

    def purge(self, *, force: bool) -> Purge:  # noqa: ARG002 - the tier knows of no other users
        """Delete every object that the tier lists. The store itself is kept."""
        result = Purge(directory=self.place, is_emptied_only=True)
        found = self._tier.scan()
        with ThreadPoolExecutor(_DELETES, thread_name_prefix="kvtier-purge") as pool:
            # Deleting in batches keeps an interrupt from waiting for all objects.
            while batch := list(islice(found, 16 * _DELETES)):
                list(pool.map(self._tier.delete, (name for name, _ in batch)))
                result.objects += len(batch)
                result.bytes += sum(size_bytes for _, size_bytes in batch)
        return result


class _TierReader:
    def __init__(self, tier: Tier, stored: ObjectFile) -> None:
        self._tier = tier
        self._name = ObjectName(stored.name)
        self.size_bytes = stored.size_bytes

    def read(self, into: memoryview, offset: int = 0) -> int:
        try:
            count = self._tier.read(self._name, into, offset)
        except TierError as error:
            raise OSError(None, error.detail) from error
        if count is None:
            raise FileNotFoundError(None, "does not exist", self._name.hex())
        return count


def merged(usages: Sequence[Usage]) -> Usage:
    """Add up the usage of several stores."""
    if len(usages) < 2:
        return usages[0] if usages else Usage(open_in=0)

    def total(counts: Sequence[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    return Usage(
        store_id=", ".join(dict.fromkeys(it.store_id for it in usages)),
        version=max(it.version for it in usages),
        created=min(it.created for it in usages),
        charged_bytes=sum(it.charged_bytes for it in usages),
        recorded_bytes=total([it.recorded_bytes for it in usages]),
        capacity_bytes=total([it.capacity_bytes for it in usages]),
        temp_files=sum(it.temp_files for it in usages),
        temp_bytes=sum(it.temp_bytes for it in usages),
        open_in=total([it.open_in for it in usages]),
        free_bytes=min((it.free_bytes for it in usages if it.free_bytes is not None), default=None),
    )
