"""A JSON object for each request with its text: `timestamp`, `input`, `output`, `session_id` (lmcache-agent-trace)."""

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.errors import ConfigError
from kvtier.trace.formats.base import Ids, Request
from kvtier.trace.formats.block_ids import held
from kvtier.trace.formats.request_lines import ADVICE, UNITS_S, doubt, next_turn_of, session_of
from kvtier.trace.io import Place, json_lines, number

BLOCK_TOKENS_DEFAULT = 64
_PIECES = re.compile(r"\s*[A-Za-z]{1,6}|\s*\d{1,3}|\s*[^\sA-Za-z\d]|\s+")
"""Where no tokenizer is given: word pieces, numbers and signs, about four characters each in English prose."""

Tokenize = Callable[[str], Sequence[object]]


class TextLines:
    """Reads request lines with text; prompts are cut into tokens and named by a chain of digests.

    Args:
        path: the file, or a directory of such files.
        block_tokens: tokens of a block.
        tokenizer: a tokenizer.json of Hugging Face; None cuts by a simple rule.
        time_unit: of a `timestamp` that does not count from 1970: "s", "ms" or "us".

    Raises:
        ConfigError: the file or the tokenizer cannot be read.
    """

    has_blocks = True

    def __init__(
        self, path: Path, block_tokens: int | None = None, tokenizer: Path | None = None, time_unit: str = "ms"
    ) -> None:
        self._path = path
        self._time_unit = time_unit
        self.name = str(path)
        self.block_tokens = block_tokens or BLOCK_TOKENS_DEFAULT
        self._tokenize: Tokenize = _PIECES.findall if tokenizer is None else _load(tokenizer)
        how = "a simple rule (about four characters a token)" if tokenizer is None else str(tokenizer)
        self._how = f"text is cut into tokens by {how}, and into blocks of {self.block_tokens}"
        self._doubt = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Trace`."""
        return (self._how, self._doubt) if self._doubt else (self._how,)

    def requests(self) -> Iterator[Request]:
        """The requests, in the order of time, which counts from the first; files of this form go session by session."""
        numbers: dict[bytes, int] = {}
        requests: list[Request] = []
        kept = 0
        for file, line_number, line in json_lines(self._path):
            with Place(file, line_number):
                time_s = number(line, "timestamp")
                time_s *= _unit_s(time_s, self._time_unit)
                tokens = self._tokenize(_text(line, "input"))
                answer = len(self._tokenize(_text(line, "output"))) if "output" in line else 0
                blocks = self._named(tokens, numbers)
                next_turn = next_turn_of(line)
                kept += len(blocks)
                held(kept)
                requests.append(Request(time_s, len(tokens), answer, blocks, session_of(line), line_number, next_turn))
        requests.sort(key=lambda it: it.time_s)
        if self._time_unit == "ms":
            times_s, tokens = [it.time_s for it in requests], [it.input_tokens for it in requests]
            self._doubt = doubt(times_s, tokens, ADVICE)
        for request in requests:
            yield request._replace(time_s=request.time_s - requests[0].time_s)

    def _named(self, tokens: Sequence[object], numbers: dict[bytes, int]) -> Ids:
        digest = b""
        out: list[int] = []
        for start in range(0, len(tokens), self.block_tokens):
            block = "\0".join(str(it) for it in tokens[start : start + self.block_tokens])
            digest = blake2b(block.encode("utf-8", "surrogatepass"), digest_size=16, key=digest).digest()
            out.append(numbers.setdefault(digest, len(numbers)))
        return np.asarray(out, np.int64)


def _unit_s(time: float, otherwise: str) -> float:
    """Seconds of one unit, told by the size of a time since 1970; smaller ones are in the unit `otherwise`."""
    if time > 1e14:
        return UNITS_S["us"]
    if time > 1e11:
        return UNITS_S["ms"]
    return UNITS_S["s"] if time > 1e8 else UNITS_S[otherwise]


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {type(value).__name__}; allowed: a text")
    return value


def _load(path: Path) -> Tokenize:
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  an extra, wanted only here
    except ImportError:
        raise ConfigError(
            "--tokenizer needs tokenizers, which is not installed; allowed: pip install 'kvtier[transformers]'"
        ) from None
    if not path.is_file():
        raise ConfigError(f"--tokenizer {str(path)!r} is no file; allowed: a tokenizer.json")
    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # what its Rust side raises is a bare Exception
        raise ConfigError(f"--tokenizer {str(path)!r} cannot be read: {error}") from error
    return lambda text: tokenizer.encode(text).ids
