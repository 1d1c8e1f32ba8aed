"""fio's logs of single requests: `write_lat_log`, `write_bw_log` and `write_iolog`.

A line of a latency or bandwidth log, made with `log_offset=1` and without `log_avg_msec`, is a completed request: time
in ms, latency in ns or bandwidth, direction, bytes, offset, priority. An iolog has the issue of each request, in us in
version 3; version 2 has only waits. Formats: the manual page fio(1). It gives the bandwidth of a request in KiB/s; fio
3.33 writes units of 1000 bytes a second, as its latencies of the same requests prove.
"""

import itertools
import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvtier.characterize.events import NO_PROCESS, IoKind, IoLayer, IoTrace, by_time, rows_of
from kvtier.errors import ConfigError
from kvtier.trace.trace_files import LineErrors, short, text_lines

LINE_CHARACTERS_MAX = 8192
REQUESTS_MAX = 20_000_000
"""Requests of all logs together: about 1.5 GiB of memory."""
NUMBER_MAX = 1 << 62
FILES_MAX = 1 << 16
CALENDAR_MS = 10**12
"""Times from here on count from 1970 (`log_unix_epoch`)."""

_LINE = re.compile(
    r"\s*(\d{1,19}), (\d{1,19}), ([0-3]), (\d{1,19})(?:, (\d{1,19}))?(?:, (\d{1,5}|0x[0-9a-f]{1,8}))?\s*", re.ASCII
)
_NAME = re.compile(r"_(lat|clat|slat|bw|iops|hist)(?:\.(\d{1,9}))?\.log(?:\.gz|\.zst)?$", re.ASCII)
_IOLOG = re.compile(r"fio version (\d+) iolog\s*", re.ASCII)
_FILE_ACTION = re.compile(r"(\S.*) (add|open|close)\s*")
_IO_ACTION = re.compile(r"(\S.*) (wait|read|write|sync|datasync|trim) (\d{1,19}) (\d{1,19})\s*", re.ASCII)
_TIMED = re.compile(r"(\d{1,19}) (.*)", re.ASCII | re.DOTALL)
_TRIM = 2
_SYNC = 3


def looks_like_fio_log(line: str) -> bool:
    """Whether `line` may be the first of one of fio's logs."""
    return _IOLOG.fullmatch(line) is not None or _LINE.fullmatch(line) is not None


def read_fio_logs(paths: Sequence[Path]) -> IoTrace:
    """Read logs of one run of fio; each file is one job, or an iolog of several.

    Args:
        paths: latency, bandwidth or io logs, plain, gzip or zstd. `NAME_lat.2.log` is of job 2.

    Returns:
        Requests at `IoLayer.APPLICATION`. `process` is the number of the job, and `place` the file, or a job's log.

    Raises:
        ConfigError: one cannot be read, is empty or of another kind, or two count the same requests.
    """
    if not 0 < len(paths) <= FILES_MAX:
        raise ConfigError(f"{len(paths)} logs of fio; allowed: 1 to {FILES_MAX}")
    reader = _FioRequests()
    kinds = {reader.read(path, number) for number, path in enumerate(paths)}
    if len(kinds) > 1:
        raise ConfigError(
            f"logs of fio of several kinds ({', '.join(sorted(kinds))}) count the same requests; allowed: one kind"
        )
    return reader.trace(kinds.pop())


class _FioRequests:
    """The requests of all files."""

    def __init__(self) -> None:
        self.issued_s = array("d")
        self.completed_s = array("d")
        self.position = array("Q")
        self.bytes = array("Q")
        self.place = array("I")
        self.process = array("i")
        self.direction = array("B")
        self.places: dict[int, str] = {}
        self.jobs: dict[int, str] = {}
        self.remarks: list[str] = []
        self.has_calendar: set[bool] = set()

    def read(self, path: Path, number: int) -> str:
        """Read one file; its kind: ``"lat"``, ``"clat"``, ``"bw"``, ``"iolog 2"`` or ``"iolog 3"``."""
        before = len(self.issued_s)
        log: _JobLog | None = None
        lines = text_lines(path)
        first_number, first = next(lines, (0, ""))
        version = _IOLOG.fullmatch(first)
        if version is not None:
            kind = f"iolog {version[1]}"
            if version[1] not in {"2", "3"}:
                raise ConfigError(f"trace {path}, line {first_number}: iolog of version {version[1]}; allowed: 2 and 3")
            act = _Iolog(self, number, is_timed=version[1] == "3").add
        else:
            kind, job = _kind_of(path)
            self.places[number] = path.name
            self.jobs[job] = f"job {job}"
            log = _JobLog(self, number, job, kind)
            act = log.add
            lines = itertools.chain([(first_number, first)] if first_number else [], lines)
        for line_number, line in lines:
            if not line.endswith("\n") and len(line) <= LINE_CHARACTERS_MAX:
                self.remarks.append(f"{path.name}: line {line_number}, the last one, is cut off and not counted.")
                break
            with LineErrors(path, line_number):
                if len(line) > LINE_CHARACTERS_MAX:
                    raise ConfigError(f"{len(line)} characters; allowed: a line of fio, up to {LINE_CHARACTERS_MAX}")
                act(line)
                if len(self.issued_s) > REQUESTS_MAX:
                    raise ConfigError(f"more requests; allowed: {REQUESTS_MAX}")
        if len(self.issued_s) == before:
            raise ConfigError(f"trace {path} has no request of fio; allowed: at least one")
        if log is not None and not log.has_offsets and len(self.issued_s) > before + 1:
            raise ConfigError(f"trace {path}: its lines have no offset; allowed: logs made with --log_offset=1")
        return kind

    def request(
        self, issued_s: float, completed_s: float, position: int, size: int, place: int, job: int, way: int
    ) -> None:
        """Add one request; `way` is fio's number of its direction."""
        if max(position, size) > NUMBER_MAX:
            raise ConfigError(f"{max(position, size)} bytes; allowed: at most {NUMBER_MAX}")
        self.issued_s.append(issued_s)
        self.completed_s.append(completed_s)
        self.position.append(position)
        self.bytes.append(size)
        self.place.append(place)
        self.process.append(job)
        self.direction.append(way)

    def trace(self, kind: str) -> IoTrace:
        """All requests; the first one begins at 0."""
        issued_s = np.frombuffer(self.issued_s, np.float64)
        completed_s = np.frombuffer(self.completed_s, np.float64)
        direction = np.frombuffer(self.direction, np.uint8)
        if len(self.has_calendar) > 1:
            raise ConfigError("some logs count from 1970 and some from the start of fio; allowed: one of them")
        began_s = float(issued_s.min())
        rows = rows_of(
            len(issued_s),
            issued_s=issued_s - began_s,
            completed_s=completed_s - began_s,
            position=np.frombuffer(self.position, np.uint64),
            bytes=np.frombuffer(self.bytes, np.uint64),
            place=np.frombuffer(self.place, np.uint32),
            process=np.frombuffer(self.process, np.int32),
            is_write=direction == 1,
            kind=np.select([direction == _TRIM, direction == _SYNC], [IoKind.DISCARD, IoKind.FLUSH], IoKind.DATA),
            layer=IoLayer.APPLICATION,
        )
        last_s = float(np.nanmax(np.maximum(issued_s, np.nan_to_num(completed_s, nan=-np.inf)))) - began_s
        self.remarks += _REMARKS[kind]
        return IoTrace(
            "file",
            by_time(rows),
            last_s,
            began_s=began_s if True in self.has_calendar else 0.0,
            processes=self.jobs,
            places=self.places,
            remarks=self.remarks,
        )


_REMARKS = {
    "lat": ["The times of completions are in whole ms, as fio logs them; a request began its latency before."],
    "clat": ["The times of completions are in whole ms, as fio logs them; latencies are from submission on."],
    "bw": ["The times of completions are in whole ms, as fio logs them; latencies are bytes over logged bandwidth."],
    "iolog 2": ["An iolog of version 2 has waits but no times and no completions: rates and depths are unknown."],
    "iolog 3": ["An iolog has no completions and no jobs: depth, latency and what is per process are unknown."],
}


def _kind_of(path: Path) -> tuple[str, int]:
    """What a log's values are, which its name alone has, and its job."""
    found = _NAME.search(path.name)
    if found is None or found[1] not in _REMARKS:
        raise ConfigError(
            f"trace {path}: the name says what the values are; allowed: NAME_lat.N.log, NAME_clat.N.log and "
            "NAME_bw.N.log, as fio names them, and io logs"
        )
    return found[1], int(found[2] or 1)


class _JobLog:
    """Lines of a latency or bandwidth log of one job."""

    def __init__(self, reader: "_FioRequests", place: int, job: int, kind: str) -> None:
        self._reader, self._place, self._job, self._kind = reader, place, job, kind
        self.has_offsets = False
        """Whether a fifth number is surely an offset: fio 3.2 and later end a line with a priority of 0 or 1."""

    def add(self, line: str) -> None:
        """One line.

        Raises:
            ConfigError: it is no request.
        """
        found = _LINE.fullmatch(line)
        if found is None:
            raise ConfigError(
                f"{short(line.strip())}; allowed: time in ms, value, direction, bytes, offset, as fio writes"
            )
        time_ms, value, way, size = (int(text) for text in found.groups()[:4])
        if found[5] is None:
            raise ConfigError("no offset; allowed: logs made with --log_offset=1")
        self.has_offsets = self.has_offsets or found[6] is not None or int(found[5]) > 1
        if not size and way < _TRIM:
            raise ConfigError("0 bytes: an average; allowed: logs of single requests, without --log_avg_msec")
        if time_ms > NUMBER_MAX or (self._kind == "bw" and not value):
            raise ConfigError(f"{short(line.strip())}: a time or bandwidth out of range")
        self._reader.has_calendar.add(time_ms >= CALENDAR_MS)
        latency_s = size / (value * 1000) if self._kind == "bw" else value / 1e9
        completed_s = time_ms / 1e3
        self._reader.request(completed_s - latency_s, completed_s, int(found[5]), size, self._place, self._job, way)


class _Iolog:
    """Lines of an iolog."""

    def __init__(self, reader: "_FioRequests", number: int, *, is_timed: bool) -> None:
        self._reader, self._is_timed = reader, is_timed
        self._first = number << 16
        self._places: dict[str, int] = {}
        self._waited_us = 0

    def add(self, line: str) -> None:
        """One line.

        Raises:
            ConfigError: it is no action, or too many files are named.
        """
        now_us = self._waited_us
        rest = line
        if self._is_timed:
            timed = _TIMED.fullmatch(line)
            if timed is None:
                raise ConfigError(f"{short(line.strip())}; allowed: time in us, file, action, offset, length")
            now_us, rest = int(timed[1]), timed[2]
        if _FILE_ACTION.fullmatch(rest):
            return
        found = _IO_ACTION.fullmatch(rest)
        if found is None or (self._is_timed and found[2] == "wait") or now_us > NUMBER_MAX:
            raise ConfigError(f"{short(line.strip())}; allowed: a file, an action of fio's iolog, offset and length")
        name, action, offset, size = found[1], found[2], int(found[3]), int(found[4])
        if action == "wait":
            self._waited_us = min(self._waited_us + offset, NUMBER_MAX)
            return
        if name not in self._places:
            if len(self._places) >= FILES_MAX:
                raise ConfigError(f"more files; allowed: {FILES_MAX} in an iolog")
            self._places[name] = self._first + len(self._places)
            self._reader.places[self._places[name]] = name
        way = {"read": 0, "write": 1, "trim": _TRIM}.get(action, _SYNC)
        self._reader.request(now_us / 1e6, np.nan, offset, size, self._places[name], NO_PROCESS, way)
