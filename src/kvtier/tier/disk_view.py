"""Read-only view of a disk store's index, for tools. Takes no lock."""

import os
import stat
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT
from kvtier.tier.disk_files import SEGMENTS_NAME, segment_files
from kvtier.tier.disk_format import Entries
from kvtier.tier.disk_marker import ALLOWED, Marker, marker_in
from kvtier.tier.disk_segment import Segment, file_name
from kvtier.tier.safe_open import directory_at, folder_at, open_file


class StoredObject(NamedTuple):
    """One object of the index."""

    name: bytes
    root: Path
    """Root of its store."""
    number: int
    """Number of its segment."""
    offset: int
    size_bytes: int
    begun_s: float
    """Start time of its segment, seconds since 1970."""

    @contextmanager
    def path_opened(self) -> Generator[Callable[[int], bytes]]:
        """Yields a function that reads the frame's first bytes.

        Raises:
            OSError: the segment cannot be read.
        """
        with segments_at(self.root) as folder:
            descriptor, _ = open_file(file_name(self.number), os.O_RDONLY, folder)
        try:
            yield lambda byte_count: os.pread(descriptor, byte_count, self.offset)
        finally:
            os.posix_fadvise(descriptor, self.offset, self.size_bytes, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    @property
    def path(self) -> str:
        """Path of its segment file."""
        return str(self.root / SEGMENTS_NAME / file_name(self.number))


@contextmanager
def segments_at(root: Path) -> Generator[int]:
    """A descriptor of the segments' directory of the store at `root`.

    Raises:
        OSError: it is missing, a link, or cannot be opened.
    """
    with folder_at(root) as top, directory_at(SEGMENTS_NAME, top, is_listed=True) as folder:
        yield folder


def read_marker(root: Path) -> Marker | None:
    """The marker as by `marker_in`; None also when `root` does not exist.

    Raises:
        UnknownStoreError: the store is of an unknown version.
        OSError: it cannot be read.
    """
    try:
        with folder_at(root) as folder:
            return marker_in(folder, root)
    except (FileNotFoundError, NotADirectoryError):
        return None


def census(root: Path) -> list[StoredObject]:
    """Every object in the index of the store at `root`, sorted by name.

    Raises:
        ConfigError: there is no disk store of a known version.
        OSError: a segment cannot be read.
    """
    marker = read_marker(root)
    if marker is None:
        raise ConfigError(f"{root} holds no disk store of a known version; allowed: {ALLOWED}")
    loaded: list[tuple[int, int, Entries]] = []
    with suppress(FileNotFoundError, NotADirectoryError), segments_at(root) as folder:
        for number, status in segment_files(folder):
            if status.st_size != marker.segment_bytes or not stat.S_ISREG(status.st_mode):
                continue
            with closing(Segment(folder, number, direct_io=False, read_only=True)) as segment:
                entries = segment.load(marker.store_id)
                if not isinstance(entries, str):
                    loaded.append((segment.generation, number, entries))
    found: dict[bytes, StoredObject] = {}
    for generation, number, entries in sorted(loaded, key=lambda item: item[0]):
        packed = np.ascontiguousarray(entries["name"]).tobytes()
        places = zip(entries["block"].tolist(), entries["size_bytes"].tolist(), strict=True)
        for at, (block, size_bytes) in enumerate(places):
            name = packed[32 * at : 32 * at + 32]
            found[name] = StoredObject(name, root, number, block * ALIGNMENT, size_bytes, generation / 1e9)
    return sorted(found.values())
