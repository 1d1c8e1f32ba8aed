"""What `kvtier inspect` needs of a store: its objects, read from outside the process that uses it.

A kind of tier declares how to open its views (`TierKind.inspect`). Without that, a `ScannedTier` serves: any open tier.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvtier.errors import TierError
from kvtier.tier.base import Tier
from kvtier.tier.direct import forget_cached, read_part
from kvtier.types import ObjectName

UNBOUNDED_BYTES = 1 << 62
"""Cap of a tier that must not evict."""

LEFT_MAX = 100
"""Foreign files that a `Purge` names at most."""


class ObjectFile(NamedTuple):
    """Location of an object's frame."""

    name: bytes
    size_bytes: int
    used_s: float | None
    """Last known use, seconds since 1970; in a disk store the start of its segment. None: unknown."""
    path: str
    number: int = 0
    """Number of the segment, in a disk store."""
    offset: int = 0
    """Bytes from the start of the file."""
    store: int = 0
    """Number of the view, where several are inspected together."""


class Usage(NamedTuple):
    """Identity of a store, and what its own files record."""

    store_id: str
    version: int
    created: str
    charged_bytes: int
    open_in: int
    recorded_bytes: int | None = None
    capacity_bytes: int | None = None
    temp_files: int = 0
    temp_bytes: int = 0
    free_bytes: int | None = None
    """Free space of the file system; None: not in one."""


@dataclass(slots=True, kw_only=True)
class Purge:
    """Result of removing a store."""

    directory: str
    objects: int = 0
    bytes: int = 0
    """Sum of the objects."""
    is_emptied_only: bool = False
    """Other processes had the store open: its objects were removed, the store was not."""
    left: list[str] = field(default_factory=list[str])
    """Foreign files that were kept (the first hundred)."""


class ObjectReader(Protocol):
    """One opened object."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the frame, by what holds it."""
        ...

    def read(self, into: memoryview, offset: int = 0) -> int:
        """Read from `offset` of the frame; bytes read. Raises OSError."""
        ...


class StoreView(Protocol):
    """One store, from outside. Takes no lock and writes nothing, except in `opened_tier` and `purge`."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        ...

    def objects(self) -> list[ObjectFile]:
        """All objects, by name.

        Raises:
            ConfigError: the store's version is unknown.
            OSError: it cannot be read.
        """
        ...

    def usage(self) -> Usage:
        """Usage as the store itself records it."""
        ...

    def opened(self, stored: ObjectFile) -> AbstractContextManager[ObjectReader]:
        """The object, opened. Thread-safe.

        Raises:
            FileNotFoundError: the object disappeared.
            OSError: it cannot be opened.
        """
        ...

    def opened_tier(self) -> AbstractContextManager[Tier]:
        """The store, opened as a tier that evicts nothing, until the end of the block.

        Raises:
            ConfigError: it cannot be opened.
            TierError: another process has it open, and it is not shared.
        """
        ...

    def purge(self, *, force: bool) -> Purge:
        """Remove the store; the directory itself and foreign files are kept.

        Args:
            force: when other processes have a shared store open, remove its objects and keep the store.

        Raises:
            ConfigError: other processes have it open.
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
        """See `ObjectReader`."""
        return read_part(self._descriptor, into, self._offset + offset)

    def close(self) -> None:
        """Drop what was read from the page cache, and close the file."""
        forget_cached(self._descriptor, self._offset, self.size_bytes)
        os.close(self._descriptor)


class ScannedTier:
    """The view of an open tier of any kind, by its `scan` and `read`."""

    def __init__(self, tier: Tier, place: str) -> None:
        self._tier = tier
        self.place = place

    def objects(self) -> list[ObjectFile]:
        """See `StoreView`."""
        found = [ObjectFile(name, size_bytes, None, self.place) for name, size_bytes in self._tier.scan()]
        return sorted(found, key=lambda stored: stored.name)

    def usage(self) -> Usage:
        """See `StoreView`."""
        figures = self._tier.figures()
        used_bytes = figures.used_bytes
        held = sum(size_bytes for _, size_bytes in self._tier.scan()) if used_bytes is None else used_bytes
        return Usage("", 0, "", held, 1, used_bytes, figures.capacity_bytes)

    @contextmanager
    def opened(self, stored: ObjectFile) -> Generator[ObjectReader]:
        """See `StoreView`."""
        yield _TierReader(self._tier, stored)

    @contextmanager
    def opened_tier(self) -> Generator[Tier]:
        """See `StoreView`."""
        yield self._tier

    def purge(self, *, force: bool) -> Purge:  # noqa: ARG002 - the tier has no other users that it knows of
        """Delete every object."""
        result = Purge(directory=self.place)
        for name, size_bytes in list(self._tier.scan()):
            self._tier.delete(name)
            result.objects += 1
            result.bytes += size_bytes
        return result

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()


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
    """The sums of several stores."""
    if len(usages) == 1:
        return usages[0]

    def total(counts: Sequence[int | None]) -> int | None:
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    return Usage(
        ", ".join(it.store_id for it in usages),
        max(it.version for it in usages),
        min(it.created for it in usages),
        sum(it.charged_bytes for it in usages),
        sum(it.open_in for it in usages),
        total([it.recorded_bytes for it in usages]),
        total([it.capacity_bytes for it in usages]),
        sum(it.temp_files for it in usages),
        sum(it.temp_bytes for it in usages),
        min((it.free_bytes for it in usages if it.free_bytes is not None), default=None),
    )
