"""Records system calls that read or write files: the requests of an application above page cache and file system.

The kernel's events name a descriptor, and this module looks up its file soon after. A descriptor that is closed by then
counts as a file, because sockets and pipes live longer. Sizes are the results of the calls. The events of `io_submit`
have no sizes, so its requests are only counted. kvtier's own log has the sizes for its tiers.

If the bios that a thread queues in one call follow each other on the device, they are parts of one request. A bio
holds at most 256 pieces of memory, so large direct I/O needs several.
"""

import os
import stat
from collections import Counter
from pathlib import Path

import numpy as np

from kvtier.tools.characterize.block_devices import event_number, find_number, lowest
from kvtier.tools.characterize.io_trace import REQUEST, IoKind, IoLayer, pair, rows_of
from kvtier.tools.characterize.process_tree import ProcessTree
from kvtier.tools.characterize.tracefs import EventFormat, PageEvents, TraceInstance
from kvtier.tools.machine_facts import read_mounts

READS = {"read": "", "readv": "", "pread64": "pos", "preadv": "pos_l", "preadv2": "pos_l"}
WRITES = {"write": "", "writev": "", "pwrite64": "pos", "pwritev": "pos_l", "pwritev2": "pos_l"}
"""System calls, each with the field of its event that has the position in the file, if any."""
URING_READS, URING_WRITES = (1, 4, 22), (2, 5, 23)
"""Numbers of `IORING_OP_READV`, `READ_FIXED` and `READ`, and of the same operations for writes."""
NO_STORAGE = {"tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "tracefs", "cgroup", "cgroup2", "hugetlbfs", "mqueue"}

_BEGUN = np.dtype(
    [
        ("time_ns", "u8"), ("key", "u8"), ("position", "u8"), ("process", "i4"), ("thread", "i4"), ("is_write", "?"),
        ("is_closed", "?"),
    ]
)  # fmt: skip
_ENDED = np.dtype([("time_ns", "u8"), ("key", "u8"), ("bytes", "i8"), ("thread", "i4")])
_SUBMIT = np.dtype([("time_ns", "u8"), ("thread", "i4"), ("is_one", "?")])


class CallEvents:
    """Records file system calls of chosen processes and their children in an instance of tracefs.

    Args:
        instance: the instance of tracefs.
        tree: process tree, which knows the process of each thread.
        threads: threads whose calls are recorded, with all threads and processes that they start.
        disks: numbers of the disks whose files count.
        directory: only files below it count; None means all files. The path contains no symbolic links.
    """

    def __init__(
        self,
        instance: TraceInstance,
        tree: ProcessTree,
        threads: list[int],
        disks: set[int],
        directory: Path | None = None,
    ) -> None:
        self._tree = tree
        self._begun: list[np.ndarray] = []
        self._ended: list[np.ndarray] = []
        self._submits: list[np.ndarray] = []
        self.count = 0
        """Number of events that were kept."""
        self._counts: Counter[str] = Counter()
        self._files = _Files(disks, directory)
        instance.write("options/event-fork", "1")
        instance.write("set_event_pid", " ".join(map(str, threads)))
        self._enter: list[tuple[str, EventFormat, bool]] = []
        self._leave: list[EventFormat] = []
        for names, is_write in ((READS, False), (WRITES, True)):
            for name, position in names.items():
                if instance.has(f"syscalls/sys_enter_{name}"):
                    fields = ("common_pid", "fd", *([position] if position else []))
                    enter = instance.enable(f"syscalls/sys_enter_{name}", fields)
                    self._enter.append((position, enter, is_write))
                    self._leave.append(instance.enable(f"syscalls/sys_exit_{name}", ("common_pid", "ret")))
        self._submit: list[EventFormat] = []
        self._uring = None
        if instance.has("syscalls/sys_enter_io_submit"):
            self._submit.append(instance.enable("syscalls/sys_enter_io_submit", ("common_pid", "nr")))
            self._submit.append(instance.enable("syscalls/sys_exit_io_submit", ("common_pid",)))
        if instance.has("io_uring/io_uring_submit_req") and instance.has("io_uring/io_uring_complete"):
            self._uring = (
                instance.enable("io_uring/io_uring_submit_req", ("common_pid", "req", "opcode")),
                instance.enable("io_uring/io_uring_complete", ("req", "res")),
            )

    @property
    def sees_uring(self) -> bool:
        """Whether the kernel has events for requests of io_uring."""
        return self._uring is not None

    def add(self, batch: PageEvents, since_ns: int) -> None:  # noqa: ARG002 - a thread has one call at a time
        """Keep the events of a batch of pages."""
        for position, wanted, is_write in self._enter:
            time_ns, fields = batch.of(*wanted)
            if len(fields):
                kept, is_closed = self._files.count(fields["common_pid"], fields["fd"], is_positioned=bool(position))
                where = fields[position] if position else np.zeros(len(fields), np.uint64)
                begun = self._begin(time_ns[kept], fields["common_pid"][kept], None, where[kept], is_write=is_write)
                begun["is_closed"] = is_closed[kept]
        for wanted in self._leave:
            time_ns, fields = batch.of(*wanted)
            self._end(time_ns, fields["common_pid"], fields["ret"], fields["common_pid"])
        for wanted in self._submit:
            time_ns, fields = batch.of(*wanted)
            rows = np.zeros(len(fields), _SUBMIT)
            rows["time_ns"], rows["thread"] = time_ns, fields["common_pid"]
            if "nr" in (fields.dtype.names or ()):
                rows["is_one"] = fields["nr"] == 1
                self._counts["aio_requests"] += int(fields["nr"].sum())
            self._submits.append(rows)
            self.count += len(rows)
        if self._uring is not None:
            time_ns, fields = batch.of(*self._uring[0])
            for codes, is_write in ((URING_READS, False), (URING_WRITES, True)):
                kept = np.isin(fields["opcode"], codes)
                where = np.zeros(int(kept.sum()), np.uint64)
                self._begin(time_ns[kept], fields["common_pid"][kept], fields["req"][kept], where, is_write=is_write)
            time_ns, fields = batch.of(*self._uring[1])
            self._end(time_ns, fields["req"], fields["res"], 0)

    def _begin(
        self, time_ns: np.ndarray, thread: np.ndarray, key: np.ndarray | None, position: np.ndarray, *, is_write: bool
    ) -> np.ndarray:
        rows = np.zeros(len(time_ns), _BEGUN)
        threads, which = np.unique(thread, return_inverse=True)
        rows["time_ns"], rows["position"], rows["is_write"] = time_ns, position, is_write
        rows["key"] = thread if key is None else key
        rows["thread"] = thread
        rows["process"] = np.array([self._tree.process_of(int(it)) for it in threads], np.int32)[which]
        self._begun.append(rows)
        self.count += len(rows)
        return rows

    def _end(self, time_ns: np.ndarray, key: np.ndarray, returned: np.ndarray, thread: np.ndarray | int) -> None:
        if len(time_ns):
            rows = np.zeros(len(time_ns), _ENDED)
            rows["time_ns"], rows["key"], rows["bytes"], rows["thread"] = time_ns, key, returned, thread
            self._ended.append(rows)
            self.count += len(rows)

    def whole_requests(self, bios: np.ndarray, thread: np.ndarray, began_ns: int) -> np.ndarray:
        """Join `bios` into whole requests with `joined`. Their times count from `began_ns`.

        `thread` is the thread that queued each bio.

        The bios of an `io_submit` with several requests stay separate, because its event does not show the ends of
        requests.
        """
        begun = np.concatenate([np.zeros(0, _BEGUN), *self._begun])
        ended = np.concatenate([np.zeros(0, _ENDED), *self._ended])
        submits = np.concatenate([np.zeros(0, _SUBMIT), *self._submits])
        bound_ns = np.concatenate([begun["time_ns"], ended["time_ns"], submits["time_ns"]]).astype(np.int64)
        is_begin = np.concatenate([np.ones(len(begun), bool), np.zeros(len(ended), bool), submits["is_one"]])
        owner = np.concatenate([begun["thread"], ended["thread"], submits["thread"]])
        return joined(bios, thread, (bound_ns - began_ns) / 1e9, owner, is_begin)

    def requests(self, began_ns: int) -> tuple[np.ndarray, dict[str, int]]:
        """Return the calls that transferred bytes, as rows of `io_trace.REQUEST`, and counts of doubtful ones."""
        begun = np.concatenate([np.zeros(0, _BEGUN), *self._begun])
        ended = np.concatenate([np.zeros(0, _ENDED), *self._ended])
        found = pair(begun["time_ns"], begun["key"], ended["time_ns"], ended["key"], nested_max=1)
        counts = dict(self._counts) | {"calls_on_closed_files": self._files.closed}
        has = found >= 0
        begun, ended = begun[has], ended[found[has]]
        moved = ended["bytes"] > 0
        begun, ended = begun[moved], ended[moved]
        counts["bytes_written_to_closed_files"] = int(ended["bytes"][begun["is_write"] & begun["is_closed"]].sum())
        if not len(begun):
            return np.zeros(0, REQUEST), counts
        return rows_of(
            len(begun),
            issued_s=(begun["time_ns"].astype(np.int64) - began_ns) / 1e9,
            completed_s=(ended["time_ns"].astype(np.int64) - began_ns) / 1e9,
            position=begun["position"],
            bytes=ended["bytes"],
            process=begun["process"],
            is_write=begun["is_write"],
            kind=IoKind.DATA,
            layer=IoLayer.APPLICATION,
        ), counts


def joined(
    bios: np.ndarray, thread: np.ndarray, bound_s: np.ndarray, bound_thread: np.ndarray, is_begin: np.ndarray
) -> np.ndarray:
    """Join the adjacent bios that a thread queued in one call into one request.

    Args:
        bios: rows of `io_trace.REQUEST` in order of time.
        thread: the thread that queued each bio.
        bound_s: times at which calls began or ended.
        bound_thread: the thread of the call at each time.
        is_begin: for each time, whether a call began that makes a single request.

    Returns:
        Rows with the first part's start, the last part's driver and completion times, and all bytes.
    """
    bounds = len(bound_s)
    owner = np.concatenate([bound_thread, thread])
    order = np.lexsort((np.concatenate([bound_s, bios["issued_s"]]), owner))  # stable, so a call comes before its bios
    newest = np.maximum.accumulate(np.where(order < bounds, np.arange(len(order)), -1))
    of_bio = order >= bounds
    at, call = order[of_bio] - bounds, order[newest[of_bio]]
    in_call = (newest[of_bio] >= 0) & (owner[call] == thread[at])
    in_call[in_call] = is_begin[call[in_call]]
    rows = bios[at]
    goes_on = np.zeros(len(rows), bool)
    goes_on[1:] = in_call[1:] & (call[1:] == call[:-1])
    goes_on[1:] &= rows["position"][1:] == rows["position"][:-1] + rows["bytes"][:-1]
    for name in ("place", "is_write", "kind"):
        goes_on[1:] &= rows[name][1:] == rows[name][:-1]
    first = np.flatnonzero(~goes_on)
    whole = rows[first]
    if len(whole):
        whole["bytes"] = np.add.reduceat(rows["bytes"], first)
        for name in ("driver_s", "completed_s"):
            whole[name] = np.maximum.reduceat(rows[name], first)
    return whole


class _Files:
    """Decides whether a thread's descriptor is a file on one of the disks. Looks up each descriptor once per batch."""

    def __init__(self, disks: set[int], directory: Path | None) -> None:
        self._disks = disks
        self._directory = directory
        self._known: dict[int, bool] = {
            event_number(os.makedev(*map(int, mount.device.split(":")))): False
            for mount in read_mounts()
            if mount.kind in NO_STORAGE
        }
        self.closed = 0
        """Number of calls whose descriptor was closed before the look-up."""

    def count(
        self, thread: np.ndarray, descriptor: np.ndarray, *, is_positioned: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which calls count, and which of them are doubtful, because their descriptor was closed.

        Sockets and pipes have no positioned calls. So these are not doubtful, unless only a directory counts.
        """
        pairs = thread.astype(np.uint64) << np.uint64(32) | descriptor.astype(np.uint64) & np.uint64(0xFFFF_FFFF)
        unique, which, calls = np.unique(pairs, return_inverse=True, return_counts=True)
        verdicts, is_closed = np.ones(len(unique), bool), np.zeros(len(unique), bool)
        for place, both in enumerate(unique.tolist()):
            found = self._is_storage(both >> 32, both & 0xFFFF_FFFF)
            if found is None:
                is_closed[place] = not is_positioned or self._directory is not None
                self.closed += int(calls[place]) if is_closed[place] else 0
            else:
                verdicts[place] = found
        return verdicts[which], is_closed[which]

    def _is_storage(self, thread: int, descriptor: int) -> bool | None:
        link = Path(f"/proc/{thread}/fd/{descriptor}")
        try:
            status, file = link.stat(), link.readlink()
        except OSError:
            return None
        if self._directory is not None and not file.is_relative_to(self._directory):
            return False
        is_block = stat.S_ISBLK(status.st_mode)
        if not (is_block or stat.S_ISREG(status.st_mode)):
            return False
        device = status.st_rdev if is_block else status.st_dev
        number = event_number(device)
        if number not in self._known:
            found = find_number(device)
            # A file system over several devices, such as btrfs, has a separate number.
            self._known[number] = found is None or any(it.disk_number in self._disks for it in (found, *lowest(found)))
        return self._known[number]
