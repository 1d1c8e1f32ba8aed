"""Requests to storage as one array, from whatever source: the kernel, blktrace's text or kvtier's own log.

One row is one request at one layer. The same bytes appear once per layer: as a system call, as a bio that the file
system submits, and as a request that the driver issues to the device. `IoTrace.at` selects a layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from kvtier.errors import BadCallError

SECTOR_BYTES = 512
NO_PROCESS = 0
"""`process` of a request whose issuer is unknown or a kernel thread: writeback belongs to no process."""
Source = Literal["block", "file", "log"]
"""The kernel's block layer; a file that another tool wrote; kvtier's own log of objects."""


class IoLayer(IntEnum):
    """Where a request was seen, from the application down."""

    APPLICATION = 0
    FILE_SYSTEM = 1
    DEVICE = 2


class IoKind(IntEnum):
    """What a request carries. Only `DATA` and `METADATA` transfer bytes."""

    DATA = 0
    METADATA = 1
    FLUSH = 2
    DISCARD = 3


REQUEST = np.dtype(
    [
        ("issued_s", "f8"),
        ("driver_s", "f8"),
        ("completed_s", "f8"),
        ("position", "u8"),
        ("bytes", "u8"),
        ("place", "u4"),
        ("process", "i4"),
        ("is_write", "?"),
        ("kind", "u1"),
        ("layer", "u1"),
    ]
)
"""One request.

Fields:
    issued_s, completed_s: seconds after `IoTrace.began_s`; `completed_s` is NaN if no completion was seen.
    driver_s: when the driver got it first, or, of a bio, the request with its last sector; NaN if that was not seen.
    position: first byte on the device, or in the file for `IoLayer.APPLICATION`.
    bytes: length.
    place: a key of `IoTrace.places`: a device, or a file.
    process: id of the process (not the thread) that issued it, or `NO_PROCESS`.
    is_write: a write; False is a read. Without meaning for flushes and discards.
    kind: an `IoKind`.
    layer: an `IoLayer`.
"""


@dataclass
class IoTrace:
    """Requests and what is known about them.

    Raises:
        BadCallError: `requests` is not an array of `REQUEST`.
    """

    source: Source
    requests: np.ndarray
    """Rows of `REQUEST`, in the order of `issued_s`."""
    seconds: float
    """How long was observed."""
    began_s: float = 0.0
    """Unix time of `issued_s` 0; 0 if the source has no calendar time."""
    processes: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of the processes."""
    places: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of devices or files."""
    device_facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """For each device what its queue allows, such as `max_sectors_kb`."""
    lost_events: int = 0
    """Events that the source dropped; each makes a request incomplete or invisible."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Events that are not requests: merges, splits, requeues, calls without a known size."""
    chosen: frozenset[int] | None = None
    """Processes whose requests are measured; None is all requests of the device."""
    remarks: list[str] = field(default_factory=list[str])
    """Sentences about what was counted, what was not and why."""

    def __post_init__(self) -> None:
        if self.requests.dtype != REQUEST:
            raise BadCallError(f"requests of dtype {self.requests.dtype}; allowed: {REQUEST}")

    @property
    def layers(self) -> list[IoLayer]:
        """Layers with requests, from the application down."""
        present = np.bincount(self.requests["layer"], minlength=len(IoLayer))
        return [layer for layer in IoLayer if present[layer]]

    @property
    def lowest(self) -> IoLayer:
        """The layer whose figures come first: the device if it was seen."""
        return self.layers[-1] if self.layers else IoLayer.DEVICE

    def at(self, layer: IoLayer) -> np.ndarray:
        """All requests of `layer`, of every process and kind."""
        return self.requests[self.requests["layer"] == layer]

    def of_chosen(self, rows: np.ndarray) -> np.ndarray:
        """The requests of `rows` that the chosen processes issued; all if none is chosen."""
        return rows if self.chosen is None else rows[np.isin(rows["process"], sorted(self.chosen))]


def kinds_of(rwbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether requests write, and their `IoKind`, from the letters of the kernel and of blktrace.

    A leading F is a flush that comes first. Then R reads, W writes, D discards, ZA appends to a zone; anything else,
    such as F or N, transfers nothing. M marks metadata. See `blk_fill_rwbs` in the kernel.

    Args:
        rwbs: letters as an array of bytes (dtype S), such as ``WS``.
    """
    width = max(2, rwbs.dtype.itemsize)
    letters = np.ascontiguousarray(rwbs.astype(f"S{width}")).view(np.uint8).reshape(len(rwbs), width)
    first = np.where(letters[:, 0] == ord("F"), letters[:, 1], letters[:, 0])
    is_metadata = (letters == ord("M")).any(axis=1)
    is_read = first == ord("R")
    is_transfer = is_read | (first == ord("W")) | (first == ord("Z"))
    kind = np.where(is_transfer, np.where(is_metadata, IoKind.METADATA, IoKind.DATA), IoKind.FLUSH)
    return ~is_read, np.where(first == ord("D"), IoKind.DISCARD, kind).astype(np.uint8)


def transfers(rows: np.ndarray) -> np.ndarray:
    """The requests of `rows` that move bytes: no flushes and no discards."""
    return rows[(rows["kind"] <= IoKind.METADATA) & (rows["bytes"] > 0)]


def rows_of(count: int, **columns: Any) -> np.ndarray:  # noqa: ANN401 - arrays and scalars of the columns' types
    """`count` rows of `REQUEST` with these columns; the others are 0, and `driver_s` and `completed_s` NaN."""
    rows = np.zeros(count, REQUEST)
    rows["driver_s"] = rows["completed_s"] = np.nan
    for name, values in columns.items():
        rows[name] = values
    return rows


def by_time(*parts: np.ndarray) -> np.ndarray:
    """All rows of `parts` in the order of `issued_s`."""
    rows = np.concatenate(parts) if parts else np.zeros(0, REQUEST)
    return rows[np.argsort(rows["issued_s"], kind="stable")]
