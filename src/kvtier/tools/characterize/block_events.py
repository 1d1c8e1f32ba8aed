"""Records the block layer's events in one capture, and joins them into requests."""

from collections import Counter

import numpy as np

from kvtier.tools.characterize.block_devices import BlockDevice
from kvtier.tools.characterize.io_trace import (
    NESTED_MAX,
    SECTOR_BYTES,
    TIME_BITS,
    IoKind,
    IoLayer,
    covering,
    kinds_of,
    pair,
    rows_of,
)
from kvtier.tools.characterize.process_tree import ProcessTree
from kvtier.tools.characterize.tracefs import PageEvents, TraceInstance

SEEN = np.dtype(
    [
        ("time_ns", "u8"), ("sector", "u8"), ("bytes", "u8"), ("device", "u4"), ("process", "i4"), ("thread", "i4"),
        ("is_write", "?"), ("kind", "u1"),
    ]
)  # fmt: skip
"""The stored form of an event. `process` and `thread` are those that queued a bio, and 0 for other events."""

BIO_QUEUE, BIO_END = "block_bio_queue", "block_bio_complete"
ISSUE, END, REQUEUE = "block_rq_issue", "block_rq_complete", "block_rq_requeue"
BIO_MERGES = ("block_bio_backmerge", "block_bio_frontmerge")
NEW_TASK = "task/task_newtask"
_WHERE = ("common_pid", "dev", "sector", "nr_sector", "rwbs")
_DEVICE_SHIFT = np.uint64(48)
"""Bits of a sector's number. The device's number is above them."""
_MIX = np.uint64(0x9E37_79B9_7F4A_7C15)
"""An odd factor that spreads sizes over all bits of a key."""
_WRITE_SHIFT = np.uint64(47)
"""Bit for writes in a key, above the sector numbers of 64 PiB."""


class BlockEvents:
    """Records the block layer's events in an instance of tracefs.

    Args:
        instance: the instance of tracefs.
        devices: devices whose events are recorded.
        tree: process tree. It learns of new processes, and knows the process of each thread that queues a bio.
    """

    def __init__(self, instance: TraceInstance, devices: list[BlockDevice], tree: ProcessTree) -> None:
        self._tree = tree
        self._disk_of = {number: it.disk_number for it in devices for number in (it.number, *it.partitions)}
        self._kept: dict[str, list[np.ndarray]] = {name: [] for name in (BIO_QUEUE, BIO_END, ISSUE, END, REQUEUE)}
        self.count = 0
        """Number of events that were kept."""
        self._counts: Counter[str] = Counter()
        self._gaps: list[np.ndarray] = []
        of_request = " || ".join(_request_condition(it) for it in devices)
        # A bio names its partition or, since Linux 5.12, the disk. Its sector counts from the start of the disk.
        of_bio = " || ".join([*(f"dev == {it}" for it in self._disk_of), of_request])
        self._wanted = {NEW_TASK: instance.enable(NEW_TASK, ("common_pid", "pid", "clone_flags"))}
        for name in self._kept:
            fields = _WHERE + {BIO_QUEUE: ("comm",), ISSUE: ("bytes",)}.get(name, ())
            condition = of_bio if name in {BIO_QUEUE, BIO_END} else of_request
            self._wanted[name] = instance.enable(f"block/{name}", fields, condition)
        for name in (*BIO_MERGES, "block_rq_merge", "block_split"):
            if instance.has(f"block/{name}"):
                condition = of_request if name == "block_rq_merge" else of_bio
                self._wanted[name] = instance.enable(f"block/{name}", ("common_pid",), condition)

    def add(self, batch: PageEvents, since_ns: int) -> None:
        """Keep the events of a batch of pages. Earlier batches had all events before `since_ns`."""
        self._gaps.append(np.stack([np.full(len(batch.lost_ns), since_ns, np.uint64), batch.lost_ns], axis=1))
        tasks = batch.of(*self._wanted[NEW_TASK])[1]
        for creator, thread, flags in tasks[["common_pid", "pid", "clone_flags"]].tolist():
            self._tree.born(creator, thread, flags)
        for name, wanted in self._wanted.items():
            if name == NEW_TASK:
                continue
            time_ns, fields = batch.of(*wanted)
            if name not in self._kept:
                self._counts[name] += len(fields)
            elif len(fields):
                self._kept[name].append(self._seen(name, time_ns, fields))
                self.count += len(fields)

    def _seen(self, name: str, time_ns: np.ndarray, fields: np.ndarray) -> np.ndarray:
        seen = np.zeros(len(fields), SEEN)
        seen["time_ns"] = time_ns
        seen["sector"] = fields["sector"]
        seen["device"] = fields["dev"]
        seen["bytes"] = fields["bytes"] if name == ISSUE else fields["nr_sector"] * np.uint64(SECTOR_BYTES)
        seen["is_write"], seen["kind"] = kinds_of(fields["rwbs"])
        if name == BIO_QUEUE:
            threads, first, which = np.unique(fields["common_pid"], return_index=True, return_inverse=True)
            processes = [self._tree.process_of(int(it)) for it in threads]
            for process, comm in zip(processes, fields["comm"][first].tolist(), strict=True):
                self._tree.name(process, comm.decode("utf-8", "replace"))
            seen["process"], seen["thread"] = np.array(processes, np.int32)[which], fields["common_pid"]
        return seen

    def requests(self, began_ns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, int]]:
        """Join the events into requests, whose times count from `began_ns`.

        Returns:
            The requests that the driver issued, and the bios that the file system or the application submitted, both
            as rows of `io_trace.REQUEST`; the thread that queued each bio; and counts.
        """
        gaps = np.concatenate([np.zeros((0, 2), np.uint64), *self._gaps])
        seen = {name: self._sorted(name) for name in self._kept}
        device, file_system = join(
            seen[BIO_QUEUE], seen[BIO_END], seen[ISSUE], seen[END], seen[REQUEUE], gaps, began_ns
        )
        counts = {
            "bio_merges": sum(self._counts[it] for it in BIO_MERGES),
            "request_merges": self._counts["block_rq_merge"],
            "splits": self._counts["block_split"],
            "requeues": len(seen[REQUEUE]),
            "begun_before": len(seen[END]) - int(np.count_nonzero(~np.isnan(device["completed_s"]))),
        }
        return device, file_system, seen[BIO_QUEUE]["thread"], counts

    def _sorted(self, name: str) -> np.ndarray:
        """Return all events of this name in order of time. Events of a partition count as those of its disk."""
        seen = np.concatenate([np.zeros(0, SEEN), *self._kept[name]])
        self._kept[name] = []
        for number, disk in self._disk_of.items():
            if number != disk:
                seen["device"][seen["device"] == number] = disk
        return seen[np.argsort(seen["time_ns"], kind="stable")]


def _request_condition(device: BlockDevice) -> str:
    """Return a condition on requests. Requests name only the whole disk, so sectors select a partition."""
    if device.sectors is None:
        return f"dev == {device.disk_number}"
    end = device.first_sector + device.sectors
    return f"(dev == {device.disk_number} && sector >= {device.first_sector} && sector < {end})"


def join(
    bios: np.ndarray,
    bio_ends: np.ndarray,
    issues: np.ndarray,
    ends: np.ndarray,
    requeues: np.ndarray,
    gaps: np.ndarray,
    began_ns: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Join events into requests of the device and into bios.

    Args:
        bios: bios that were queued, as rows of `SEEN` in order of time, like all events here.
        bio_ends: completions of bios. Only devices without requests (dm, md, zram) have them.
        issues: requests that the driver got. A request that no bio covers keeps its own `process`.
        ends: completions of requests.
        requeues: requests that the driver handed back.
        gaps: rows of start and end in ns. Events in between may be lost.
        began_ns: the time that becomes 0.

    Returns:
        Rows of `io_trace.REQUEST`, for requests in the order of their last issue, and for `bios`.
    """
    # At the end of a bio its first sector may have advanced, but not its last.
    file_system = _rows(bios, bio_ends, _pair(bios, bio_ends, gaps, is_end=True), began_ns, IoLayer.FILE_SYSTEM)
    file_system["process"] = bios["process"]
    issues, first_ns = _issued_again(issues, requeues, 1 if len(gaps) else NESTED_MAX)
    device = _rows(issues, ends, _pair(issues, ends, gaps), began_ns, IoLayer.DEVICE)
    last_s = device["issued_s"].copy()
    maker = _maker(bios, issues, began_ns)
    is_made = maker >= 0
    device["process"] = issues["process"]
    device["process"][is_made] = bios["process"][maker[is_made]]
    # A bio that was queued after the first issue belongs to another request for the same sector.
    is_same = ~is_made
    is_same[is_made] = bios["time_ns"][maker[is_made]] <= first_ns[is_made]
    device["issued_s"] = np.where(is_same, _seconds(first_ns, began_ns), last_s)
    device["driver_s"] = device["issued_s"]
    carrier = _carrier(bios, issues, began_ns)
    carried, by = np.flatnonzero(carrier >= 0), carrier[carrier >= 0]
    driver_s = device["issued_s"][by]
    # A bio may be merged into a request that the driver has handed back.
    file_system["driver_s"][carried] = np.where(driver_s >= file_system["issued_s"][carried], driver_s, last_s[by])
    is_open = np.isnan(file_system["completed_s"][carried])
    file_system["completed_s"][carried[is_open]] = device["completed_s"][by[is_open]]
    return device, file_system


def _pair(issues: np.ndarray, ends: np.ndarray, gaps: np.ndarray, *, is_end: bool = False) -> np.ndarray:
    """Return for each issue the index of its completion, or -1.

    Gaps are rows of start and end. Events in between may be lost, so a completion after a gap may belong to another
    issue.
    """
    keys = _key(issues, is_end=is_end), _key(ends, is_end=is_end)
    found = pair(issues["time_ns"], keys[0], ends["time_ns"], keys[1], nested_max=1 if len(gaps) else NESTED_MAX)
    if len(gaps) and len(ends):
        gaps = gaps[np.argsort(gaps[:, 1])]
        # The earliest start of the gaps that end after a time. There is none after the last gap.
        begins = np.append(np.minimum.accumulate(gaps[::-1, 0])[::-1], np.uint64(np.iinfo(np.uint64).max))
        after_issue = np.searchsorted(gaps[:, 1], issues["time_ns"], side="right")
        found[begins[after_issue] < ends["time_ns"][found]] = -1
    return found


def _key(seen: np.ndarray, *, is_end: bool = False) -> np.ndarray:
    """Return a key of device, first sector (or last, if `is_end`) and kind of operation for each event."""
    sector = seen["sector"] + (seen["bytes"] // np.uint32(SECTOR_BYTES) if is_end else np.uint64(0))
    what = np.where(seen["kind"] <= IoKind.METADATA, seen["is_write"], seen["kind"]).astype(np.uint64)
    return _place(seen, sector) << np.uint64(2) | what


def _place(seen: np.ndarray, sector: np.ndarray) -> np.ndarray:
    """Return a key of device and sector. Device numbers are shortened, so in rare cases two disks share one."""
    device = seen["device"].astype(np.uint64)
    return ((device >> np.uint64(20)) * np.uint64(31) + device & np.uint64(0x3FFF)) << _DEVICE_SHIFT | sector


def way_of(seen: np.ndarray, sector: np.ndarray) -> np.ndarray:
    """Return a key of device, direction and sector. The direction separates reads and writes of a sector."""
    return _place(seen, sector) | seen["is_write"].astype(np.uint64) << _WRITE_SHIFT


def _issued_again(issues: np.ndarray, requeues: np.ndarray, nested: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last issue of each request, and the time in ns at which the driver first got the request.

    A driver with a full queue hands a request back, and the block layer issues it again.
    """
    # Sizes distinguish two requests with the same first sector, such as the second parts of two splits.
    key, back = (_key(it) ^ it["bytes"] * _MIX for it in (issues, requeues))
    handed_back = pair(issues["time_ns"], key, requeues["time_ns"], back, nested_max=nested) >= 0
    order = np.lexsort((issues["time_ns"], key))
    goes_on = np.zeros(len(issues), bool)
    goes_on[1:] = (key[order][1:] == key[order][:-1]) & handed_back[order][:-1]
    begin = np.maximum.accumulate(np.where(goes_on, 0, np.arange(len(issues))))
    first_ns = np.empty(len(issues), np.uint64)
    first_ns[order] = issues["time_ns"][order][begin]
    return issues[~handed_back], first_ns[~handed_back]


def _rows(issued: np.ndarray, ends: np.ndarray, found: np.ndarray, began_ns: int, layer: IoLayer) -> np.ndarray:
    rows = rows_of(
        len(issued),
        issued_s=_seconds(issued["time_ns"], began_ns),
        position=issued["sector"] * np.uint64(SECTOR_BYTES),
        bytes=issued["bytes"],
        place=issued["device"],
        is_write=issued["is_write"],
        kind=issued["kind"],
        layer=layer,
    )
    has = found >= 0
    rows["completed_s"][has] = _seconds(ends["time_ns"][found[has]], began_ns)
    return rows


def _maker(bios: np.ndarray, issues: np.ndarray, began_ns: int) -> np.ndarray:
    """Return for each device request the newest bio that covers its first sector in its direction, or -1."""
    start = way_of(bios, bios["sector"])
    return covering(
        start,
        start + bios["bytes"] // np.uint32(SECTOR_BYTES),
        _microseconds(bios["time_ns"], began_ns),
        way_of(issues, issues["sector"]),
        _microseconds(issues["time_ns"], began_ns),
    )


def _carrier(bios: np.ndarray, issues: np.ndarray, began_ns: int) -> np.ndarray:
    """Return for each bio the first later device request that transfers the bio's last sector, or -1."""
    start = way_of(issues, issues["sector"])
    last = np.uint64((1 << TIME_BITS) - 1)  # for reversed times, `covering` finds the earliest
    end = bios["sector"] + bios["bytes"] // np.uint32(SECTOR_BYTES)
    found = covering(
        start,
        start + issues["bytes"] // np.uint32(SECTOR_BYTES),
        last - _microseconds(issues["time_ns"], began_ns).astype(np.uint64),
        way_of(bios, np.maximum(end, 1) - np.uint64(1)),
        last - _microseconds(bios["time_ns"], began_ns).astype(np.uint64),
    )
    return np.where(bios["bytes"] > 0, found, -1)


def _seconds(time_ns: np.ndarray, began_ns: int) -> np.ndarray:
    return (time_ns.astype(np.int64) - began_ns) / 1e9


def _microseconds(time_ns: np.ndarray, began_ns: int) -> np.ndarray:
    return np.maximum(time_ns.astype(np.int64) - began_ns, 0) // 1000
