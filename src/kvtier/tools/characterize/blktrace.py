"""Reads the text of `blkparse` in its default format.

An event is one line. An issue (D) and its completion (C) make up a request of the device. Q queues a bio of the file
system. If one recorded device is stacked on another (A is a remap), only the bios of the upper device and the requests
of the lower one count. The manual page blkparse(1) of blktrace 1.2.0 describes the format.
"""

import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.characterize.block_events import SEEN, join, way_of
from kvtier.tools.characterize.io_trace import NO_PROCESS, SECTOR_BYTES, IoTrace, by_time, kinds_of, pair
from kvtier.tools.trace.trace_files import LineErrors, short, text_lines

LINE_CHARACTERS_MAX = 4096
EVENTS_MAX = 20_000_000
"""Most events in one recording. They take about 800 MiB of memory."""
NUMBER_MAX = (1 << 63) - 1
LETTERS_MAX = 256
ALLOWED = "blkparse's default format, without -f"
COMMANDS_MAX = 1 << 20
"""Most processes whose names are kept."""

_LINE = re.compile(
    r"\s*(?P<device>\d+,\d+)\s+\d+\s+\d+\s+(?P<seconds>\d+)\.(?P<ns>\d+)\s+(?P<process>\d+)\s+(?P<action>[A-Za-z]{1,2})"
    r"\s+(?P<rwbs>[A-Z]{1,8})"
    r"\s*(?:(?P<sector>\d+)(?: \+ (?P<sectors>\d+)| / \d+)?(?: <- \((?P<source>\d+,\d+)\) \d+)?)?"
    r"(?:\s*\([0-9a-f .]*\))?(?:\s*\[(?P<command>.*)\](?: \d+)?)?\s*",
    re.ASCII | re.DOTALL,
)
"""The fields of a line: device, processor, number, time, process, action, RWBS; sector, length or start of a split, and
the origin of a remap; payload or elapsed time; command, or error of a completion."""
_MESSAGE = re.compile(r"\s*\d+,\d+\s+\d+\s+\d+\s+\d+\.\d+\s+\d+\s+m\s")
_SUMMARY = re.compile(r"(CPU\d+|Total) \(")
_SKIPS = re.compile(r"Skips: [\d.,']+ forward \(([\d.,']+) -")
_KERNEL_THREAD = re.compile(
    r"(kworker|kswapd|jbd2|ksoftirqd|kjournald|flush|pdflush|swapper|md\d|loop\d|xfsaild|dmcrypt)"
)
_ACTIONS = "QAGIDCMFXSRB"
_OTHER_ACTIONS = {"P", "U", "T", "UT", "m"}
_COUNTED = {"M": "merges", "F": "merges", "X": "splits", "R": "requeues", "S": "sleeps", "B": "bounces", "A": "remaps"}
_WITHOUT_SIZE = "XSB"
"""Actions that require no size, because they are only counted."""


def looks_like_blkparse(line: str) -> bool:
    """Return whether `line` may be the first line of blkparse's default format."""
    return line.startswith("Input file ") or _LINE.fullmatch(line) is not None


_EVENT = np.dtype(
    [
        ("time_ns", "<i8"), ("device", "<u4"), ("sector", "<u8"), ("sectors", "<u8"), ("process", "<i4"),
        ("action", "u1"), ("letters", "u1"), ("source", "<u4"),
    ]
)  # fmt: skip
"""The stored form of a line.

`letters` is the index of the RWBS letters. `source` is the device from which a bio was remapped, or 0.
"""
_PACKED = struct.Struct("<qIQQiBBI")
"""The same layout for a single line."""


class _Events:
    """All events, in the order of their lines."""

    def __init__(self) -> None:
        self.rows = bytearray()
        """Rows of `_EVENT`."""
        self.rwbs: dict[str, int] = {}
        """Index of each different string of RWBS letters."""
        self.commands: dict[int, str] = {}
        self.counts: Counter[str] = Counter()
        self.last_ns = 0
        self.first_ns: int | None = None

    def add(self, found: re.Match[str]) -> None:
        """Add one line.

        Raises:
            ConfigError: a field is out of range or unknown.
        """
        fields = found.groupdict()
        action = fields["action"]
        time_ns = int(fields["seconds"]) * 10**9 + int(fields["ns"][:9])
        _check(time_ns, "time")
        self.first_ns = time_ns if self.first_ns is None else min(self.first_ns, time_ns)
        self.last_ns = max(self.last_ns, time_ns)
        if action in _OTHER_ACTIONS:
            return
        if len(action) > 1 or action not in _ACTIONS:
            raise ConfigError(
                f"unknown action {action!r}; allowed: {', '.join(_ACTIONS)}, {', '.join(sorted(_OTHER_ACTIONS))}"
            )
        if action in _COUNTED:
            self.counts[_COUNTED[action]] += 1
        if action in _WITHOUT_SIZE:
            return
        rwbs = fields["rwbs"]
        sectors = int(fields["sectors"] or 0)
        if rwbs == "N" or not (sectors or rwbs.startswith("F")):
            self.counts["commands without data"] += 1  # SCSI commands have a payload in place of a sector
            return
        if rwbs not in self.rwbs and len(self.rwbs) >= LETTERS_MAX:
            raise ConfigError(
                f"RWBS {short(rwbs)} is one more than the {LETTERS_MAX} different values that a recording may have"
            )
        process, command = int(fields["process"]), fields["command"]
        if action in "QG" and command and command != "(null)" and len(self.commands) < COMMANDS_MAX:
            self.commands[process] = command
        if action == "C" and command not in {None, "0"}:
            self.counts["failed"] += 1
        self.rows += _PACKED.pack(
            time_ns,
            _device(fields["device"]),
            _check(int(fields["sector"] or 0), "sector", NUMBER_MAX // SECTOR_BYTES),
            _check(sectors, "number of sectors", 1 << 32),
            _check(process, "process", (1 << 31) - 1),
            ord(action),
            self.rwbs.setdefault(rwbs, len(self.rwbs)),
            _device(fields["source"] or "0,0"),
        )


def read_blkparse(path: Path) -> IoTrace:
    """Read the text that blkparse wrote.

    Args:
        path: the text, which may be compressed with gzip or zstd.

    Returns:
        Bios at `IoLayer.FILE_SYSTEM`, and requests at `IoLayer.DEVICE`. A bio ends with the request that has its last
        sector. On a stacked device it ends only with its own completion.

    Raises:
        ConfigError: the text cannot be read, a line has another format, or there are no events or too many.
    """
    events = _Events()
    remarks = ["The text of blkparse has no date, and its process numbers are those of threads."]
    lost = 0
    is_summary = False
    for number, line in text_lines(path):
        is_summary = is_summary or _SUMMARY.match(line) is not None
        if is_summary:
            skipped = _SKIPS.match(line)
            lost += int(re.sub(r"\D", "", skipped[1])) if skipped else 0
        elif not line.endswith("\n") and len(line) <= LINE_CHARACTERS_MAX:
            remarks.append(f"Line {number}, the last one, is cut off and not counted.")
        else:
            with LineErrors(path, number):
                _add_line(events, line)
    rows = np.frombuffer(events.rows, _EVENT)
    if not np.isin(rows["action"], [*b"QD"]).any():
        raise ConfigError(f"trace {path} has no event Q or D of blkparse; allowed: at least one")
    return _trace(events, rows[np.argsort(rows["time_ns"], kind="stable")], lost, remarks)


def _add_line(events: _Events, line: str) -> None:
    if len(line) > LINE_CHARACTERS_MAX:
        raise ConfigError(
            f"the line has {len(line)} characters; allowed: {ALLOWED}, up to {LINE_CHARACTERS_MAX} a line"
        )
    found = _LINE.fullmatch(line)
    if found is not None:
        events.add(found)
    elif not line.startswith("Input file ") and not _MESSAGE.match(line):
        raise ConfigError(f"{short(line.strip())} is not an event; allowed: {ALLOWED}")
    if len(events.rows) > EVENTS_MAX * _EVENT.itemsize:
        raise ConfigError(f"more than {EVENTS_MAX} events in the recording")


def _trace(events: _Events, rows: np.ndarray, lost: int, remarks: list[str]) -> IoTrace:
    """Build the trace of all events. `rows` are the rows of `events` in order of time."""
    first_ns = events.first_ns or 0
    is_write, kind = (of_letters[rows["letters"]] for of_letters in kinds_of(np.array([*events.rwbs], "S")))
    threads = [number for number, name in events.commands.items() if _KERNEL_THREAD.match(name)]
    seen = np.zeros(len(rows), SEEN)
    for name, values in (
        ("time_ns", rows["time_ns"]), ("sector", rows["sector"]), ("device", rows["device"]), ("is_write", is_write),
        ("kind", kind), ("process", np.where(np.isin(rows["process"], threads), NO_PROCESS, rows["process"])),
        ("bytes", rows["sectors"] * np.uint64(SECTOR_BYTES)),
    ):  # fmt: skip
        seen[name] = values
    action, source, device = rows["action"], rows["source"], seen["device"]

    def at(actions: str) -> np.ndarray:
        return np.flatnonzero(np.isin(action, [ord(each) for each in actions]))

    remaps, makers, issues = at("A"), at("QG"), at("D")
    bios = makers[action[makers] == ord("Q")]
    key = way_of(seen, seen["sector"])
    time_ns = seen["time_ns"]
    remapped = pair(time_ns[remaps], key[remaps], time_ns[bios], key[bios])
    is_stacked = np.isin(source[remaps], device[bios]) & (source[remaps] != device[remaps])
    lower = bios[remapped[is_stacked & (remapped >= 0)]]

    ends = at("C")
    # A device without requests reports the ends of bios.
    is_bio_end = ~np.isin(device[ends], device[issues])
    gaps = np.zeros((min(lost, 1), 2), np.uint64)  # after lost events `join` pairs with more caution
    bio_ends, request_ends = seen[ends[is_bio_end]], seen[ends[~is_bio_end]]
    requests, above = join(seen[makers], bio_ends, seen[issues], request_ends, seen[at("R")], gaps, first_ns)
    uppers = _with_lower(device[issues], device[remaps], source[remaps])
    is_upper = np.isin(requests["place"], uppers)
    above = above[(action[makers] == ord("Q")) & ~np.isin(makers, lower)]
    if len(lower) or is_upper.any():
        remarks.append("Devices are stacked: bios are counted at the upper one, requests at the lower one.")
    if lost:
        remarks.append(f"The summary of blkparse counts {lost} skipped events.")
    used = set(requests["process"].tolist()) | set(above["process"].tolist())
    return IoTrace(
        "file",
        by_time(requests[~is_upper], above),
        (events.last_ns - first_ns) / 1e9,
        processes={number: name for number, name in events.commands.items() if number in used},
        places={int(each): f"{each >> 20},{each & 0xFFFFF}" for each in np.unique(device).tolist()},
        lost_events=lost,
        counts=events.counts,
        remarks=remarks,
    )


def _with_lower(issued: np.ndarray, remapped: np.ndarray, source: np.ndarray) -> list[int]:
    """Return the devices whose bios are remapped to a lower device that issued requests of its own."""
    pairs = {(int(upper), int(lower)) for upper, lower in zip(source, remapped, strict=True)}
    with_issues = set(np.unique(issued).tolist())
    return [upper for upper, lower in pairs if upper != lower and lower in with_issues]


def _device(text: str) -> int:
    major, _, minor = text.partition(",")
    return _check(int(major), "major number", 0xFFF) << 20 | _check(int(minor), "minor number", 0xFFFFF)


def _check(value: int, name: str, most: int = NUMBER_MAX) -> int:
    if not 0 <= value <= most:
        raise ConfigError(f"{name} {short(value)}; allowed: 0 to {most}")
    return value
