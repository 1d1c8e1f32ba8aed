"""A JSON object for each request with its text: `timestamp`, `input`, `output`, `session_id` (lmcache-agent-trace)."""

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ConfigError, install_hint
from kvtier.trace.formats.base import (
    UNITS_S,
    Ids,
    Sessions,
    TraceReader,
    TraceRequest,
    next_turn_of,
    time_unit_warning,
)
from kvtier.trace.formats.block_ids import by_time
from kvtier.trace.trace_files import json_lines, number

BLOCK_TOKENS_DEFAULT = 64
_PIECES = re.compile(r"\s*[A-Za-z]{1,6}|\s*\d{1,3}|\s*[^\sA-Za-z\d]|\s+")
"""Tokens where no tokenizer is given: about four characters each in English prose."""

Tokenize = Callable[[str], Sequence[object]]


class TextLines(TraceReader):
    """Reads request lines with text. A block's id is a digest of its tokens and the id before.

    Args:
        path: the file, or a directory of such files.
        block_tokens: tokens of a block; None: 64.
        tokenizer: a tokenizer.json of Hugging Face; None: a simple rule.
        time_unit: "s", "ms" or "us", of a `timestamp` that does not count from 1970; empty: ms.

    Raises:
        ConfigError: the file or the tokenizer cannot be read.
    """

    options = ("tokenizer", "time_unit")

    def __init__(
        self, path: Path, block_tokens: int | None = None, tokenizer: Path | None = None, time_unit: str = ""
    ) -> None:
        super().__init__(path)
        self._time_unit, self._is_given = time_unit or "ms", bool(time_unit)
        self.block_tokens = block_tokens or BLOCK_TOKENS_DEFAULT
        self._tokenize: Tokenize = _PIECES.findall if tokenizer is None else _load(tokenizer)
        how = "a simple rule (about four characters a token)" if tokenizer is None else str(tokenizer)
        self._how = f"text is cut into tokens by {how}, and into blocks of {self.block_tokens}"
        self.notes = (self._how,)

    def requests(self) -> Iterator[TraceRequest]:
        """The requests, sorted by time, which counts from the first; such files are sorted by session."""
        numbers: dict[bytes, int] = {}
        sessions = Sessions()

        def request(_file: Path, line_number: int, line: dict[str, Any]) -> TraceRequest:
            time = number(line, "timestamp")
            tokens = self._tokenize(_text(line, "input"))
            return TraceRequest(
                time * UNITS_S[_unit_since_1970(time) or self._time_unit],
                len(tokens),
                len(self._tokenize(_text(line, "output"))) if "output" in line else 0,
                self._blocks(tokens, numbers),
                sessions.of(line),
                line_number,
                next_turn_of(line),
            )

        requests = by_time(self.path, json_lines(self.path, request))
        times_s, input_tokens = [it.time_s for it in requests], [it.input_tokens for it in requests]
        self.notes = (self._how,)
        if times_s and _unit_since_1970(times_s[-1]) is None:  # in whatever unit, since 1970 there are more seconds
            self.notes += time_unit_warning(times_s, input_tokens, self._time_unit, is_given=self._is_given)
        for each in requests:
            yield each._replace(time_s=each.time_s - requests[0].time_s)

    def _blocks(self, tokens: Sequence[object], numbers: dict[bytes, int]) -> Ids:
        digest = b""
        out: list[int] = []
        for start in range(0, len(tokens), self.block_tokens):
            block = "\0".join(str(it) for it in tokens[start : start + self.block_tokens])
            digest = blake2b(block.encode("utf-8", "surrogatepass"), digest_size=16, key=digest).digest()
            out.append(numbers.setdefault(digest, len(numbers)))
        return np.asarray(out, np.int64)


def _unit_since_1970(time: float) -> str | None:
    """The unit of a time since 1970, by its magnitude; None: `time` is too small to be one."""
    return next((unit for unit, least in (("us", 1e14), ("ms", 1e11), ("s", 1e8)) if time > least), None)


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {type(value).__name__}; allowed: a text")
    return value


def _load(path: Path) -> Tokenize:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError(
            f"--tokenizer needs tokenizers, which is not installed; allowed: {install_hint('transformers')}"
        ) from None
    if not path.is_file():
        raise ConfigError(f"--tokenizer {str(path)!r} is not a file; allowed: a tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # its Rust part raises bare Exceptions
        raise ConfigError(f"--tokenizer {str(path)!r} cannot be read: {error}") from error
    return lambda text: tokenizer.encode(text).ids
