"""The base of tiers that keep a store in a directory: the root, the current cap, and the guard of each operation."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import NoRoomError, TierError
from kvtier.tier.base import Tier
from kvtier.tier.files.full_disk import FULL, EffectiveCap, is_full_error
from kvtier.tier.operation_guard import OperationGuard
from kvtier.types import ObjectName

CLOSE_DEADLINE_S = 10.0
"""How long closing waits for running operations."""


class FileSystemTier(Tier):
    """Base of tiers that keep files.

    Args:
        root: root of the store.
        name: the tier's name in metrics and errors.
        capacity_bytes: the configured cap.
        any_owner: as in `path_checks.FileTierSettings`.
    """

    def __init__(self, root: str | Path, name: str, capacity_bytes: int, *, any_owner: bool = False) -> None:
        super().__init__(name)
        self._any_owner = any_owner
        self.capacity_bytes = capacity_bytes
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - does not follow links
        self.direct_io = False
        """Whether direct I/O is used for aligned buffers."""
        self._guard = OperationGuard(name)
        self._effective_cap = EffectiveCap(name, capacity_bytes)

    @property
    def limit_bytes(self) -> int:
        """The current cap, which is below `capacity_bytes` after the file system was full."""
        return self._effective_cap.now_bytes

    @contextmanager
    def _operation(self, what: str, name: ObjectName | None = None) -> Generator[None]:
        """Run the `with` block while the tier is open. An OSError becomes a TierError."""
        with self._guard:
            try:
                yield
            except OSError as error:
                raise self._failed(what, name, error) from error

    def _failed(self, what: str, name: ObjectName | None, error: OSError) -> TierError:
        """Make the error for an operation that failed."""
        subject = "" if name is None else f" object {name.hex()[:12]}"
        detail = f"cannot {what}{subject}: {error}"
        if not is_full_error(error):
            return TierError(self.name, detail)
        return NoRoomError(self.name, f"{detail}; {FULL}" if self._effective_cap.is_reduced else detail)
