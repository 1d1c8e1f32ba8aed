"""What the index of a disk store tells, for tools that look from outside: no lock, nothing written."""

import os
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT
from kvtier.tier.disk_format import Entries
from kvtier.tier.disk_marker import ALLOWED, SEGMENTS_NAME, read_marker
from kvtier.tier.disk_segment import Segment


class Stored(NamedTuple):
    """One object that the index names."""

    name: bytes
    path: str
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
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield lambda byte_count: os.pread(descriptor, byte_count, self.offset)
        finally:
            os.posix_fadvise(descriptor, self.offset, self.size_bytes, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def census(root: Path) -> list[Stored]:
    """Every object that the index of the store at `root` names, by name.

    Raises:
        ConfigError: there is no store that is known here.
        OSError: a segment cannot be read.
    """
    marker = read_marker(root)
    if marker is None:
        raise ConfigError(f"{root} holds no disk store that is known here; allowed: {ALLOWED}")
    loaded: list[tuple[int, str, Entries]] = []
    for path in sorted((root / SEGMENTS_NAME).glob("*.segment")):
        if path.stat().st_size != marker.segment_bytes:
            continue
        with closing(Segment(str(path), 0, marker.segment_bytes, direct_io=False, read_only=True)) as segment:
            entries = segment.load(marker.store_id)
            if not isinstance(entries, str):
                loaded.append((segment.generation, str(path), entries))
    found: dict[bytes, Stored] = {}
    for generation, path, entries in sorted(loaded, key=lambda told: told[0]):
        packed = np.ascontiguousarray(entries["name"]).tobytes()
        places = zip(entries["block"].tolist(), entries["size_bytes"].tolist(), strict=True)
        for at, (block, size_bytes) in enumerate(places):
            name = packed[32 * at : 32 * at + 32]
            found[name] = Stored(name, path, block * ALIGNMENT, size_bytes, generation / 1e9)
    return sorted(found.values())
