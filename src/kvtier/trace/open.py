"""Chooses the reader of a trace by its first line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import UNITS_S, TraceReader
from kvtier.trace.trace_files import LineErrors, files_of, is_msgpack, text_lines

# Each reader is imported where it is made: a trace needs one of them.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What a trace itself does not define."""

    block_tokens: int | None = None
    """Tokens of a block; None: the trace's own, 256 for sessions, 64 for text."""
    window_h: float = 10.0
    """Hours within which sessions without absolute times start."""
    seed: int = 1
    """Seed of the sessions' start times."""
    time_unit: str = ""
    """Unit of `timestamp` in request lines, and in text where it does not count from 1970; empty: the format's."""
    tokenizer: Path | None = None
    """Tokenizer file for traces of text."""

    def __post_init__(self) -> None:
        checks = (
            (
                self.block_tokens is None or 1 <= self.block_tokens <= 1 << 20,
                f"--block {self.block_tokens}; allowed: 1 to {1 << 20} tokens",
            ),
            (0 < self.window_h <= 24 * 366, f"--window-h {self.window_h:g}; allowed: above 0, up to a year"),
            (self.time_unit in ("", *UNITS_S), f"--time-unit {self.time_unit!r}; allowed: {', '.join(UNITS_S)}"),
            (self.seed >= 0, f"--seed {self.seed}; allowed: from 0 on"),
        )
        for is_allowed, message in checks:
            if not is_allowed:
                raise ConfigError(message)


def open_trace(path: Path, options: ReadOptions | None = None) -> TraceReader:
    """The reader of the trace at `path`, plain, gzip or zstd; request lines, sessions and texts may be a directory.

    Raises:
        ConfigError: it cannot be read, is empty, or its format is unknown.
    """
    options = options or ReadOptions()
    file = files_of(path)[0]
    if is_msgpack(file):
        return _kv_events(path, options)
    first_line, first = next(text_lines(file), (0, ""))
    if not first_line:
        raise ConfigError(f"trace {file} is empty; allowed: at least one request")
    if "TIMESTAMP" in first and "ContextTokens" in first:
        from kvtier.trace.formats.lengths_csv import LengthsCsv  # noqa: PLC0415

        return LengthsCsv(_one_file(path, "CSV"))
    with LineErrors(file, first_line):
        head: Any = json.loads(first)
    keys = cast("dict[str, Any]", head).keys() if isinstance(head, dict) else set[str]()
    is_batch = isinstance(head, list) and not isinstance(next(iter(cast("list[Any]", head)), None), dict)
    if is_batch or {"ts", "events"} <= keys:
        return _kv_events(path, options)
    if "requests" in keys:
        from kvtier.trace.formats.session_lines import SessionLines  # noqa: PLC0415

        return SessionLines(path, options.block_tokens, options.window_h, options.seed)
    if keys & {"hash_ids", "hash_runs"}:
        from kvtier.trace.formats.request_lines import RequestLines  # noqa: PLC0415

        return RequestLines(path, options.block_tokens, options.time_unit)
    if {"timestamp", "input"} <= keys:
        from kvtier.trace.formats.text_lines import TextLines  # noqa: PLC0415

        return TextLines(path, options.block_tokens, options.tokenizer, options.time_unit)
    raise ConfigError(
        f"trace {file}, line {first_line}: unknown format; allowed: JSON lines with hash_ids or hash_runs, sessions "
        "with requests, text with input, KV events, or CSV with TIMESTAMP, ContextTokens, GeneratedTokens"
    )


def _kv_events(path: Path, options: ReadOptions) -> TraceReader:
    from kvtier.trace.formats.kv_events import KvEvents  # noqa: PLC0415

    return KvEvents(_one_file(path, "KV events"), options.block_tokens)


def _one_file(path: Path, form: str) -> Path:
    if path.is_dir():
        raise ConfigError(f"trace {path}: a directory of {form}; allowed: one file of that format")
    return path
