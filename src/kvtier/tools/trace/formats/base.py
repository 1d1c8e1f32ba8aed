"""The reader interface of a trace format, the choice of a reader, and fields that several formats share.

The first line of a trace shows the format. Block ids of any kind become integers, so that all other code works with
plain arrays.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError
from kvtier.tools.trace.trace_files import files_of, is_msgpack, number, records, short, text_lines
from kvtier.types import NextTurn

UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Length in seconds of each `--time-unit`."""
UNIT_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds"}
UNIT_REQUESTS_MIN = 3
_BUSY_TOKENS_PER_S = 1e6
_BUSY_REQUESTS_PER_S = 100.0
"""Rate above which the timestamps probably have a longer unit."""
_IDLE_REQUESTS_PER_S = 1 / 60
"""Rate below which the timestamps probably have a shorter unit."""

_NO_PARENT = ("-1", "None", "")
"""Values of `parent_chat_id` on a session's first line."""

Ids = npt.NDArray[np.integer[Any]]


class Contents(NamedTuple):
    """The parts of a prompt. The number of a part depends only on the part, not on what precedes it."""

    ids: Ids
    """A number for each part, or for each token of a text. Equal numbers mean equal contents."""
    tokens: Ids = np.zeros(0, np.int64)
    """Number of tokens in each part; empty if each part is one token."""
    kinds: tuple[str, ...] = ()
    """Name of each part's kind; empty if kinds have no names."""
    answer: Ids = np.zeros(0, np.int64)
    """A number for each token of the response to a text, as in `ids`."""
    text: str = ""


class TraceRequest(NamedTuple):
    """One prompt of a trace."""

    time_s: float
    """Time since the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: Ids
    """Ids of the prompt's blocks. An id names the whole prefix up to the block's end. The last block may be partial."""
    session: str | None
    line: int
    """Line number in the file, starting at 1."""
    next_turn: NextTurn | None = None
    """The kind of turn that follows the response; None if unknown."""
    model: str | None = None
    contents: Contents | None = None
    """Contents of the prompt; None if the format lacks them or `ReadOptions.has_contents` is False."""


class TraceWarning(str):
    """A sentence on something that is wrong with the trace."""

    __slots__ = ()


class UnitDoubt(TraceWarning):
    """A warning about a unit that the user gave. ``--strict`` does not turn it into an error."""

    __slots__ = ()


class TraceReader:
    """Reads a trace as often as needed, without keeping it in memory.

    Args:
        path: the file, or for some formats a directory of files.
    """

    has_blocks = True
    """Whether requests have block ids. Without them, reuse is unknown."""
    options: ClassVar[tuple[str, ...]] = ()
    """Fields of `ReadOptions` that this format uses, and that some other formats do not use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.block_tokens = 1
        self._factor = 1
        """Number of the trace's own blocks in one block of `block_tokens`."""
        self.notes: tuple[str, ...] = ()
        """Sentences on how the trace was read. They are complete once `requests` is exhausted."""

    def requests(self) -> Iterator[TraceRequest]:
        """Yield the requests in the order of the file. Formats that merge several sources sort by time.

        Raises:
            ConfigError: the file cannot be read or a line is malformed. The message names file, line and field.
        """
        raise NotImplementedError

    def _set_block_tokens(self, own_tokens: int, wanted: int | None) -> None:
        """Set `block_tokens` to `wanted`. None keeps the trace's own size.

        Raises:
            ConfigError: `wanted` is not a multiple of `own_tokens`.
        """
        self.block_tokens = own_tokens if wanted is None else wanted
        if self.block_tokens < own_tokens or self.block_tokens % own_tokens:
            raise ConfigError(
                f"--block {wanted} does not fit trace {self.path}; allowed: a multiple of its {own_tokens} tokens"
            )
        self._factor = self.block_tokens // own_tokens


class Sessions:
    """Names the sessions of a trace's lines.

    A line's session is its `session_id` or `chat_id`. If lines have a `parent_chat_id`, each request has its own chat
    id, and the session is the chat at the start of the chain of parents.
    """

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def of(self, line: dict[str, Any]) -> str | None:
        """Return the session of `line`, if any. Lines must come in the order of the file, parents first."""
        session = line.get("session_id", line.get("chat_id"))
        if session is None or "session_id" in line or "parent_chat_id" not in line:
            return None if session is None else str(session)
        chat, parent = str(session), str(line["parent_chat_id"])
        # The id of a parent that is not in the file names the session of the chats that follow it.
        root = chat if parent in _NO_PARENT else self._roots.get(parent, parent)
        return self._roots.setdefault(chat, root)


def time_after(line: dict[str, Any], previous_s: float | None) -> float | None:
    """Return the time of a line that has a `delay`, in ms after its session's previous request (AIPerf).

    The result is None if the line has no delay, has a `timestamp`, or is the session's first line.
    """
    if previous_s is None or line.get("delay") is None or line.get("timestamp") is not None:
        return None
    return previous_s + number(line, "delay") * UNITS_S["ms"]


def next_turn_of(line: dict[str, Any]) -> NextTurn | None:
    """Return the line's `next_turn`, if any.

    Raises:
        ConfigError: its value is unknown.
    """
    value = line.get("next_turn")
    try:
        return None if value is None else NextTurn(value)
    except ValueError:
        allowed = ", ".join(it.value for it in NextTurn)
        raise ConfigError(f"next_turn is {short(value)}; allowed: {allowed}") from None


def time_unit_warning(
    times_s: Sequence[float], input_tokens: Sequence[int], time_unit: str, *, is_given: bool
) -> tuple[str, ...]:
    """Return a warning if timestamps in `time_unit` give an implausible load, else an empty tuple.

    A service may be idle. A low rate is therefore a reason for doubt only if `is_given`: the user gave the unit.
    """
    span_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    count, tokens = len(times_s), sum(input_tokens)
    if count < UNIT_REQUESTS_MIN or span_s <= 0:
        return ()
    requests_per_s, tokens_per_s = (count - 1) / span_s, tokens / span_s
    is_busy = requests_per_s > _BUSY_REQUESTS_PER_S or tokens_per_s > _BUSY_TOKENS_PER_S
    if not is_busy and not (is_given and requests_per_s < _IDLE_REQUESTS_PER_S):
        return ()
    units = list(UNIT_NAMES)  # from the longest
    likely = units[min(max(units.index(time_unit) + (-1 if is_busy else 1), 0), len(units) - 1)]
    read, meant = UNIT_NAMES[time_unit], UNIT_NAMES[likely]
    looks, advice = (
        (f"like {meant}, not {read}", f"if they are {meant}, use --time-unit {likely}")
        if likely != time_unit
        else ("wrong", "no single service has such a rate")
    )
    return (
        (UnitDoubt if is_given else TraceWarning)(
            f"timestamps look {looks}: read as {read}, {requests_per_s:,.4g} requests and {tokens_per_s:,.0f} tokens a "
            f"second arrive; {advice}"
        ),
    )


OWN_IDS_MAX = 1 << 25
"""Smaller ids are kept. Other ids (hashes, strings) get the numbers -1, -2, ... in the order of first use."""
RUN_IDS_MAX = 1 << 30
"""Ids in runs are dense numbers, so they are kept up to this larger limit."""
REQUEST_BLOCKS_MAX = 1 << 20
"""Maximum number of blocks in one request: 16 million tokens in blocks of 16."""
HELD_BLOCKS_MAX = 1 << 28
"""Maximum number of blocks that a reader keeps in memory for sorting: 1 or 2 GiB."""


class Numbering:
    """Maps ids that are not small integers to numbers. Each reading of a trace has its own mapping."""

    def __init__(self) -> None:
        self._numbers: dict[int | str, int] = {}

    def numbered(self, ids: Sequence[object], name: str = "hash_ids") -> Ids:
        """Return the `ids` of the field `name` as numbers. Small integers stay; every other id gets a negative number.

        Raises:
            ConfigError: there are more than `REQUEST_BLOCKS_MAX` ids, or one is neither an integer nor a string.
        """
        if len(ids) > REQUEST_BLOCKS_MAX:
            raise ConfigError(f"{name} has {len(ids)} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
        try:
            # numpy would turn strings into an array that is as wide as the longest string.
            own = np.asarray(array("q", cast("Sequence[int]", ids)))
        except (TypeError, OverflowError):
            own = None
        if own is not None and (not len(own) or (own.min() >= 0 and own.max() < OWN_IDS_MAX)):
            return own
        numbers = self._numbers
        out = np.empty(len(ids), np.int64)
        for place, block in enumerate(ids):
            if isinstance(block, bool) or not isinstance(block, int | str):
                raise ConfigError(f"{name} holds {short(block)}; allowed: whole numbers or strings")
            is_own = isinstance(block, int) and 0 <= block < OWN_IDS_MAX
            out[place] = block if is_own else -1 - numbers.setdefault(block, len(numbers))
        return out


def from_runs(runs: object) -> Ids:
    """Return the ids in a list of runs, each [first id, count].

    Raises:
        ConfigError: the list is malformed, an id is out of range, or there are more than `REQUEST_BLOCKS_MAX` blocks.
    """
    if not isinstance(runs, list):
        raise ConfigError(f"hash_runs is {short(runs)}; allowed: a list of [first id, count]")
    parts: list[range] = []
    for run in cast("list[Any]", runs):
        match run:
            case [int(first), int(count)] if 0 <= first <= RUN_IDS_MAX - count and count > 0:
                parts.append(range(first, first + count))
            case _:
                raise ConfigError(
                    f"hash_runs holds {short(run)}; allowed: [first id, count from 1], ids below {RUN_IDS_MAX}"
                )
    blocks = sum(map(len, parts))
    if blocks > REQUEST_BLOCKS_MAX:
        raise ConfigError(f"hash_runs has {blocks} blocks; allowed: at most {REQUEST_BLOCKS_MAX}")
    if len(parts) == 1:
        return np.arange(parts[0].start, parts[0].stop, dtype=np.int64)
    return np.fromiter(chain.from_iterable(parts), np.int64, blocks)


def blocks_of(line: dict[str, Any], numbering: Numbering, name: str = "hash_ids") -> Ids:
    """Return the block ids of a request line, from the field `name` or `hash_runs`.

    Raises:
        ConfigError: the ids are malformed.
        KeyError: the line has no ids.
    """
    if "hash_runs" in line:
        return from_runs(line["hash_runs"])
    ids = line[name]
    if not isinstance(ids, list):
        raise ConfigError(f"{name} is {short(ids)}; allowed: a list of ids")
    return numbering.numbered(cast("list[object]", ids), name)


def merge_blocks(blocks: Ids, factor: int) -> Ids:
    """Merge every `factor` blocks into one. The last id names the whole prefix, so the merged block keeps it."""
    if factor == 1:
        return blocks
    taken = blocks[factor - 1 :: factor]
    return np.append(taken, blocks[-1]) if len(blocks) % factor else taken


def by_time(path: Path, requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """Return the requests sorted by time. All of them are held in memory.

    Raises:
        ConfigError: the requests have more than `HELD_BLOCKS_MAX` blocks. The message names `path` and the line.
    """
    held: list[TraceRequest] = []
    blocks = 0
    for request in requests:
        blocks += len(request.blocks)
        if blocks > HELD_BLOCKS_MAX:
            raise ConfigError(
                f"trace {path}, line {request.line}: {blocks} blocks up to here must be held for sorting; allowed: at "
                f"most {HELD_BLOCKS_MAX}"
            )
        held.append(request)
    held.sort(key=lambda it: it.time_s)
    return held


PROMPT_FIELDS = ("input", "prompt", "text_input", "prompt_token_ids", "messages")
"""Fields that may hold the prompt, as text or as tokens."""
BODY_FIELDS = ("body", "payload")
"""Fields that may hold an object with the fields of the prompt."""
CONVERSATION_FIELDS = ("conversations", "conversation")
"""Fields that may hold a whole conversation."""
_ALLOWED = (
    "JSON lines with hash_ids or hash_runs, sessions with requests, text with input, prompt, messages or "
    "prompt_token_ids, conversations (ShareGPT), KV events, Dynamo's request trace, LMCache's lookup hashes, or CSV of "
    "Azure or BurstGPT"
)
_UNREAD: tuple[tuple[set[str], str, str], ...] = (
    ({"custom_id", "response"}, "the output of OpenAI's batch API", "use its input file, whose lines have a body"),
    ({"metadata", "metrics"}, "AIPerf's record of its requests", "use AIPerf's input file"),
    ({"data"}, "AIPerf's inputs.json", "write each payload as a line {payload: …, session_id: …}"),
    ({"turns"}, "AIPerf's multi_turn dataset or MT-Bench", "write each turn as a line with its whole messages"),
    ({"captureData"}, "SageMaker's data capture", "write the input of each line as {messages: …, timestamp: …}"),
    ({"timing_events"}, "TraceLab's trace", "use its mooncake_trace, with input_length and hash_ids"),
    ({"text"}, "a dataset of texts or AIPerf's single_turn dataset", "rename text to prompt"),
)
"""For each known format that is not read: the fields that mark it, its name, and advice to the user."""

# Each reader is imported where it is made, because a trace needs only one reader.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """Settings that a trace does not define itself."""

    block_tokens: int | None = None
    """Number of tokens per block; None means the trace's own number, 256 for sessions, or 64 for text."""
    window_h: float = 10.0
    """Hours within which sessions without absolute times start."""
    seed: int = 1
    """Seed of the sessions' start times."""
    time_unit: str = ""
    """Unit of `timestamp`; empty means the format's own. In traces of text, it applies only to times that do not count
    from 1970."""
    tokenizer: Path | None = None
    """Tokenizer file for traces of text."""
    has_contents: bool = False
    """Keep each prompt's `Contents` if the format has them, and blocks of the trace's own size."""

    def __post_init__(self) -> None:
        checks = (
            (
                self.block_tokens is None or 1 <= self.block_tokens <= 1 << 20,
                f"--block {self.block_tokens}; allowed: 1 to {1 << 20} tokens",
            ),
            (0 < self.window_h <= 24 * 366, f"--window-h {self.window_h:g}; allowed: above 0, up to a year"),
            (self.time_unit in ("", *UNITS_S), f"--time-unit {self.time_unit!r}; allowed: {', '.join(UNITS_S)}"),
            (self.seed >= 0, f"--seed {self.seed}; allowed: at least 0"),
        )
        for is_allowed, message in checks:
            if not is_allowed:
                raise ConfigError(message)


def open_trace(path: Path, options: ReadOptions | None = None) -> TraceReader:
    """Return a reader for the format that a trace's first record shows. The files may be compressed.

    Request lines, components, sessions, conversations and texts may be in a directory.

    Raises:
        ConfigError: the trace cannot be read, is empty, or has an unknown format.
    """
    options = options or ReadOptions()
    file = files_of(path)[0]
    if is_msgpack(file):
        return _kv_events(path, options)
    unit, first_number, head = _first_record(file)
    if isinstance(head, str):
        from kvtier.tools.trace.formats.lengths_csv import LengthsCsv  # noqa: PLC0415

        return LengthsCsv(_one_file(path, "CSV"))
    keys = cast("dict[str, Any]", head).keys() if isinstance(head, dict) else set[str]()
    if isinstance(head, list) or {"ts", "events"} <= keys:
        return _kv_events(path, options)
    if "requests" in keys:
        from kvtier.tools.trace.formats.kv_cache_tester import BLOCK_TOKENS_DEFAULT, SessionLines  # noqa: PLC0415

        least = 1 if options.has_contents else BLOCK_TOKENS_DEFAULT
        return SessionLines(path, options.block_tokens, options.window_h, options.seed, least)
    if keys & {"hash_ids", "hash_runs"}:
        return _with_ids(path, options, has_components=isinstance(cast("dict[str, Any]", head).get("hash_ids"), dict))
    if {"chunk_hashes", "chunk_size"} <= keys:
        from kvtier.tools.trace.formats.lookup_hashes import LookupHashes  # noqa: PLC0415

        return LookupHashes(path, options.block_tokens)
    if keys & {"event_type", "event"}:
        from kvtier.tools.trace.formats.dynamo import DynamoTrace  # noqa: PLC0415

        return DynamoTrace(path, options.block_tokens)
    if keys & {*CONVERSATION_FIELDS}:
        from kvtier.tools.trace.formats.conversations import Conversations  # noqa: PLC0415

        return Conversations(path, options.block_tokens, options.tokenizer, options.window_h, options.seed)
    if keys & {*PROMPT_FIELDS, *BODY_FIELDS}:
        from kvtier.tools.trace.formats.prompt_lines import PromptLines  # noqa: PLC0415

        return PromptLines(
            path, options.block_tokens, options.tokenizer, options.time_unit, has_contents=options.has_contents
        )
    raise ConfigError(f"trace {file}, {unit} {first_number}: {_seems(keys)}")


def _with_ids(path: Path, options: ReadOptions, *, has_components: bool) -> TraceReader:
    if has_components:
        from kvtier.tools.trace.formats.ragpulse import ComponentLines  # noqa: PLC0415

        return ComponentLines(path, options.block_tokens, options.time_unit, has_contents=options.has_contents)
    from kvtier.tools.trace.formats.request_lines import RequestLines  # noqa: PLC0415

    return RequestLines(path, options.block_tokens, options.time_unit)


def _first_record(file: Path) -> tuple[str, int, object]:
    """Return the first JSON value of a file, as `records` yields it, or the first line of a CSV file.

    Raises:
        ConfigError: the file cannot be read, is empty, or is neither JSON nor CSV.
    """
    try:
        for first in records(file):
            return first
    except ConfigError as error:
        try:
            number, text = next(text_lines(file), (0, ""))
        except ConfigError:
            raise error from None
        if "," in text and text.lstrip()[:1] not in ("{", "["):
            return "line", number, text
        raise
    raise ConfigError(f"trace {file} is empty; allowed: at least one request")


def _seems(keys: AbstractSet[str]) -> str:
    """Return the likely format of a record with unknown fields, and advice to the user."""
    for marks, name, way in _UNREAD:
        if marks <= keys:
            return f"this seems to be {name}, which is not read; {way}"
    return f"unknown format; allowed: {_ALLOWED}"


def _kv_events(path: Path, options: ReadOptions) -> TraceReader:
    from kvtier.tools.trace.formats.kv_events import KvEvents  # noqa: PLC0415

    return KvEvents(_one_file(path, "KV events"), options.block_tokens)


def _one_file(path: Path, form: str) -> Path:
    if path.is_dir():
        raise ConfigError(f"trace {path}: a directory of {form}; allowed: one file of that format")
    return path
