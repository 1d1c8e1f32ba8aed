"""Inspection and repair of stores, from outside the process that uses them."""

from pathlib import Path

from kvtier.inspection.directory import DirectoryStore
from kvtier.inspection.disk import DiskStore, is_disk
from kvtier.inspection.inspector import StoreInspector


def open_store(root: Path) -> StoreInspector:
    """The inspector of the store at `root`.

    Raises:
        ConfigError: `root` has no store of a known version.
    """
    return DiskStore(root) if is_disk(root) else DirectoryStore(root)
