"""Limits the memory of one server, page cache included, and the bandwidth of one drive, with a control group.

Both versions of control groups work. Version 1 throttles only the reads and direct writes that a process itself
submits. The kernel submits buffered writes later, and only version 2 charges those to the process.
"""

import os
import secrets
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.device.control_groups import control_groups, text_of
from kvtier.errors import ConfigError
from kvtier.tools.machine_facts import Mount, mount_of, read_mounts, whole_drive

REMOVAL_S = 20.0
PREFIX = "kvtier-serve-"
"""Prefix of a group's name. The id of the process that made the group follows."""
_ADVICE = "run as root, or with --no-limits, which leaves memory and drive unlimited and says so in the record"


@dataclass(frozen=True, slots=True)
class Drive:
    """The whole drive that holds a directory."""

    name: str
    """The drive's name in /sys/block, such as ``nvme0n1``."""
    number: str
    """The device number, ``major:minor``."""


def drive_of(directory: Path) -> Drive:
    """Return the drive that holds `directory`.

    Raises:
        ConfigError: the file system of the directory is on no block device.
    """
    mount = mount_of(directory.resolve(), read_mounts())
    place = None if mount is None else Path("/sys/dev/block") / whole_drive(mount.device)
    if mount is None or place is None or not place.exists():
        kind = "of unknown kind" if mount is None else mount.kind
        raise ConfigError(
            f"--dir {directory}: its file system ({kind}) is on no block device; use a directory on a drive"
        )
    return Drive(place.resolve().name, place.name)


class MachineLimits:
    """A control group, or two with version 1. The constructor makes it and `close` removes it.

    Args:
        memory_bytes: memory limit of all processes in the group, page cache included.
        drive: the drive whose bandwidth `throttle` limits.

    Raises:
        ConfigError: this process lacks the right to make the group.
    """

    def __init__(self, memory_bytes: int, drive: Drive) -> None:
        self.memory_bytes = memory_bytes
        self._drive = drive
        self._made: list[Path] = []
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            self._memory = self._make("memory", name)
            self._io = self._make("blkio", name)
            file = "memory.max" if self.is_version_2 else "memory.limit_in_bytes"
            (self._memory / file).write_text(str(memory_bytes), encoding="ascii")
        except OSError as error:
            self.close()
            raise ConfigError(
                f"no control group that limits memory and a drive can be made: {error}; {_ADVICE}"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_version_2(self) -> bool:
        """Whether a single group of version 2 has both limits."""
        return (self._memory / "memory.max").exists()

    @property
    def entries(self) -> tuple[Path, ...]:
        """Files to which a process writes ``0`` to limit itself and its children."""
        return tuple(it / "cgroup.procs" for it in self._made)

    def throttle(self, bytes_per_s: float | None) -> None:
        """Limit reads and writes of the drive to `bytes_per_s` each. None lifts the limit.

        Raises:
            ConfigError: the kernel refuses.
        """
        number, limit = self._drive.number, 0 if bytes_per_s is None else max(1, round(bytes_per_s))
        if self.is_version_2:
            files = {"io.max": f"{number} rbps={limit or 'max'} wbps={limit or 'max'}"}
        else:
            files = {f"blkio.throttle.{way}_bps_device": f"{number} {limit}" for way in ("read", "write")}
        try:
            for file, text in files.items():
                (self._io / file).write_text(text, encoding="ascii")
        except OSError as error:
            raise ConfigError(f"drive {self._drive.name} cannot be throttled: {error}; {_ADVICE}") from error

    def memory_used(self) -> int | None:
        """Return the bytes in use now, page cache included."""
        text = text_of(self._memory / ("memory.current" if self.is_version_2 else "memory.usage_in_bytes"))
        return int(text) if text.strip().isdecimal() else None

    def out_of_memory(self) -> int:
        """Return the number of processes that the kernel killed because of the memory limit."""
        text = text_of(self._memory / ("memory.events" if self.is_version_2 else "memory.oom_control"))
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))

    def close(self) -> None:
        """End the remaining processes and remove the group.

        Raises:
            ConfigError: the group cannot be removed.
        """
        until_s = time.monotonic() + REMOVAL_S
        while self._made:
            group = self._made[-1]
            for pid in text_of(group / "cgroup.procs").split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                group.rmdir()
            except FileNotFoundError:
                pass
            except OSError as error:
                if time.monotonic() > until_s:
                    raise ConfigError(f"control group {group} could not be removed: {error}") from error
                time.sleep(0.05)
                continue
            self._made.pop()

    def _make(self, controller: str, name: str) -> Path:
        """Make the group for `controller`, a name of version 1. In version 2 all controllers share one group."""
        for parent, is_version_2 in _parents(controller, read_mounts()):
            _remove_abandoned(parent)
            group = parent / name
            if group in self._made:
                return group
            if is_version_2:
                with suppress(OSError):
                    (parent / "cgroup.subtree_control").write_text("+memory +io", encoding="ascii")
            group.mkdir()
            self._made.append(group)
            if not is_version_2 or {"memory.max", "io.max"} <= {it.name for it in group.iterdir()}:
                return group
            group.rmdir()
            self._made.pop()
        raise ConfigError(f"the kernel offers no control group with the controller {controller}; {_ADVICE}")


def _parents(controller: str, mounts: Iterable[Mount]) -> Iterable[tuple[Path, bool]]:
    """Yield the groups that can have a child with this controller, and whether each is a group of version 2."""
    own = control_groups(text_of(Path("/proc/self/cgroup")))
    for mount in mounts:
        top = Path(mount.point)
        if mount.kind == "cgroup" and controller in mount.options:
            here = next((path for names, path in own if controller in names.split(",")), "/")
            inner = top / here.lstrip("/")
            yield (inner if inner.exists() else top), False
        elif mount.kind == "cgroup2":
            wanted = {"memory", "io"}
            inner = top / next((path for names, path in own if not names), "/").lstrip("/")
            # In version 2 only the root can contain both processes and limited groups.
            for parent in dict.fromkeys((inner if inner == top else inner.parent, top)):
                if wanted <= set(text_of(parent / "cgroup.controllers").split()):
                    yield parent, True


def _remove_abandoned(parent: Path) -> None:
    """Remove the empty groups that killed processes left behind."""
    for group in parent.glob(f"{PREFIX}*"):
        pid = group.name.removeprefix(PREFIX).partition("-")[0]
        if not (Path("/proc") / pid).exists():
            with suppress(OSError):
                group.rmdir()
