"""What `directory` and `shared_directory` share: a root, its marker, a file per object. They differ in the cap."""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.tier.base import OneByOneTier
from kvtier.tier.direct import DirectIo, choose_direct
from kvtier.tier.directory_marker import ALLOWED, open_store
from kvtier.tier.safe_open import check_private, directory_at
from kvtier.tier.store_paths import Paths, walk
from kvtier.tier.store_root import opening
from kvtier.tier.store_tier import CLOSE_DEADLINE_S, StoreTier
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)


class FileTier(StoreTier, OneByOneTier):
    """Base of tiers that keep a file per object below `root`.

    Args:
        root: of the store.
        name: the tier's name in metrics and errors.
        capacity_bytes: the configured cap.
        objects: the directory of the objects, relative to `root`.
        any_owner: see `StoreTier`.
    """

    def __init__(
        self, root: str | Path, name: str, capacity_bytes: int, objects: str = "objects", *, any_owner: bool = False
    ) -> None:
        super().__init__(root, name, capacity_bytes, any_owner=any_owner)
        self._paths = Paths(str(self.root), objects)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read the frame from `offset` into `into`; None when absent, also when it vanishes meanwhile."""
        return self._read(name, into, offset, is_use=True)

    def peek_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """See `Tier`."""
        return self._read(name, into, offset, is_use=False)

    def _read(self, name: ObjectName, into: memoryview, offset: int, *, is_use: bool) -> int | None:
        """`read_one` or `peek_one`."""
        raise NotImplementedError

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Every (name, frame bytes) in the objects' directory, of all processes and nodes."""
        with self._operation("scan"):
            return iter([(ObjectName(found.name), found.size_bytes) for found in walk(self._paths)])

    def close(self) -> None:
        """Wait for running operations, then end what the store needs while it is open. Idempotent."""
        if not self._guard.close():
            return
        if not self._guard.wait_empty(CLOSE_DEADLINE_S):
            logger.warning("tier %s: closed while an operation ran for over %s s", self.name, CLOSE_DEADLINE_S)
        self._end()

    def _end(self) -> None:
        """Publish what others should know, and release all resources."""
        raise NotImplementedError

    @contextmanager
    def _opening(self, version: int) -> Generator[None]:
        """Find or make the store of this version, and translate errors while it is opened; see `opening`."""
        with opening(self.name, self.root, ALLOWED):
            if self.root.exists():
                check_private(self.name, self.root, any_owner=self._any_owner)
            self.marker = open_store(self.root, version)
            yield

    def _choose_direct(self, directory: str, direct_io: DirectIo) -> None:
        """Try direct I/O out in `directory`, see `choose_direct`."""
        with directory_at(directory) as place:
            self.direct_io = choose_direct(self.name, directory, direct_io, place)
