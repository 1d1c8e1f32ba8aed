"""The base of `directory` and `shared_directory`, whose caps differ: a root with a marker, and a file per object."""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.tier.files.base import CLOSE_DEADLINE_S, FileSystemTier
from kvtier.tier.files.direct import DirectIo, choose_direct
from kvtier.tier.files.directory_marker import ALLOWED, open_store
from kvtier.tier.files.safe_open import check_private, directory_at
from kvtier.tier.files.store_paths import Paths, walk
from kvtier.tier.files.store_root import opening
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)


class FileTier(FileSystemTier):
    """Base of tiers that keep a file per object below `root`.

    Args:
        root: root of the store.
        name: the tier's name in metrics and errors.
        capacity_bytes: the configured cap.
        objects: the directory of the objects, relative to `root`.
        any_owner: as in `FileSystemTier`.
    """

    def __init__(
        self, root: str | Path, name: str, capacity_bytes: int, objects: str = "objects", *, any_owner: bool = False
    ) -> None:
        super().__init__(root, name, capacity_bytes, any_owner=any_owner)
        self._paths = Paths(str(self.root), objects)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Return the names and frame sizes of all files in the objects' directory, whoever wrote them."""
        with self._operation("scan"):
            return iter([(ObjectName(found.name), found.size_bytes) for found in walk(self._paths)])

    def close(self) -> None:
        """Wait for running operations, then release the store's resources. Idempotent."""
        if not self._guard.close():
            return
        if not self._guard.wait_empty(CLOSE_DEADLINE_S):
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
        self._end()

    def _end(self) -> None:
        """Publish pending information for other processes, and release all resources."""
        raise NotImplementedError

    @contextmanager
    def _opening(self, version: int) -> Generator[None]:
        """Find or make the store of this version, and translate errors while it is opened (`opening`)."""
        with opening(self.name, self.root, ALLOWED):
            if self.root.exists():
                check_private(self.name, self.root, any_owner=self._any_owner)
            self.marker = open_store(self.root, version)
            yield

    def _choose_direct(self, directory: str, direct_io: DirectIo) -> None:
        """Decide about direct I/O by a trial in `directory` (`choose_direct`)."""
        with directory_at(directory) as place:
            self.direct_io = choose_direct(self.name, directory, direct_io, place)
