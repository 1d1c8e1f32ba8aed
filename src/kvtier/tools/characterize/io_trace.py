"""Requests to storage as one array, from any source: the kernel, blktrace's text or kvtier's own log.

One row is one request at one layer. The same bytes appear once per layer: as a system call, as a bio from the file
system, and as a request that the driver issues to the device. `IoTrace.at` selects a layer.

`pair` joins an issue with its completion, and `covering` joins a device request with the bio that caused it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np

from kvtier.errors import BadCallError

SECTOR_BYTES = 512
NO_PROCESS = 0
"""`process` of a request from a kernel thread or an unknown issuer. Writeback belongs to no process."""
Source = Literal["block", "file", "log"]
"""Source of requests: the kernel's block layer, a file from another tool, or kvtier's own log of objects."""


class IoLayer(IntEnum):
    """The layer at which a request was seen, from the application downwards."""

    APPLICATION = 0
    FILE_SYSTEM = 1
    DEVICE = 2


class IoKind(IntEnum):
    """The kind of a request. Only `DATA` and `METADATA` transfer bytes."""

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
"""The layout of one request.

Fields:
    issued_s, completed_s: seconds after `IoTrace.began_s`. `completed_s` is NaN if no completion was seen.
    driver_s: when the driver first got the request, or for a bio the request with its last sector. NaN if not seen.
    position: first byte on the device, or in the file for `IoLayer.APPLICATION`.
    bytes: length.
    place: a key of `IoTrace.places`, for a device or a file.
    process: id of the process (not the thread) that issued it, or `NO_PROCESS`.
    is_write: True for a write, False for a read. It has no meaning for flushes and discards.
    kind: an `IoKind`.
    layer: an `IoLayer`.
"""


@dataclass
class IoTrace:
    """Requests, and facts about their recording.

    Raises:
        BadCallError: `requests` is not an array of `REQUEST`.
    """

    source: Source
    requests: np.ndarray
    """Rows of `REQUEST`, in the order of `issued_s`."""
    seconds: float
    """Length of the observation, in seconds."""
    began_s: float = 0.0
    """Unix time at which `issued_s` is 0, or 0 if the source has no calendar time."""
    processes: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of the processes."""
    places: Mapping[int, str] = field(default_factory=dict[int, str])
    """Names of devices or files."""
    device_facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """Limits of each device's queue, such as `max_sectors_kb`."""
    lost_events: int = 0
    """Number of events that the source dropped. Each makes a request incomplete or invisible."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """Counts of events that are not requests: merges, splits, requeues, calls without a known size."""
    chosen: frozenset[int] | None = None
    """Processes whose requests are measured; None means all requests of the device."""
    remarks: list[str] = field(default_factory=list[str])
    """Sentences that explain which requests were counted, which were not, and why."""

    def __post_init__(self) -> None:
        if self.requests.dtype != REQUEST:
            raise BadCallError(f"requests of dtype {self.requests.dtype}; allowed: {REQUEST}")

    @property
    def layers(self) -> list[IoLayer]:
        """Return the layers with requests, from the application downwards."""
        present = np.bincount(self.requests["layer"], minlength=len(IoLayer))
        return [layer for layer in IoLayer if present[layer]]

    @property
    def lowest(self) -> IoLayer:
        """Return the lowest layer, whose figures come first. It is the device if the device was seen."""
        return self.layers[-1] if self.layers else IoLayer.DEVICE

    def at(self, layer: IoLayer) -> np.ndarray:
        """Return all requests of `layer`, of every process and kind."""
        return self.requests[self.requests["layer"] == layer]

    def of_chosen(self, rows: np.ndarray) -> np.ndarray:
        """Return the requests of `rows` that the chosen processes issued, or all requests if none is chosen."""
        return rows if self.chosen is None else rows[np.isin(rows["process"], sorted(self.chosen))]


def kinds_of(rwbs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read the RWBS letters of the kernel and of blktrace. Return whether requests write, and their `IoKind`.

    A leading F is a flush before the request. The next letter says what the request does: R reads, W writes, D
    discards, and ZA appends to a zone. Anything else, such as F or N, transfers nothing. M marks metadata. The kernel's
    `blk_fill_rwbs` writes these letters.

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
    """Return the requests of `rows` that move bytes, but no flushes or discards."""
    return rows[(rows["kind"] <= IoKind.METADATA) & (rows["bytes"] > 0)]


def rows_of(count: int, **columns: Any) -> np.ndarray:  # noqa: ANN401 - arrays and scalars of the columns' types
    """Make `count` rows of `REQUEST`. Columns that are not given are 0, but `driver_s` and `completed_s` are NaN."""
    rows = np.zeros(count, REQUEST)
    rows["driver_s"] = rows["completed_s"] = np.nan
    for name, values in columns.items():
        rows[name] = values
    return rows


def by_time(*parts: np.ndarray) -> np.ndarray:
    """Return all rows of `parts` in the order of `issued_s`."""
    rows = np.concatenate(parts) if parts else np.zeros(0, REQUEST)
    return rows[np.argsort(rows["issued_s"], kind="stable")]


NESTED_MAX = 256
"""Most requests in flight for the same bytes. Further issues stay without a completion."""
TIME_BITS = 40
"""Bits of a time in microseconds, enough for twelve days."""
STARTS_TRIED = 64
"""Starts of intervals of similar length that `covering` tries for each position, the nearest first."""


def pair(
    issued_s: np.ndarray,
    issued_key: np.ndarray,
    ended_s: np.ndarray,
    ended_key: np.ndarray,
    *,
    nested_max: int = NESTED_MAX,
) -> np.ndarray:
    """Pair each issue with the completion that has the same key.

    A completion belongs to the newest issue of its key that has no completion yet. Two requests for the same bytes may
    exchange latencies if they are in flight together. The sum of the latencies and the queue depth are still exact.

    Args:
        issued_s: times of the issues.
        issued_key: keys of the issues, as integers.
        ended_s: times of the completions.
        ended_key: keys of the completions.
        nested_max: most requests of one key in flight. Pass 1 after lost events, so that an issue with a lost
            completion does not get that of another issue.

    Returns:
        For each issue the index of its completion, or -1.
    """
    count = len(issued_s)
    key = np.concatenate([issued_key, ended_key])
    is_end = np.arange(len(key)) >= count
    order = np.lexsort((is_end, np.concatenate([issued_s, ended_s]), key))
    found = np.full(count, -1, np.int64)
    for _ in range(nested_max):
        ends, keys = is_end[order], key[order]
        first = np.flatnonzero(~ends[:-1] & ends[1:] & (keys[:-1] == keys[1:]))
        if not first.size:
            break
        found[order[first]] = order[first + 1] - count
        kept = np.ones(len(order), bool)
        kept[first] = kept[first + 1] = False
        order = order[kept]
    return found


def covering(
    start: np.ndarray, end: np.ndarray, since_us: np.ndarray, wanted: np.ndarray, when_us: np.ndarray
) -> np.ndarray:
    """Find for each wanted position the newest interval that covers it and had begun by the position's time.

    Args:
        start: first positions of the intervals.
        end: positions after the last of each interval.
        since_us: start time of each interval, in whole microseconds of at most `TIME_BITS` bits.
        wanted: positions to look up.
        when_us: the time of each position, in whole microseconds.

    Returns:
        For each position the index of the interval, or -1.
    """
    by_position = np.argsort(wanted, kind="stable")  # sorted searches are several times as fast
    wanted, when_us = wanted[by_position], when_us[by_position]
    found = np.full(len(wanted), -1, np.int64)
    newest_us = np.zeros(len(wanted), np.uint64)
    since_us, when_us = since_us.astype(np.uint64), when_us.astype(np.uint64)
    length = end - start
    # With lengths within a factor of two, few intervals start near a position without covering it.
    magnitude = np.frexp(length.astype(np.float64))[1]
    for each in np.unique(magnitude[length > 0]).tolist():
        own = np.flatnonzero((magnitude == each) & (length > 0))
        starts, group = np.unique(start[own], return_inverse=True)
        # One number holds group and time, so that one search finds the newest of a group.
        ranked = group.astype(np.uint64) << np.uint64(TIME_BITS) | since_us[own]
        order = np.argsort(ranked, kind="stable")
        ranked, longest = ranked[order], length[own].max()
        at = np.searchsorted(starts, wanted, side="right") - 1
        open_ = np.flatnonzero(at >= 0)
        for _ in range(STARTS_TRIED):
            open_ = open_[wanted[open_] - starts[at[open_]] < longest]
            if not open_.size:
                break
            mark = at[open_].astype(np.uint64) << np.uint64(TIME_BITS) | when_us[open_]
            place = np.searchsorted(ranked, mark, side="right") - 1
            in_group = order[place]
            candidate = own[in_group]
            fits = (place >= 0) & (group[in_group] == at[open_]) & (end[candidate] > wanted[open_])
            fits &= (found[open_] < 0) | (since_us[candidate] > newest_us[open_])
            found[open_[fits]], newest_us[open_[fits]] = candidate[fits], since_us[candidate[fits]]
            at[open_] -= 1
            open_ = open_[at[open_] >= 0]
    result = np.empty_like(found)
    result[by_position] = found
    return result
