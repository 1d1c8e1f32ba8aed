"""Facts of this machine that explain a speed or a failure, read from where the kernel tells them. Changes nothing."""

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config.machine import memory_bytes
from kvtier.probe.mounts import Mount, read_mounts

CAP_IPC_LOCK = 14
GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")
"""What the drivers of NVIDIA and AMD make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the machine; None where it does not tell."""

    mounts: tuple[Mount, ...] = ()
    memory_bytes: int
    memory_available_bytes: int | None = None
    swap_used_bytes: int = 0
    memlock_bytes: int | None = None
    """Most bytes that this process may page-lock; None: no limit."""
    cores: int = 1
    """That this process may run on."""
    load: float | None = None
    """Processes that wanted to run or waited for a disk, on average over a minute."""
    has_gpu: bool = False
    huge_pages: str | None = None
    """``always``, ``madvise`` or ``never``."""
    io_limits: Mapping[str, str] = field(default_factory=dict[str, str])
    """By ``major:minor`` of a drive: what this process's control group may move."""
    drives: Mapping[str, str] = field(default_factory=dict[str, str])
    """By ``major:minor`` of a mounted device: that of the whole drive."""

    def io_limit(self, device: str) -> str | None:
        """The limit on the drive of a mounted `device`."""
        return self.io_limits.get(device) or self.io_limits.get(self.drives.get(device, ""))


def read_facts() -> Facts:
    """Look around."""
    mounts = read_mounts()
    meminfo = parse_meminfo(_text(Path("/proc/meminfo")))
    drives = {mount.device: _whole_drive(mount.device) for mount in mounts if not mount.device.startswith("0:")}
    return Facts(
        mounts=tuple(mounts),
        memory_bytes=memory_bytes(),
        memory_available_bytes=meminfo.get("MemAvailable"),
        swap_used_bytes=meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0),
        memlock_bytes=_memlock_bytes(),
        cores=len(os.sched_getaffinity(0)),
        load=_load(),
        has_gpu=any(Path(node).exists() for node in GPU_NODES),
        huge_pages=parse_choice(_text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
        io_limits=_io_limits(),
        drives=drives,
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name, of /proc/meminfo."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[0].isdecimal() and words[1] == "kB":
            found[name] = int(words[0]) * 1024
    return found


def parse_choice(text: str) -> str | None:
    """The word in brackets, of a line such as ``always [madvise] never``."""
    _, opened, rest = text.partition("[")
    word, closed, _ = rest.partition("]")
    return word if opened and closed else None


def parse_io_max(text: str) -> dict[str, str]:
    """By device, what the io.max of a control group (version 2) limits."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        device, _, rest = line.partition(" ")
        limits = [limit for limit in rest.split() if not limit.endswith("=max")]
        if limits:
            found[device] = " ".join(limits)
    return found


def parse_throttle(name: str, text: str) -> dict[str, str]:
    """By device, what a blkio.throttle file of a control group (version 1) limits."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: f"{name}={row[1]}" for row in rows if len(row) == 2}


def control_groups(text: str) -> list[tuple[str, str]]:
    """(controllers, path) of each line of /proc/self/cgroup; no controllers is version 2."""
    rows = [line.split(":", 2) for line in text.splitlines()]
    return [(row[1], row[2]) for row in rows if len(row) == 3]


def _io_limits(root: Path = Path("/sys/fs/cgroup")) -> dict[str, str]:
    """The limits of our control group and of those above it; of several, the innermost is told."""
    found: dict[str, str] = {}
    for controllers, path in control_groups(_text(Path("/proc/self/cgroup"))):
        below = Path(path.lstrip("/"))
        levels = [below, *below.parents]
        if not controllers:
            for level in reversed(levels):
                found |= parse_io_max(_text(root / level / "io.max"))
        elif "blkio" in controllers.split(","):
            for level in reversed(levels):
                for name, file in (("rbps", "read_bps_device"), ("wbps", "write_bps_device")):
                    told = parse_throttle(name, _text(root / "blkio" / level / f"blkio.throttle.{file}"))
                    found |= {device: f"{found.get(device, '')} {limit}".strip() for device, limit in told.items()}
    return found


def _whole_drive(device: str) -> str:
    """``major:minor`` of the drive that a partition lies on; of any other device its own."""
    place = Path("/sys/dev/block") / device
    if not (place / "partition").exists():
        return device
    return _text(place.resolve().parent / "dev").strip() or device


def _memlock_bytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _may_lock(_text(Path("/proc/self/status"))):
        return None
    return limit


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _may_lock(status: str) -> bool:
    """Whether the capability to lock any amount is in effect."""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_IPC_LOCK & 1)
    return os.geteuid() == 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
