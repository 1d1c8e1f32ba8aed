"""Where a store's files lie, and the walk through them.

root/kvtier-store.json        marker: this is a store of ours
root/ledger                   bytes in use, and the lock under which names come and go
root/index                    hint for fast starts
root/drafts/                  what is being written, and whose it is
root/objects/<2 hex>/<64 hex> one file per object, named by the object's name
"""

# Plain strings and `os` instead of `pathlib`: these functions run once per object, and a walk through 100,000 files
# must take well under a second.
# ruff: noqa: PTH102, PTH112, PTH118

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.layout import ALIGNMENT, align_up

NAME_BYTES = 32


class Found(NamedTuple):
    """One object's file, as the walk sees it."""

    name: bytes
    size_bytes: int
    mtime_ns: int


class Paths:
    """The paths of the store at `root`, as strings."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.ledger = os.path.join(root, "ledger")
        self.hint = os.path.join(root, "index")
        self.drafts = os.path.join(root, "drafts")
        self.objects = os.path.join(root, "objects")

    def object(self, name: bytes) -> str:
        """Where the object `name` lies, if it is there."""
        spelled = name.hex()
        return f"{self.objects}/{spelled[:2]}/{spelled}"

    def make(self) -> None:
        """Make the directories that are missing, mode 0700.

        Raises:
            OSError: they cannot be made.
        """
        for path in (self.drafts, self.objects):
            make_directory(path)


def make_directory(path: str) -> None:
    """Make one directory, mode 0700; fine when it is there. Its parent must exist.

    Raises:
        OSError: it cannot be made, or is something else.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise


def charge_bytes(size_bytes: int) -> int:
    """What a file of `size_bytes` counts against the cap: whole blocks of 4 KiB, and one at least."""
    return max(align_up(size_bytes), ALIGNMENT)


def walk(objects: str) -> Iterator[Found]:
    """Every object under the directory `objects`; files that vanish meanwhile and files that are not ours are left out.

    Raises:
        OSError: the device or the file system fails.
    """
    for prefix in _listed(objects):
        if len(prefix.name) != 2:
            continue
        for entry in _listed(prefix.path):
            spelled = entry.name
            if len(spelled) != 2 * NAME_BYTES or spelled[:2] != prefix.name:
                continue
            try:
                name = bytes.fromhex(spelled)
                told = entry.stat(follow_symlinks=False)
            except (ValueError, FileNotFoundError):
                continue
            if stat.S_ISREG(told.st_mode) and name.hex() == spelled:
                yield Found(name, told.st_size, told.st_mtime_ns)


def _listed(path: str) -> Iterator["os.DirEntry[str]"]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
