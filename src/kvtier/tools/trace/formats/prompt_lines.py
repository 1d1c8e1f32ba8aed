"""Reads one JSON object per request, with the text or the tokens of the prompt.

The prompt is `input` (lmcache-agent-trace), `prompt` (OpenAI's completions, `vllm bench --dataset-name custom`),
`text_input` (AIPerf), `prompt_token_ids` (vLLM), or the `messages` of a chat request. It may be in a `body` (a line of
OpenAI's batch API, https://platform.openai.com/docs/guides/batch) or `payload` (AIPerf). The answer is `output`, a last
message of the assistant, or a number of tokens: `output_tokens` (vLLM), `output_length` (AIPerf), or OpenAI's limits.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtier.errors import ConfigError
from kvtier.report.tokenizer import open_tokenizer
from kvtier.tools.trace.formats.base import (
    BODY_FIELDS,
    PROMPT_FIELDS,
    UNITS_S,
    Contents,
    Ids,
    Sessions,
    TraceReader,
    TraceRequest,
    TraceWarning,
    by_time,
    next_turn_of,
    time_after,
    time_unit_warning,
)
from kvtier.tools.trace.formats.chat_text import chat_text, messages_of
from kvtier.tools.trace.trace_files import json_lines, number, short, whole

BLOCK_TOKENS_DEFAULT = 64
_PIECES = re.compile(r"\s*[A-Za-z]{1,6}|\s*\d{1,3}|\s*[^\sA-Za-z\d]|\s+")
"""The tokens if no tokenizer is given. In English prose they have about four characters each."""
_LENGTHS = ("output_tokens", "output_length", "max_completion_tokens", "max_output_tokens", "max_tokens")
"""Fields with the length of the answer. Those that begin with `max` give only a limit."""
_BEFORE_MESSAGES = ("tools", "system", "instructions")

Tokenize = Callable[[str], Sequence[object]]


class PromptLines(TraceReader):
    """Reads request lines with text. A block's id is a digest of the block's tokens and the previous id.

    Args:
        path: the file, or a directory of such files.
        block_tokens: number of tokens per block; None means 64.
        tokenizer: a tokenizer.json of Hugging Face; None means a simple rule.
        time_unit: unit of a `timestamp` that does not count from 1970: "s", "ms" or "us"; empty means ms.
        has_contents: attach text and tokens to each request. All of them are then in memory.

    Raises:
        ConfigError: the file or the tokenizer cannot be read.
    """

    options = ("tokenizer", "time_unit")

    def __init__(
        self,
        path: Path,
        block_tokens: int | None = None,
        tokenizer: Path | None = None,
        time_unit: str = "",
        *,
        has_contents: bool = False,
    ) -> None:
        super().__init__(path)
        self._has_contents = has_contents
        self._time_unit, self._is_given = time_unit or "ms", bool(time_unit)
        self.block_tokens = block_tokens or BLOCK_TOKENS_DEFAULT
        encode = None if tokenizer is None else open_tokenizer(tokenizer).encode
        self._tokenize: Tokenize = _PIECES.findall if encode is None else lambda text: encode(text).ids
        how = "a simple rule (about four characters a token)" if tokenizer is None else str(tokenizer)
        self._how = f"text is cut into tokens by {how}, and into blocks of {self.block_tokens}"
        self.notes = (self._how,)

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests sorted by time, although the files are sorted by session.

        Times count from the first request.
        """
        numbers: dict[bytes, int] = {}
        sessions, times = Sessions(), _Times(self._time_unit)
        limits = other_parts = 0
        words: dict[object, int] = {}

        def numbered(tokens: Sequence[object]) -> Ids:
            return np.fromiter((words.setdefault(it, len(words)) for it in tokens), np.int32, len(tokens))

        def request(_file: Path, line_number: int, line: dict[str, Any]) -> TraceRequest:
            nonlocal limits, other_parts
            session = sessions.of(line)
            bodies = (cast("dict[str, Any]", line[it]) for it in BODY_FIELDS if isinstance(line.get(it), dict))
            fields = {**line, **next(bodies, dict[str, Any]())}
            if fields.get("text_input") is not None and times.has(session):
                raise ConfigError(
                    "text_input in a later line of a session adds to prompts and answers that the trace does not have; "
                    "allowed: messages, with the whole prompt"
                )
            prompt, answer, others = _prompt(fields)
            other_parts += others
            tokens = self._tokens(prompt)
            length = next((it for it in _LENGTHS if fields.get(it) is not None), None) if answer is None else None
            limits += length is not None and length.startswith("max")
            response = self._tokens(answer or "")
            contents = None
            if self._has_contents:
                text = prompt if isinstance(prompt, str) else ""
                contents = Contents(numbered(tokens), answer=numbered(response), text=text)
            return TraceRequest(
                times.of(line, session),
                len(tokens),
                whole(fields, length) if length else len(response),
                self._blocks(tokens, numbers),
                session,
                line_number,
                next_turn_of(line),
                contents=contents,
            )

        requests = by_time(self.path, json_lines(self.path, request))
        self.notes = (self._how, *notes_on(other_parts))
        if limits:
            self.notes += (f"{limits} answers are counted as long as their limit, such as max_tokens",)
        if not times.are_given:
            self.notes += ("no timestamps: a request or session begins every second, in the order of the file",)
        times_s, input_tokens = [it.time_s for it in requests], [it.input_tokens for it in requests]
        if times.are_given and _unit_since_1970(times_s[-1]) is None:
            # A time since 1970 would be larger in any unit.
            self.notes += time_unit_warning(times_s, input_tokens, self._time_unit, is_given=self._is_given)
        for each in requests:
            yield each._replace(time_s=each.time_s - requests[0].time_s)

    def _tokens(self, text: str | list[int]) -> Sequence[object]:
        return self._tokenize(text) if isinstance(text, str) else text

    def _blocks(self, tokens: Sequence[object], numbers: dict[bytes, int]) -> Ids:
        digest = b""
        out: list[int] = []
        for start in range(0, len(tokens), self.block_tokens):
            block = "\0".join(str(it) for it in tokens[start : start + self.block_tokens])
            digest = blake2b(block.encode("utf-8", "surrogatepass"), digest_size=16, key=digest).digest()
            out.append(numbers.setdefault(digest, len(numbers)))
        return np.asarray(out, np.int64)


class _Times:
    """Assigns times to lines, by a `timestamp`, by a `delay` after the session's previous line, or one second apart.

    Args:
        unit: unit of a `timestamp` that does not count from 1970.
    """

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._latest_s: dict[str | None, float] = {}
        self._count = 0
        self.are_given = False
        """Whether the first line has a timestamp. If so, all lines must have a time."""

    def has(self, session: str | None) -> bool:
        """Return whether an earlier line belongs to `session`."""
        return session in self._latest_s

    def of(self, line: dict[str, Any], session: str | None) -> float:
        """Return the time of the next line."""
        has_timestamp = line.get("timestamp") is not None
        self.are_given = has_timestamp if not self._count else self.are_given
        if has_timestamp and not self.are_given:
            raise ConfigError(
                "the line has a timestamp, but the first line has none; allowed: timestamps in all lines, or in none"
            )
        time_s = time_after(line, self._latest_s.get(session))
        if time_s is None and self.are_given:
            time = number(line, "timestamp")
            time_s = time * UNITS_S[_unit_since_1970(time) or self._unit]
        elif time_s is None:
            time_s = float(self._count)
        self._count += 1
        if session is not None:
            self._latest_s[session] = time_s
        return time_s


def notes_on(other_parts: int) -> tuple[str, ...]:
    """Return a warning if messages have `other_parts` that are not text."""
    return (TraceWarning(f"{other_parts} images or other parts count as a few tokens each"),) if other_parts else ()


def _prompt(fields: dict[str, Any]) -> tuple[str | list[int], str | None, int]:
    """Return the prompt, the text of the answer if there is one, and the number of parts that are not text."""
    name = next((it for it in PROMPT_FIELDS if fields.get(it) is not None), None)
    if name is None:
        raise ConfigError(f"the line has no prompt; allowed: one of the fields {', '.join(PROMPT_FIELDS)}")
    value: Any = fields[name]
    answer = _text(fields, "output") if "output" in fields else None
    if name == "messages" or (name == "input" and isinstance(value, list)):
        if fields.get("message_mode", "history") != "history":
            raise ConfigError(f"message_mode is {short(fields['message_mode'])}; allowed: 'history', whole prompts")
        messages = messages_of(fields, name)
        before = "".join(f"<{it}>\n{json.dumps(fields[it])}\n" for it in _BEFORE_MESSAGES if fields.get(it))
        others = sum(it.other_parts for it in messages)
        if answer is None and messages and messages[-1].role == "assistant":
            answer = messages.pop().text
        return before + chat_text(messages), answer, others
    ids = cast("list[int]", value if isinstance(value, list) else [None])
    if all(type(it) is int for it in ids):
        return ids, answer, 0
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {short(cast('object', value))}; allowed: a string or a list of token ids")
    return value, answer, 0


def _unit_since_1970(time: float) -> str | None:
    """Return the unit of a time since 1970, by its magnitude, or None if `time` is too small to be one."""
    return next((unit for unit, least in (("us", 1e14), ("ms", 1e11), ("s", 1e8)) if time > least), None)


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {type(value).__name__}; allowed: a string")
    return value
