"""Which reader a file needs, from what its first line says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Trace
from kvtier.trace.formats.kv_events import EventBatches
from kvtier.trace.formats.lengths_csv import LengthRows
from kvtier.trace.formats.request_lines import UNITS_S, RequestLines
from kvtier.trace.formats.session_lines import SessionLines
from kvtier.trace.formats.text_lines import TextLines
from kvtier.trace.io import Place, files_of, is_msgpack, text_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a trace is read, where it leaves that open."""

    block_tokens: int | None = None
    """Tokens of a block; None takes the trace's own, 256 for sessions, 64 for text."""
    window_h: float = 10.0
    """Over how many hours sessions without absolute times start."""
    seed: int = 1
    """Of the draw of their starts."""
    time_unit: str = "ms"
    """Of `timestamp` in request lines, and in text where it does not count from 1970."""
    tokenizer: Path | None = None
    """For text."""

    def __post_init__(self) -> None:
        if self.block_tokens is not None and not 1 <= self.block_tokens <= 1 << 20:
            raise ConfigError(f"--block {self.block_tokens}; allowed: 1 to {1 << 20} tokens")
        if not 0 < self.window_h <= 24 * 366:
            raise ConfigError(f"--window-h {self.window_h:g}; allowed: above 0, up to a year")
        if self.time_unit not in UNITS_S:
            raise ConfigError(f"--time-unit {self.time_unit!r}; allowed: {', '.join(UNITS_S)}")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}; allowed: from 0 on")


def open_trace(path: Path, reading: Reading | None = None) -> Trace:
    """The reader for the file at `path`, plain, gzip or zstd; KV events are msgpack or JSON lines.

    A directory of request lines, sessions or texts is one trace, in as many files as there are.

    Raises:
        ConfigError: it cannot be read, is empty, or of no form that is known.
    """
    reading = reading or Reading()
    file = files_of(path)[0]
    if is_msgpack(file):
        return EventBatches(_one_file(path, "KV events"), reading.block_tokens)
    first_line, first = next(text_lines(file), (0, ""))
    if not first_line:
        raise ConfigError(f"trace {file} is empty; allowed: at least one request")
    if "TIMESTAMP" in first and "ContextTokens" in first:
        return LengthRows(_one_file(path, "CSV"))
    with Place(file, first_line):
        head: Any = json.loads(first)
    keys = cast("dict[str, Any]", head).keys() if isinstance(head, dict) else set[str]()
    is_batch = isinstance(head, list) and not isinstance(next(iter(cast("list[Any]", head)), None), dict)
    if is_batch or {"ts", "events"} <= keys:
        return EventBatches(_one_file(path, "KV events"), reading.block_tokens)
    if "requests" in keys:
        return SessionLines(path, reading.block_tokens, reading.window_h, reading.seed)
    if keys & {"hash_ids", "hash_runs"}:
        return RequestLines(path, reading.block_tokens, reading.time_unit)
    if {"timestamp", "input"} <= keys:
        return TextLines(path, reading.block_tokens, reading.tokenizer, reading.time_unit)
    raise ConfigError(
        f"trace {file}, line {first_line}: unknown form; allowed: JSON lines with hash_ids or hash_runs, sessions with "
        "requests, text with input, KV events, or CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
    )


def _one_file(path: Path, form: str) -> Path:
    if path.is_dir():
        raise ConfigError(f"trace {path}: a directory of {form}; allowed: one file of that form")
    return path
