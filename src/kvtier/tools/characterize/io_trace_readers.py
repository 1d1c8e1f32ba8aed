"""Reads recordings in files as one `IoTrace`: the text of blkparse, or kvtier's journals. Their content shows which.

A journal gives requests of the application's layer: the objects that tiers read and wrote. FORMAT.md lists its fields.
An object has no address, so each name gets its own position. This way, repeated reads are recognized, and no object
follows another.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.characterize.blktrace import looks_like_blkparse, read_blkparse
from kvtier.tools.characterize.io_trace import NO_PROCESS, IoKind, IoLayer, IoTrace, rows_of, transfers
from kvtier.tools.trace.trace_files import LineErrors, number, short, text_lines, whole

LINE_CHARACTERS_MAX = 1 << 16
OBJECTS_MAX = 20_000_000
"""Most objects in all journals together. They take about 3 GiB of memory."""
NAMES_MAX = 1 << 22
"""Most different names."""
TIERS_MAX = 1 << 10
TEXT_CHARACTERS_MAX = 256
GAP_BYTES = 1 << 20
"""Distance between the positions of two names, too large for one object to follow the other."""
OBJECT_BYTES_MAX = 1 << 40
POSITION_MAX = 1 << 52
VERSION = 1
WAYS = ("read", "write")
DONE = "done"
_PROCESS = re.compile(r"journal-[^-]+-(\d{1,9})-\d+(-[0-9a-f]+)?\.jsonl")


@dataclass(frozen=True, slots=True)
class ObjectLog:
    """The objects that tiers read or wrote."""

    trace: IoTrace
    """Requests of source ``log``. `bytes` count the frames of all ranks, and `place` is a tier."""
    payload_bytes: np.ndarray
    """Bytes of the engine's KV in each of `trace.requests`, over all ranks."""


@dataclass(frozen=True, slots=True)
class WriteAmplification:
    """How many bytes reach the device for the payload of objects, in the time that a journal and a capture share."""

    seconds: float
    objects: int
    """Number of objects whose writes began and ended in the shared time."""
    payload_bytes: int
    framed_bytes: int
    device_bytes: int
    """Bytes that the chosen processes wrote to the device, or that all processes wrote if none was chosen."""
    unattributed_bytes: int
    """Bytes that kernel threads wrote to the device in the same time, if processes were chosen: a file system's
    journal, or writeback for these processes or others."""

    @property
    def framed_ratio(self) -> float | None:
        """Return the bytes of frames divided by the bytes of payload, or None without writes."""
        return self.framed_bytes / self.payload_bytes if self.payload_bytes else None

    @property
    def device_ratio(self) -> float | None:
        """Return the bytes written to the device divided by the bytes of payload, or None without writes."""
        return self.device_bytes / self.payload_bytes if self.payload_bytes else None


def looks_like_journal(line: str) -> bool:
    """Return whether `line` may be the first line of a journal."""
    try:
        value: object = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and "kind" in value


def read_objects(paths: Sequence[Path]) -> ObjectLog:
    """Read the objects in journals of one run.

    Args:
        paths: journals of one process each, which may be compressed with gzip or zstd.

    Raises:
        ConfigError: a journal cannot be read, a line has another format, or no journal has an object.
    """
    reader = _JournalObjects()
    for path in paths:
        reader.read(path)
    if not reader.rows:
        listed = ", ".join(str(path) for path in paths[:3])
        raise ConfigError(f"trace {listed} has no object that was read or written; allowed: at least one")
    return reader.log()


def write_amplification(log: ObjectLog, blocks: IoTrace) -> WriteAmplification:
    """Join a journal with the requests that the kernel saw.

    Args:
        log: the journal.
        blocks: a capture from the same time and machine.

    Raises:
        ConfigError: the recordings have no time in common.
    """
    objects = log.trace.requests
    began_s = max(log.trace.began_s, blocks.began_s)
    ended_s = min(log.trace.began_s + log.trace.seconds, blocks.began_s + blocks.seconds)
    if not blocks.began_s or ended_s <= began_s:
        raise ConfigError(
            f"the journal covers seconds {log.trace.began_s:.3f} to {log.trace.began_s + log.trace.seconds:.3f} of "
            f"Unix time, but the capture {blocks.began_s:.3f} to {blocks.began_s + blocks.seconds:.3f}; use recordings "
            "of the same time"
        )
    written = objects["is_write"] & (objects["issued_s"] >= began_s - log.trace.began_s - 1e-6)
    written &= objects["completed_s"] <= ended_s - log.trace.began_s + 1e-6
    device = transfers(blocks.at(IoLayer.DEVICE))
    device = device[device["is_write"]]
    device = device[(device["issued_s"] >= began_s - blocks.began_s) & (device["issued_s"] <= ended_s - blocks.began_s)]
    of_kernel = device[device["process"] == NO_PROCESS] if blocks.chosen is not None else device[:0]
    return WriteAmplification(
        seconds=ended_s - began_s,
        objects=int(written.sum()),
        payload_bytes=int(log.payload_bytes[written].sum()),
        framed_bytes=int(objects["bytes"][written].sum()),
        device_bytes=int(blocks.of_chosen(device)["bytes"].sum()),
        unattributed_bytes=int(of_kernel["bytes"].sum()),
    )


_OBJECT = np.dtype(
    [
        ("ended_s", "<f8"), ("seconds", "<f8"), ("position", "<u8"), ("bytes", "<u8"), ("payload", "<u8"),
        ("place", "<u4"), ("process", "<i4"), ("is_write", "?"),
    ]
)  # fmt: skip
"""The stored form of an object."""
_PACKED = struct.Struct("<ddQQQIi?")
"""The same layout for a single line."""


class _JournalObjects:
    """Collects the objects of all journals."""

    def __init__(self) -> None:
        self.rows = bytearray()
        """Rows of `_OBJECT`."""
        self._names: dict[str, int] = {}
        """The position of each name."""
        self._free = 0
        self._tiers: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._remarks: list[str] = []
        self._processes: dict[int, str] = {}

    def read(self, path: Path) -> None:
        """Read one journal."""
        named = _PROCESS.match(path.name)
        process = int(named[1]) if named else NO_PROCESS
        if named:
            self._processes[process] = "kvtier"
        for at, line in text_lines(path):
            if not line.endswith("\n"):
                self._remarks.append(f"{path.name}: line {at}, the last one, is cut off and not counted.")
                break
            with LineErrors(path, at):
                if len(line) > LINE_CHARACTERS_MAX:
                    raise ConfigError(f"the line has {len(line)} characters; allowed: up to {LINE_CHARACTERS_MAX}")
                value: object = json.loads(line)
                if not isinstance(value, dict):
                    raise ConfigError(f"{short(line.strip())} is not a JSON object")
                self._add(cast("dict[str, Any]", value), process)

    def _add(self, fields: dict[str, Any], process: int) -> None:
        kind = fields["kind"]
        if kind == "journal" and fields["version"] != VERSION:
            raise ConfigError(f"a journal of version {short(fields['version'])}; allowed: {VERSION}")
        if kind != "object":
            return
        way = fields["way"]
        if way not in WAYS:
            raise ConfigError(f"way is {short(way)}; allowed: {', '.join(WAYS)}")
        outcome = _text(fields, "outcome")
        if outcome != DONE:
            label = f"{way}s that ended {outcome}"
            if label in self._counts or len(self._counts) < TIERS_MAX:
                self._counts[label] += 1
            return
        seconds, size = number(fields, "seconds"), number(fields, "bytes")
        if seconds < 0 or not 0 < size <= OBJECT_BYTES_MAX or size != int(size):
            raise ConfigError(
                f"an object of {size:g} bytes took {seconds:g} s; allowed: 1 to 2^40 bytes, and at least 0 s"
            )
        self.rows += _PACKED.pack(
            number(fields, "time_s"),
            seconds,
            self._position_of(_text(fields, "name"), int(size)),
            int(size),
            whole(fields, "payload_bytes"),
            _index(self._tiers, _text(fields, "tier")),
            process,
            way == "write",
        )
        if len(self.rows) > OBJECTS_MAX * _OBJECT.itemsize:
            raise ConfigError(f"more than {OBJECTS_MAX} completed objects in all journals together")

    def _position_of(self, name: str, size: int) -> int:
        if name not in self._names:
            if len(self._names) >= NAMES_MAX or self._free >= POSITION_MAX - OBJECT_BYTES_MAX:
                raise ConfigError(
                    f"more than {NAMES_MAX} names of objects, or more than 2^52 bytes, in all journals together"
                )
            self._names[name] = self._free
            self._free += size + GAP_BYTES
        return self._names[name]

    def log(self) -> ObjectLog:
        """Return all objects. The first one begins at time 0."""
        seen = np.frombuffer(self.rows, _OBJECT)
        ended_s = seen["ended_s"]
        issued_s = ended_s - seen["seconds"]
        began_s = float(issued_s.min())
        rows = rows_of(
            len(seen),
            issued_s=issued_s - began_s,
            completed_s=ended_s - began_s,
            **{name: seen[name] for name in ("position", "bytes", "place", "process", "is_write")},
            kind=IoKind.DATA,
            layer=IoLayer.APPLICATION,
        )
        order = np.argsort(rows["issued_s"], kind="stable")
        remarks = ["Objects have no address: none counts as sequential, and one that is read again has the same name."]
        trace = IoTrace(
            "log",
            rows[order],
            float(ended_s.max()) - began_s,
            began_s=began_s,
            processes=self._processes,
            places={at: tier for tier, at in self._tiers.items()},
            counts=self._counts,
            remarks=remarks + self._remarks,
        )
        return ObjectLog(trace, seen["payload"][order])


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not 0 < len(value) <= TEXT_CHARACTERS_MAX:
        raise ConfigError(f"{name} is {short(value)}; allowed: 1 to {TEXT_CHARACTERS_MAX} characters")
    return value


def _index(known: dict[str, int], text: str) -> int:
    if text not in known and len(known) >= TIERS_MAX:
        raise ConfigError(f"more than {TIERS_MAX} tiers in all journals together")
    return known.setdefault(text, len(known))


ALLOWED = "the text of blkparse (without -f), and kvtier's journal"


def read_recordings(paths: Sequence[Path]) -> IoTrace:
    """Read recordings of one run.

    Args:
        paths: one text of blkparse, or kvtier's journals. They may be compressed with gzip or zstd.

    Raises:
        ConfigError: a file cannot be read, its format is unknown, or the files do not belong together.
    """
    tools = {_tool(path) for path in paths}
    if len(tools) != 1 or (len(paths) > 1 and tools == {"blkparse"}):
        raise ConfigError(
            f"{len(paths)} recordings ({', '.join(sorted(tools)) or 'none'}); allowed: one text of blkparse, or "
            "journals"
        )
    return read_objects(paths).trace if tools == {"journal"} else read_blkparse(paths[0])


def _tool(path: Path) -> str:
    number, first = next(text_lines(path), (0, ""))
    if not number:
        raise ConfigError(f"trace {path} is empty; allowed: {ALLOWED}")
    if looks_like_blkparse(first):
        return "blkparse"
    if looks_like_journal(first):
        return "journal"
    raise ConfigError(f"trace {path}, line {number}: {short(first.strip())}: unknown format; allowed: {ALLOWED}")
