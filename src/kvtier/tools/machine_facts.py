"""Reads facts about this machine that limit I/O: mounts, memory, swap, limits of cgroups, locked memory and GPUs."""

import os
import re
import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvtier.config.machine_checks import memory_bytes
from kvtier.device.control_groups import levels, text_of

MOUNTINFO = Path("/proc/self/mountinfo")

MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "hugetlbfs"})
NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "virtiofs"}
)

_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.portal"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


CAP_IPC_LOCK = 14
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")
"""Device nodes of the NVIDIA and AMD drivers."""


class Mount(NamedTuple):
    """One mounted file system."""

    point: str
    kind: str
    """File system type, such as ``ext4`` or ``nfs4``."""
    source: str
    options: frozenset[str]
    """Options of the mount and of the file system, each as ``key`` or ``key=value``."""
    device: str
    """``major:minor``, with major 0 if there is no block device."""

    @property
    def is_memory(self) -> bool:
        """Whether the file system keeps its content in host memory."""
        return self.kind in MEMORY_KINDS

    @property
    def is_network(self) -> bool:
        """Whether this is a network file system."""
        return self.kind in NETWORK_KINDS or (self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE)


def parse_mounts(text: str) -> list[Mount]:
    """Parse the valid lines of a mountinfo file, in order. A later mount at the same point hides an earlier one.

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
    """Return the mount of `path`, an absolute path without symbolic links."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    longest = max((len(mount.point) for mount in above), default=0)
    return next((mount for mount in reversed(above) if len(mount.point) == longest), None)


def read_mounts(path: Path = MOUNTINFO) -> list[Mount]:
    """Return the current mounts, or none if the kernel does not list them."""
    return parse_mounts(text_of(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the machine. None means unknown."""

    mounts: tuple[Mount, ...] = ()
    memory_bytes: int
    memory_available_bytes: int | None = None
    swap_used_bytes: int = 0
    memlock_bytes: int | None = None
    """Limit on this process's page-locked memory; None means no limit."""
    cores: int = 1
    """Cores in this process's affinity mask."""
    load: float | None = None
    """Runnable and disk-waiting processes, averaged over a minute."""
    has_gpu: bool = False
    huge_pages: str | None = None
    """The kernel's setting for transparent huge pages: ``always``, ``madvise`` or ``never``."""
    io_limits: Mapping[str, str] = field(default_factory=dict[str, str])
    """The I/O limits of this process's control group, by drive (``major:minor``)."""
    drives: Mapping[str, str] = field(default_factory=dict[str, str])
    """The whole drive of each mounted device, both as ``major:minor``."""

    def io_limit(self, device: str) -> str | None:
        """Return the I/O limit of a mounted `device` or its whole drive; None without a limit."""
        return self.io_limits.get(device) or self.io_limits.get(self.drives.get(device, ""))


def read_facts() -> Facts:
    """Read the facts about this machine."""
    mounts, load = read_mounts(), text_of(Path("/proc/loadavg"))
    meminfo = parse_meminfo(text_of(Path("/proc/meminfo")))
    drives = {mount.device: whole_drive(mount.device) for mount in mounts if not mount.device.startswith("0:")}
    return Facts(
        mounts=tuple(mounts),
        memory_bytes=memory_bytes(),
        memory_available_bytes=meminfo.get("MemAvailable"),
        swap_used_bytes=meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0),
        memlock_bytes=_memlock_bytes(),
        cores=len(os.sched_getaffinity(0)),
        load=float(load.split()[0]) if load else None,
        has_gpu=any(Path(node).exists() for node in GPU_NODES),
        huge_pages=parse_choice(text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        io_limits=_io_limits(),
        drives=drives,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Parse /proc/meminfo into bytes by name."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def parse_choice(text: str) -> str | None:
    """Return the selected word of a line such as ``always [madvise] never``."""
    _, opened, rest = text.partition("[")
    word, closed, _ = rest.partition("]")
    return word if opened and closed else None


def parse_io_max(text: str) -> dict[str, str]:
    """Parse io.max of a version 2 control group into limits by device."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        device, _, rest = line.partition(" ")
        limits = [limit for limit in rest.split() if not limit.endswith("=max")]
        if limits:
            found[device] = " ".join(limits)
    return found


def parse_throttle(name: str, text: str) -> dict[str, str]:
    """Parse a blkio.throttle file of a version 1 control group into limits by device."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: f"{name}={row[1]}" for row in rows if len(row) == 2}


def _io_limits() -> dict[str, str]:
    """Return the I/O limits of this process's control group and its ancestors, by device.

    In version 2 the innermost limits of a device replace the others; in version 1 all of them are listed.
    """
    found: dict[str, str] = {}
    for folder, is_version_2 in reversed([*levels("blkio")]):
        if is_version_2:
            found |= parse_io_max(text_of(folder / "io.max"))
            continue
        for name, file in (("rbps", "read_bps_device"), ("wbps", "write_bps_device")):
            limits = parse_throttle(name, text_of(folder / f"blkio.throttle.{file}"))
            found |= {device: f"{found.get(device, '')} {limit}".strip() for device, limit in limits.items()}
    return found


def whole_drive(device: str) -> str:
    """Return the drive of a partition, both as ``major:minor``. Any other device is its own drive."""
    place = Path("/sys/dev/block") / device
    if not (place / "partition").exists():
        return device
    return text_of(place.resolve().parent / "dev").strip() or device


def _memlock_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _has_ipc_lock(text_of(Path("/proc/self/status"))):
        return None
    return limit


def _has_ipc_lock(status: str) -> bool:
    """Return whether the process has CAP_IPC_LOCK, which lifts the limit on page-locked memory."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return os.geteuid() == 0


def _plain(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
