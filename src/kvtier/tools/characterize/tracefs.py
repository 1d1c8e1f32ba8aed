"""Makes an instance of the kernel's tracing directory, and reads binary trace pages as arrays.

The instance has its own buffers and events, and is removed at the end.

A page of `trace_pipe_raw` has a header (time stamp, length) and events of variable length, each with the time since
the previous event. All pages of a batch are walked together, one event of each page per step. So an event costs only a
share of a few array operations. The kernel's `events/header_page`, `events/header_event` and
`include/linux/ring_buffer.h` describe the layout.
"""

import os
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.machine_facts import read_mounts

PAGE_BYTES = 4096
HEADER_BYTES = 16
"""Bytes of a page's header: time stamp (8), and number of bytes in use (8, with flags in the upper bits)."""
LENGTH_MASK = 0x3FFF_FFFF
MISSED = 1 << 31
"""Flag of a page before which events of its processor were lost."""
PADDING, TIME_EXTEND, TIME_STAMP = 29, 30, 31
"""Values of an event's five type bits. 1 to 28 are the length in 4-byte words. 0: the next word has the length."""
DELTA_BITS = 27
EVENT_BYTES_MAX = 512
"""Upper bound of the size of events that are read here."""

_FIELD = re.compile(r"field:(?P<text>[^;]+);\s*offset:(?P<at>\d+);\s*size:(?P<size>\d+);\s*signed:(?P<signed>\d);")


class EventFormat(NamedTuple):
    """The number of a kernel event and the layout of some of its fields."""

    number: int
    layout: np.dtype[Any]


def event_format(text: str, wanted: tuple[str, ...]) -> EventFormat:
    """Parse the text of an event's `format` file. Return the format with the fields `wanted`.

    Raises:
        ValueError: the text has no number, or lacks a wanted field.
    """
    number = re.search(r"^ID: (\d+)$", text, re.MULTILINE)
    if number is None:
        raise ValueError("the format of a kernel event has no line 'ID: ...'")
    names: list[str] = []
    forms: list[str] = []
    offsets: list[int] = []
    for hit in _FIELD.finditer(text):
        declared = hit["text"].strip()
        name = re.sub(r"\[.*\]$", "", declared).split()[-1].lstrip("*")
        size = int(hit["size"])
        if name not in wanted:
            continue
        is_text = declared.startswith("char ") and "[" in declared
        names.append(name)
        forms.append(f"S{size}" if is_text else f"<{'i' if int(hit['signed']) else 'u'}{size}")
        offsets.append(int(hit["at"]))
    missing = sorted(set(wanted) - set(names))
    if missing:
        raise ValueError(f"the kernel's event has no field {', '.join(missing)}; found: {', '.join(names)}")
    size = max(at + np.dtype(form).itemsize for at, form in zip(offsets, forms, strict=True))
    layout = np.dtype({"names": names, "formats": forms, "offsets": offsets, "itemsize": size})
    return EventFormat(int(number[1]), layout)


class PageEvents:
    """The events of a batch of pages.

    Args:
        pages: bytes of whole pages. A page of zeros has no events.
    """

    def __init__(self, pages: np.ndarray) -> None:
        count = len(pages) // PAGE_BYTES
        self._bytes = np.concatenate([pages[: count * PAGE_BYTES], np.zeros(EVENT_BYTES_MAX, np.uint8)])
        self._at, self._time_ns = _walk(self._bytes.view("<u4"), count)
        self._number = self._bytes.view("<u2")[self._at // 2]
        headers = self._bytes[: count * PAGE_BYTES].reshape(count, PAGE_BYTES)[:, :HEADER_BYTES]
        words = np.ascontiguousarray(headers).view("<u8")
        self.lost_ns = words[words[:, 1] & MISSED > 0, 0]
        """The time until which events were lost, for each page after a gap."""

    def of(self, number: int, layout: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the times, in nanoseconds, and the fields of all events with this number."""
        here = np.flatnonzero(self._number == number)
        if not here.size:
            return np.zeros(0, np.uint64), np.zeros(0, layout)
        rows = self._bytes[self._at[here, None] + np.arange(layout.itemsize)]
        return self._time_ns[here], np.ascontiguousarray(rows).view(layout)[:, 0]


def _walk(words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte offset of each event's data in `words`, and its time in nanoseconds."""
    base = np.arange(count) * (PAGE_BYTES // 4)
    time_ns = words[base].astype(np.uint64) | words[base + 1].astype(np.uint64) << np.uint64(32)
    used = np.minimum(words[base + 2] & LENGTH_MASK, PAGE_BYTES - HEADER_BYTES).astype(np.int64)
    at = base + HEADER_BYTES // 4
    end = at + used // 4
    found: list[np.ndarray] = [np.zeros(0, np.int64)]
    times: list[np.ndarray] = [np.zeros(0, np.uint64)]
    live = at < end
    while live.any():
        if not live.all():
            at, end, time_ns = at[live], end[live], time_ns[live]
        head, next_word = words[at], words[at + 1].astype(np.int64)
        kind = (head & 31).astype(np.int64)
        delta = (head >> 5).astype(np.uint64)
        has_length_word = (kind == 0) | (kind == PADDING)
        # After the header comes a length word, one word of time, or the number of words that the type gives.
        length = np.where(has_length_word, next_word // 4, np.where(kind >= TIME_EXTEND, 1, kind))
        is_last = (kind == PADDING) & (delta == 0)
        wide = (next_word.astype(np.uint64) << np.uint64(DELTA_BITS)) + delta
        time_ns = np.where(kind == TIME_STAMP, wide, time_ns + np.where(kind == TIME_EXTEND, wide, delta))
        is_data = kind < PADDING
        found.append((at + 1 + (kind == 0))[is_data] * 4)
        times.append(time_ns[is_data])
        at = at + 1 + length
        live = (at < end) & ~is_last & (length > 0)
    return np.concatenate(found), np.concatenate(times)


TRACEFS = Path("/sys/kernel/tracing")
NAME = "kvtier"
BATCH_PAGES = 2048
"""Most pages that one call of `TraceInstance.read` returns."""
_LOST = ("overrun", "commit overrun", "dropped events")


@contextmanager
def mounted() -> Generator[Path]:
    """Yield the tracing directory. If it is not mounted, mount it for the duration.

    Raises:
        ConfigError: the kernel has no tracefs, or this process may not mount or write it.
    """
    found = next((Path(mount.point) for mount in read_mounts() if mount.kind == "tracefs"), None)
    is_ours = found is None
    if found is None:
        done = subprocess.run(
            ["mount", "-t", "tracefs", "nodev", str(TRACEFS)], capture_output=True, text=True, timeout=10, check=False
        )
        if done.returncode:
            raise ConfigError(
                f"tracefs cannot be mounted on {TRACEFS}: {done.stderr.strip() or 'permission denied'}; run as "
                "root, in a container with CAP_SYS_ADMIN and the host's /sys/kernel/tracing, or use --input FILE"
            )
        found = TRACEFS
    try:
        if not os.access(found / "instances", os.W_OK):
            raise ConfigError(f"no permission to write in {found / 'instances'}; run as root, or use --input FILE")
        yield found
    finally:
        if is_ours:  # the directory stays mounted if another program has opened it
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(["umount", str(found)], capture_output=True, timeout=10, check=False)


class TraceInstance:
    """An instance of tracefs. As a context manager, it removes itself at the end.

    Args:
        tracefs: the tracing directory.
        name: the part of the instance's name after ``kvtier-PID``.
        buffer_bytes: size of the ring buffer of each processor.

    Raises:
        ConfigError: the instance cannot be made.
    """

    def __init__(self, tracefs: Path, name: str, buffer_bytes: int) -> None:
        self.folder = tracefs / "instances" / f"{NAME}-{os.getpid()}-{name}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise ConfigError(
                f"{self.folder} cannot be made: {error.strerror}; run one capture at a time in a process, as root"
            ) from error
        self._pipes: list[int] = []
        self._pages = np.zeros(BATCH_PAGES * PAGE_BYTES, np.uint8)
        self.batch_bytes = len(self._pages)
        try:
            self.write("tracing_on", "0")
            self.write("trace_clock", "mono")
            self.write("options/overwrite", "1")  # a full buffer drops the oldest events and marks the gap
            self.write("buffer_size_kb", str(-(-buffer_bytes // 1024)))
            cpus = sorted((self.folder / "per_cpu").glob("cpu*"), key=lambda it: int(it.name[3:]))
            self._stats = [cpu / "stats" for cpu in cpus]
            self._pipes = [os.open(cpu / "trace_pipe_raw", os.O_RDONLY | os.O_NONBLOCK) for cpu in cpus]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop tracing and remove the instance. A second call has no effect."""
        with suppress(ConfigError):
            self.write("tracing_on", "0")
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes = []
        with suppress(OSError):
            self.folder.rmdir()

    def write(self, name: str, text: str) -> None:
        """Write a file of the instance.

        Raises:
            ConfigError: the kernel refuses the text.
        """
        try:
            with (self.folder / name).open("w") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self.folder / name}: the kernel refuses {text!r}: {error.strerror}") from error

    def append(self, name: str, text: str) -> None:
        """Append to a file that holds a list."""
        # open("a") would seek to the end, which these files refuse.
        file = os.open(self.folder / name, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def has(self, event: str) -> bool:
        """Return whether the kernel has the event, such as ``block/block_rq_issue``."""
        return (self.folder / "events" / event).exists()

    def enable(self, event: str, fields: tuple[str, ...], condition: str = "") -> EventFormat:
        """Record an event whenever `condition` holds. Return the event's format with `fields`.

        Raises:
            ConfigError: the kernel lacks the event or a field, or refuses the condition.
        """
        folder = f"events/{event}"
        try:
            found = event_format((self.folder / folder / "format").read_text(), fields)
        except (OSError, ValueError) as error:
            raise ConfigError(f"kernel event {event}: {error}") from error
        if condition:
            self.write(f"{folder}/filter", condition)
        self.write(f"{folder}/enable", "1")
        return found

    def read(self) -> np.ndarray:
        """Return at most `BATCH_PAGES` ready pages, or an empty array if there are none. Never wait."""
        count = 0
        view = memoryview(self._pages.data).cast("B")
        self._pipes.append(self._pipes.pop(0))  # another processor comes first, so that a busy one starves none
        for pipe in self._pipes:
            while count < BATCH_PAGES:
                try:
                    got = os.readv(pipe, [view[count * PAGE_BYTES : (count + 1) * PAGE_BYTES]])
                except BlockingIOError:
                    break
                if not got:
                    break
                view[count * PAGE_BYTES + got : (count + 1) * PAGE_BYTES] = bytes(PAGE_BYTES - got)
                count += 1
        return self._pages[: count * PAGE_BYTES]

    def lost(self) -> int:
        """Return the number of events that the kernel could not keep, over all processors."""
        total = 0
        for path in self._stats:
            for line in path.read_text().splitlines():
                name, _, value = line.partition(":")
                total += int(value) if name in _LOST else 0
        return total


def remove_stale(tracefs: Path) -> list[str]:
    """Remove the instances of captures that were killed. Return their names."""
    removed: list[str] = []
    for folder in (tracefs / "instances").glob(f"{NAME}-*"):
        hit = re.fullmatch(rf"{NAME}-(\d+)-\w+", folder.name)
        # A killed capture may have had this process's id, because each container may use the id 1.
        if hit is None or (int(hit[1]) != os.getpid() and Path(f"/proc/{hit[1]}").exists()):
            continue
        with suppress(OSError):  # in use by this process, or by one in another PID namespace
            folder.rmdir()
            removed.append(folder.name)
    return removed
