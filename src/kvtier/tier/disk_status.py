"""How a store that is in use fares: a small file beside its segments, written now and then, for `kvtier inspect`.

Nobody takes it for the truth: it may be old, damaged, missing or of a process that is gone, and nothing is decided by
it. It is not synced. A device that hangs leaves it as it was, so how old it is tells something as well.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from kvtier.tier.disk_format import pack_json, read_json
from kvtier.tier.safe_open import folder_at, read_file, set_aside, write_file

STATUS_NAME = "kvtier-status.json"
DRAFT_NAME = f".{STATUS_NAME}.draft"

AGAIN_S = 60.0
"""A status that has not changed is written again after so long: by that one sees that somebody is alive."""
CHANGED_S = 10.0
"""One that has changed: a few megabytes a day at most."""
ALARMED_S = 1.0
"""One with another fault, or of a tier that is left alone now, or used again."""

FAULT_LENGTH_MAX = 300
_BYTES_MAX = 4096
_BYTES_HELD_MAX = 1 << 62
_TIME_MAX_S = 1e11
_ABOUT = "How the store beside this file fares, for people. It may be deleted at any time."


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStatus:
    """What is told. Times are seconds since 1970."""

    time_s: float
    pid: int
    """Of the process that has the store open."""
    is_open: bool
    """False: it has closed it since."""
    is_up: bool | None
    """Whether the session uses the tier; when not, it failed lately and rests. None: nobody said."""
    faults: int
    """I/O errors since the store was opened."""
    last_fault: str
    """What it was; "" when there was none."""
    last_fault_s: float | None
    objects: int
    used_bytes: int
    """All segments, filled or not."""
    capacity_bytes: int
    """The configured cap."""
    limit_bytes: int
    """The cap now: less while the file system has no room for more."""
    free_bytes: int
    """Of the file system."""
    reserve_bytes: int
    """Of these, left to others."""
    frame_bytes: int
    """Written since the store was opened, without upkeep."""
    upkeep_bytes: int
    """Written besides: copies of survivors, index."""
    avoided_bytes: int
    """Refused by the write budget."""
    write_bytes_per_day: int
    """The write budget; 0: none."""
    direct_io: bool

    @property
    def amplification(self) -> float | None:
        """Bytes written over bytes of frames written."""
        return (self.frame_bytes + self.upkeep_bytes) / self.frame_bytes if self.frame_bytes else None


class StatusFile:
    """Writes the status of the store at `root`, rarely enough. For one thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._told: DiskStatus | None = None
        self._next_s = 0.0
        self._next_alarm_s = 0.0

    def is_due(self, now_s: float, *, faults: int, is_up: bool | None) -> bool:
        """Whether the status is worth making; `now_s` is on a clock of its own."""
        if now_s >= self._next_s:
            return True
        is_alarming = self._told is None or (faults, is_up) != (self._told.faults, self._told.is_up)
        return is_alarming and now_s >= self._next_alarm_s

    def tell(self, status: DiskStatus, now_s: float) -> None:
        """Write `status`, whole or not at all; one that says nothing new is written less often.

        Raises:
            OSError: it cannot be written.
        """
        is_new = self._told is None or replace(self._told, time_s=status.time_s) != status
        is_stale = self._told is None or status.time_s - self._told.time_s >= AGAIN_S
        self._next_s, self._next_alarm_s = now_s + CHANGED_S, now_s + ALARMED_S
        if is_new or is_stale:
            write_status(self._root, status)
            self._told = status


def write_status(root: Path, status: DiskStatus) -> None:
    """Write `status` beside the store at `root`, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    with folder_at(root) as folder:
        try:
            os.unlink(DRAFT_NAME, dir_fd=folder)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            set_aside(DRAFT_NAME, folder)
        write_file(STATUS_NAME, DRAFT_NAME, pack_json({"about": _ABOUT, **asdict(status)}), folder)


def read_status(root: Path) -> DiskStatus | None:
    """What was told last; None when there is nothing that makes sense."""
    try:
        with folder_at(root) as folder:
            told, is_sound = read_json(read_file(STATUS_NAME, _BYTES_MAX, folder))
    except OSError:
        return None
    return _parsed(told) if is_sound else None


def _parsed(told: Mapping[str, Any]) -> DiskStatus | None:
    hints: dict[str, Any] = get_type_hints(DiskStatus)
    values: dict[str, Any] = {}
    for field in fields(DiskStatus):
        value = told.get(field.name)
        wanted = hints[field.name]
        kinds = getattr(wanted, "__args__", (wanted,))
        if type(value) is int and float in kinds:
            value = float(value)
        if type(value) not in kinds:
            return None
        if isinstance(value, int | float) and not 0 <= value <= (_TIME_MAX_S if float in kinds else _BYTES_HELD_MAX):
            return None
        values[field.name] = value
    return DiskStatus(**values)
