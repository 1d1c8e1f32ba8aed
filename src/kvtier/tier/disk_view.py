"""What the index of a disk store tells, for tools that look from outside: no lock, nothing written."""

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


class Stored(NamedTuple):
    """One object that the index names."""

    name: bytes
    root: Path
    """Of its store."""
    number: int
    """Of its segment."""
    offset: int
    size_bytes: int
    begun_s: float
    """When its segment was begun, seconds since 1970."""

    @contextmanager
    def path_opened(self) -> Generator[Callable[[int], bytes]]:
        """Gives a function that reads the frame's first bytes.

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
        """Of its segment."""
        return str(self.root / SEGMENTS_NAME / file_name(self.number))


@contextmanager
def segments_at(root: Path) -> Generator[int]:
    """The descriptor of the directory of segments in the store at `root`.

    Raises:
        OSError: there is none (a link to one is none), or it cannot be opened.
    """
    with folder_at(root) as top, directory_at(SEGMENTS_NAME, top, is_listed=True) as folder:
        yield folder


def read_marker(root: Path) -> Marker | None:
    """See `marker_in`; None also when there is no such directory.

    Raises:
        UnknownStoreError: the store is of an unknown version.
        OSError: it cannot be read.
    """
    try:
        with folder_at(root) as folder:
            return marker_in(folder, root)
    except (FileNotFoundError, NotADirectoryError):
        return None


def census(root: Path) -> list[Stored]:
    """Every object that the index of the store at `root` names, by name.

    Raises:
        ConfigError: there is no store that is known here.
        OSError: a segment cannot be read.
    """
    marker = read_marker(root)
    if marker is None:
        raise ConfigError(f"{root} holds no disk store that is known here; allowed: {ALLOWED}")
    loaded: list[tuple[int, int, Entries]] = []
    with suppress(FileNotFoundError, NotADirectoryError), segments_at(root) as folder:
        for number, status in segment_files(folder):
            if status.st_size != marker.segment_bytes or not stat.S_ISREG(status.st_mode):
                continue
            with closing(Segment(folder, number, direct_io=False, read_only=True)) as segment:
                entries = segment.load(marker.store_id)
                if not isinstance(entries, str):
                    loaded.append((segment.generation, number, entries))
    found: dict[bytes, Stored] = {}
    for generation, number, entries in sorted(loaded, key=lambda told: told[0]):
        packed = np.ascontiguousarray(entries["name"]).tobytes()
        places = zip(entries["block"].tolist(), entries["size_bytes"].tolist(), strict=True)
        for at, (block, size_bytes) in enumerate(places):
            name = packed[32 * at : 32 * at + 32]
            found[name] = Stored(name, root, number, block * ALIGNMENT, size_bytes, generation / 1e9)
    return sorted(found.values())
