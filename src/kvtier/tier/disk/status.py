"""The status file of an open disk store, with counters and faults for `kvtier inspect`.

It may be stale, damaged, missing or left by a dead process, and no decision depends on it. It is not synced. Its age
reveals a device that hangs.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from kvtier.config.value_types import age_text, date_text, size_text
from kvtier.tier.files.checked_json import pack_json, read_json
from kvtier.tier.files.safe_open import folder_at, read_file, write_file

STATUS_NAME = "kvtier-status.json"
FILES = re.compile(rf"\.?{re.escape(STATUS_NAME)}(\.[0-9a-f]+)?")
"""Names of the status file and of its temporary files."""

STATUS_INTERVAL_S = 10.0
SILENT_S = 60.0
"""If a status is older than this, its process has stopped, or waits for a device that hangs."""

FAULT_LENGTH_MAX = 300
_BYTES_MAX = 4096
_COUNT_MAX = 1 << 62
_TIME_MAX_S = 1e11
_ABOUT = "Status of the store beside this file, for people. It may be deleted at any time."


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatus:
    """Content of the status file. Times are seconds since 1970."""

    time_s: float
    pid: int
    """Process that has the store open."""
    is_open: bool
    """Whether the process still has the store open."""
    is_up: bool | None
    """Whether the session uses the tier. False while it backs off after errors, None if unknown."""
    faults: int
    """Number of I/O errors since the store was opened."""
    last_fault: str
    """The last error; "" for none."""
    last_fault_s: float | None
    objects: int
    used_bytes: int
    """Bytes of all segments, filled or not."""
    capacity_bytes: int
    """The configured cap."""
    limit_bytes: int
    """The current cap, which is lower while the file system is full."""
    free_bytes: int
    """Free bytes of the file system."""
    reserve_bytes: int
    """Free bytes to leave to other programs."""
    frame_bytes: int
    """Bytes of frames written since the store was opened."""
    upkeep_bytes: int
    """Bytes of copies and index written since then."""
    avoided_bytes: int
    """Bytes refused by the write budget."""
    write_bytes_per_day: int
    """The write budget; 0 for none."""
    direct_io: bool

    @property
    def amplification(self) -> float | None:
        """Write amplification, in bytes written per byte of frames; None before the first write."""
        return (self.frame_bytes + self.upkeep_bytes) / self.frame_bytes if self.frame_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHealth:
    """Health of a disk store, from the status file of the process that last opened it."""

    directory: str
    state: str
    """``in use``, ``backed off``, ``silent`` (open in a process that writes no status) or ``not open``."""
    age_s: float | None
    """Age of the status; None without one."""
    amplification: float | None
    status: DiskStatus | None

    @property
    def is_well(self) -> bool:
        """Whether the store has no problem at present."""
        return self.state in {"in use", "not open"}

    def rows(self) -> list[tuple[str, str]]:
        """Return the labels and values to show, as text."""
        status = self.status
        if status is None:
            return [("state", f"{self.state}; no status was ever written")]
        use = {True: "", False: "", None: "; the metric kvtier_tier_up shows whether its session backs off"}
        limit = f"; the cap is {size_text(status.limit_bytes)} while the file system has no room"
        cap = f"{size_text(status.capacity_bytes)}{limit if status.limit_bytes < status.capacity_bytes else ''}"
        faults = (
            f"{status.faults} since it was opened, the last at {date_text(status.last_fault_s)}: {status.last_fault}"
        )
        budget = f"budget: {size_text(status.write_bytes_per_day)} a day" if status.write_bytes_per_day else "no budget"
        return [
            ("state", f"{self.state}{use[status.is_up]}"),
            ("status", f"{age_text(self.age_s)}, by process {status.pid}"),
            ("I/O errors", "none since it was opened" if status.last_fault_s is None else faults),
            ("objects", str(status.objects)),
            ("in use", f"{size_text(status.used_bytes)} of {cap}"),
            ("disk free", f"{size_text(status.free_bytes)}, of which {size_text(status.reserve_bytes)} is reserved"),
            ("written", f"{size_text(status.frame_bytes)} of frames, {size_text(status.upkeep_bytes)} of upkeep"),
            ("amplification", "-" if self.amplification is None else f"{self.amplification:.3f}"),
            ("refused by the write budget", f"{size_text(status.avoided_bytes)} ({budget})"),
            ("direct I/O", "yes" if status.direct_io else "no"),
        ]


def write_status(root: Path, status: DiskStatus) -> None:
    """Write the status of the store at `root` atomically.

    Raises:
        OSError: the status cannot be written.
    """
    with folder_at(root) as folder:
        draft = f".{STATUS_NAME}.{os.urandom(8).hex()}"
        write_file(STATUS_NAME, draft, pack_json({"about": _ABOUT, **asdict(status)}), folder)


def read_status(root: Path) -> DiskStatus | None:
    """Return the last status, or None if it is missing or invalid."""
    try:
        with folder_at(root) as folder:
            members, is_sound = read_json(read_file(STATUS_NAME, _BYTES_MAX, folder))
    except OSError:
        return None
    return _parsed(members) if is_sound else None


def _parsed(members: Mapping[str, Any]) -> DiskStatus | None:
    hints: dict[str, Any] = get_type_hints(DiskStatus)
    values: dict[str, Any] = {}
    for field in fields(DiskStatus):
        value = members.get(field.name)
        wanted = hints[field.name]
        kinds = getattr(wanted, "__args__", (wanted,))
        if type(value) is int and float in kinds:
            value = float(value)
        if type(value) not in kinds:
            return None
        if isinstance(value, int | float) and not 0 <= value <= (_TIME_MAX_S if float in kinds else _COUNT_MAX):
            return None
        values[field.name] = value
    return DiskStatus(**values)
