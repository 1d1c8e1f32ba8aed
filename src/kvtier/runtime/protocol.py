"""Messages between the core's process and a rank's process: a little-endian 32-bit length, then JSON.

    ["Transfer", number of the command, [id, direction, key, ...]]  the fields in the order of the type
    ["Ping", 0, []]                                                 not a command: no number

Both ends run the same kvtier on one machine and have authenticated each other. Input is still checked: a message that
is too long or malformed raises `ProtocolError`, and the connection ends.

Times are on the session's clock. All processes of a Linux machine share the clock of `time.monotonic`, so times are
sent unchanged. `rank_server` checks that both clocks agree.
"""

import json
import operator
import struct
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

from kvtier.errors import KvError
from kvtier.runtime.executor import COUNT_MAX, Work
from kvtier.types import (
    WRITE_KINDS,
    Cancel,
    ChunkKey,
    ChunkRecord,
    Direction,
    Drop,
    Figures,
    NextTurn,
    Outcome,
    Probe,
    Recall,
    RecallPage,
    RequestId,
    Tell,
    Transfer,
)

MESSAGE_BYTES_MAX = 16 << 20
"""Maximum length of a message, enough for a probe of 200,000 objects."""

CACHED_TRANSFERS_MAX = 1024
"""Number of encoded transfers to cache, because every rank receives the same ones."""

_LENGTH = struct.Struct("<I")

_T = TypeVar("_T")


class ProtocolError(KvError):
    """Raised if a rank cannot be reached, does not belong to this engine, or sent an invalid message."""


class CommandMessage(NamedTuple):
    """A command with a number. Its completion repeats the number, because a drop or tell has no id."""

    number: int
    command: Work


class CompletionMessage(NamedTuple):
    """The completion of a command: the fields of `Completion` except the command."""

    number: int
    outcome: Outcome
    present: tuple[bool, ...] = ()
    size_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    detail: str = ""
    is_tier_fault: bool = False
    reason: str = ""
    page: RecallPage | None = None


class Note(NamedTuple):
    """A message from the scheduler side to every rank's engine adapter. Only the adapters interpret it."""

    subject: str
    request: RequestId = RequestId("")
    numbers: tuple[int, ...] = ()
    flag: bool = False


class Ping(NamedTuple):
    """A liveness check. The receiver sends it back."""


class Leave(NamedTuple):
    """The rank's process is about to end. The core flushes pending writes and closes the connection."""


class TierReport(NamedTuple):
    """The values of a rank's `TierView` of one tier, sent when they change, at most once a second."""

    tier: str
    figures: Figures
    stuck_queues: int


Message = CommandMessage | CompletionMessage | Cancel | Note | Ping | Leave | TierReport


def encode(message: Message) -> bytes:
    """Encode `message` with its length prefix.

    Raises:
        ProtocolError: the message is too long.
    """
    number, what = message if isinstance(message, CommandMessage) else (0, message)
    fields = _transfer_fields(what) if isinstance(what, Transfer) else _to_json(what)
    body = f'["{type(what).__name__}",{number},{fields}]'.encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message has {len(body)} bytes; allowed: at most {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Decode the message in `body`, which has no length prefix.

    Raises:
        ProtocolError: the message is invalid.
    """
    try:
        name, number, values = cast("list[Any]", json.loads(body))
        kind = _KINDS[name]
        message = kind(*[read(value) for read, value in zip(_FIELDS[kind], values, strict=True)])
        return CommandMessage(_whole(number), message) if isinstance(message, Work) else message
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"a message of {len(body)} bytes is invalid: {type(error).__name__}: {error}") from error


class MessageReader:
    """Splits a stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies that `data` completes.

        Raises:
            ProtocolError: a length is above `MESSAGE_BYTES_MAX`.
        """
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size_bytes,) = _LENGTH.unpack_from(buffer)
            if size_bytes > MESSAGE_BYTES_MAX:
                raise ProtocolError(f"a message has {size_bytes} bytes; allowed: at most {MESSAGE_BYTES_MAX}")
            end = _LENGTH.size + size_bytes
            if len(buffer) < end:
                return
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            yield body


def _plain(value: Any) -> object:  # noqa: ANN401 - any field of a message
    """Convert a value of a type that JSON lacks. An engine's block numbers may be numpy integers."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, int]", value))
    return operator.index(value)


_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=_plain).encode


@lru_cache(maxsize=CACHED_TRANSFERS_MAX)
def _transfer_fields(transfer: Transfer) -> str:
    return _to_json(transfer)


def _of(*kinds: type) -> Callable[[Any], Any]:
    """Return a reader that accepts only these types and no subclasses, so that True is not an integer."""

    def read(value: _T) -> _T:
        if type(value) not in kinds:
            raise TypeError(f"a field of type {type(value).__name__}")
        return value

    return read


def _maybe(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _many(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda values: tuple(map(read, values))


_whole, _number, _word, _flag, _table = _of(int), _of(int, float), _of(str), _of(bool), _of(dict)
_wholes = _many(_whole)


def _key(value: str) -> ChunkKey:
    return ChunkKey(bytes.fromhex(value))


def _object(value: list[Any]) -> tuple[ChunkKey, int]:
    key, group = value
    return _key(key), _whole(group)


def _record(values: list[Any]) -> ChunkRecord:
    key, parent, depth, tokens, extras = values
    return ChunkRecord(_key(key), _maybe(_key)(parent), _whole(depth), bytes.fromhex(tokens), bytes.fromhex(extras))


def _page(values: list[Any]) -> RecallPage:
    records, is_last = values
    return RecallPage(_many(_record)(records), _flag(is_last))


def _count(value: int) -> int:
    if not 0 <= _whole(value) <= COUNT_MAX:
        raise ValueError("not a tier's figure")
    return value


def _figures(values: list[Any]) -> Figures:
    used_bytes, capacity_bytes, evictions, written, direct_io = values
    counts = {what: _count(count) for what, count in _table(written).items()}
    if not counts.keys() <= set(WRITE_KINDS):
        raise ValueError("not a tier's figures")
    count = _maybe(_count)
    return Figures(count(used_bytes), count(capacity_bytes), count(evictions), counts, _maybe(_flag)(direct_io))


_FIELDS: dict[type[Any], tuple[Callable[[Any], Any], ...]] = {
    Transfer: (
        *(_whole, Direction, _key, _whole, _whole, _word, _maybe(_word), _wholes),
        *(_maybe(_key), _whole, _number, _maybe(_word), bytes.fromhex, _flag),
    ),
    Probe: (_whole, _word, _many(_object), _number),
    Drop: (_word, _key, _whole),
    Tell: (_word, _word, _maybe(NextTurn)),
    Recall: (_word, _whole, _whole, _whole),
    Cancel: (_wholes,),
    CompletionMessage: (_whole, Outcome, _many(_flag), _whole, _number, _number, _word, _flag, _word, _maybe(_page)),
    Note: (_word, _word, _wholes, _flag),
    Ping: (),
    Leave: (),
    TierReport: (_word, _figures, _count),
}
"""For each type, the functions that decode its fields, in order."""

_KINDS = {kind.__name__: kind for kind in _FIELDS}
