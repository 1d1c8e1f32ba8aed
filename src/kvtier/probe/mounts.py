"""What is mounted where, from the kernel's own list."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")

MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "virtiofs"}
)

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of the list."""

    point: str
    kind: str
    """File system type, such as ``ext4`` or ``nfs4``."""
    source: str
    options: frozenset[str]
    """Of the mount and of the file system, ``key`` or ``key=value``."""
    device: str
    """``major:minor``; 0 as major for what has no device."""

    @property
    def is_memory(self) -> bool:
        """Whether what is kept there is kept in host memory."""
        return self.kind in MEMORY_KINDS

    @property
    def is_network(self) -> bool:
        """Whether another machine keeps it, as far as the kind tells."""
        return self.kind in NETWORK_KINDS or (self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE)


_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.portal"})


def parse_mounts(text: str) -> list[Mount]:
    """The lines of a mountinfo that can be understood, in order; a later one at the same point hides an earlier.

    Format: proc_pid_mountinfo(5): ``id parent major:minor root point options [tags] - kind source super-options``.
    """
    found: list[Mount] = []
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        fields, more = left.split(" "), right.split(" ")
        if not dash or len(fields) < 6 or len(more) < 2:
            continue
        options = frozenset(",".join([fields[5], *more[2:3]]).split(","))
        found.append(Mount(_plain(fields[4]), more[0], _plain(more[1]), options, fields[2]))
    return found


def mount_of(path: Path, mounts: Iterable[Mount]) -> Mount | None:
    """The mount that `path` (absolute, without symbolic links) lies on."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    longest = max((len(mount.point) for mount in above), default=0)
    return next((mount for mount in reversed(above) if len(mount.point) == longest), None)


def read_mounts(path: Path = MOUNTINFO) -> list[Mount]:
    """What is mounted now; empty where the system does not tell."""
    try:
        return parse_mounts(path.read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError:
        return []


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
