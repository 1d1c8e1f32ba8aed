"""Reads request lines whose `hash_ids` name the components of a prompt by kind (RAGPulse).

Other files of the directory give the tokens of each component, in lines with `token_length` and an id. Components with
different ids are assumed to differ from the first token on.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.tools.trace.formats.base import (
    UNITS_S,
    Contents,
    Ids,
    Sessions,
    TraceReader,
    TraceRequest,
    by_time,
    time_unit_warning,
)
from kvtier.tools.trace.trace_files import files_of, json_lines, number, short, text_lines, whole

BLOCK_TOKENS_DEFAULT = 64


class ComponentLines(TraceReader):
    """Reads request lines with components. A prompt is the sequence of its components.

    Args:
        path: the file with the requests, or the directory. The files with lengths are in the same directory.
        block_tokens: number of tokens per block; None means 64.
        time_unit: unit of `timestamp`: "s", "ms" or "us"; empty means s.
        has_contents: attach the components to each request.

    Raises:
        ConfigError: a file cannot be read, or a line with a length is malformed.
    """

    options = ("time_unit",)

    def __init__(
        self, path: Path, block_tokens: int | None = None, time_unit: str = "", *, has_contents: bool = False
    ) -> None:
        super().__init__(path)
        self._has_contents = has_contents
        self.block_tokens = block_tokens or BLOCK_TOKENS_DEFAULT
        self._time_unit, self._is_given = time_unit or "s", bool(time_unit)
        self._lines = files_of(path)[0]
        others = (it for it in files_of(self._lines.parent) if '"token_length"' in next(text_lines(it), (0, ""))[1])
        self._lengths = dict(chain.from_iterable(json_lines(it, _length) for it in others))
        self._how = f"components are cut into blocks of {self.block_tokens} tokens; what joins them is not counted"
        self.notes = (self._how,)

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests sorted by time."""
        sessions = Sessions()
        chains: dict[tuple[int, int], int] = {}
        numbers: dict[tuple[int, int], int] = {}

        def request(_file: Path, line_number: int, line: dict[str, Any]) -> TraceRequest:
            contents = self._contents(line["hash_ids"])
            time = number({"timestamp": float(line["timestamp"])}, "timestamp")  # a string in RAGPulse
            blocks = _blocks(contents, self.block_tokens, chains, numbers)
            answer = whole(line, "output_length") if "output_length" in line else 0
            return TraceRequest(
                time * UNITS_S[self._time_unit],
                int(contents.tokens.sum()),
                answer,
                blocks,
                sessions.of(line),
                line_number,
                contents=contents if self._has_contents else None,
            )

        requests = by_time(self._lines, json_lines(self._lines, request))
        times_s, input_tokens = [it.time_s for it in requests], [it.input_tokens for it in requests]
        warnings = time_unit_warning(times_s, input_tokens, self._time_unit, is_given=self._is_given)
        self.notes = (self._how, *warnings)
        yield from requests

    def _contents(self, components: object) -> Contents:
        if not isinstance(components, dict):
            raise ConfigError(f"hash_ids is {short(components)}; allowed: ids by kind, as in the first line")
        parts = [(kind, it) for kind, ids in cast("dict[str, list[Any]]", components).items() for it in ids]
        unknown = [it for _, it in parts if not isinstance(it, int) or it not in self._lengths]
        if unknown:
            raise ConfigError(
                f"component {short(unknown[0])} has no length; allowed: an id with a token_length in a file of "
                f"{self._lines.parent}"
            )
        ids = np.asarray([it for _, it in parts], np.int64)
        tokens = np.asarray([self._lengths[it] for _, it in parts], np.int64)
        return Contents(ids, tokens, tuple(kind for kind, _ in parts))


def _length(_file: Path, _number: int, line: dict[str, Any]) -> tuple[int, int]:
    name = next((it for it in line if it != "token_length"), "id")
    return whole(line, name), whole(line, "token_length", least=1)


def _blocks(
    contents: Contents, block_tokens: int, chains: dict[tuple[int, int], int], numbers: dict[tuple[int, int], int]
) -> Ids:
    """Return the ids of the blocks. Each id names the whole prefix.

    Args:
        contents: the prompt's components.
        block_tokens: tokens of a block; the last may be partial.
        chains: number of each chain of leading components. Its key is the number of the chain without the last
            component, and that component. The function adds new chains.
        numbers: number of each block. Its key is the chain in which the block ends, and the end in tokens. The function
            adds new blocks.
    """
    ends = np.cumsum(contents.tokens)
    places = [*range(block_tokens, int(ends[-1]), block_tokens), int(ends[-1])] if len(ends) else []
    chained: list[int] = []
    for component in contents.ids.tolist():
        before = chained[-1] if chained else -1
        chained.append(chains.setdefault((before, component), len(chains)))
    within: list[int] = np.searchsorted(ends, places).tolist()
    keys = ((chained[part], end) for part, end in zip(within, places, strict=True))
    return np.asarray([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
