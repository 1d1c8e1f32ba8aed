"""Messages between the core's process and a rank's: a little-endian 32-bit length, then JSON.

Both ends are the same kvtier on one machine and have authenticated each other. Input is checked all the same: a message
that is too long, not JSON or of another form raises `ProtocolError`, and the connection ends.

Times are on the session's clock. `time.monotonic` is one clock for all processes of a Linux machine, so they travel as
they are; `rank_server` checks that both clocks agree.
"""

import json
import operator
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast

from kvtier.errors import KvError
from kvtier.runtime.executor import COUNT_MAX, Work
from kvtier.types import (
    WRITE_KINDS,
    Cancel,
    ChunkKey,
    Drop,
    Figures,
    Link,
    NextTurn,
    Outcome,
    Probe,
    RequestId,
    Tell,
    Transfer,
)

MESSAGE_BYTES_MAX = 16 << 20
"""Longest message: a probe of 200,000 objects."""

CACHED_TRANSFERS_MAX = 1024
"""Transfers whose encoding is cached, because every rank gets the same."""

_LENGTH = struct.Struct("<I")
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=operator.index).encode
"""`operator.index`, because an engine's block numbers may be numpy integers."""

_WORD = (str, type(None))
_NUMBER = (int, float)
_COUNT = (int, type(None))


class ProtocolError(KvError):
    """A rank cannot be reached, does not belong to this engine, or sent an invalid message."""


class CommandMessage(NamedTuple):
    """A command, with the number of its completion: a drop or tell has no id."""

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
    """What a rank's `TierView` of one tier shows. The rank sends it once a second at most, if it has changed."""

    tier: str
    figures: Figures
    """`direct_io` is None."""
    stuck_queues: int


Message = CommandMessage | CompletionMessage | Cancel | Note | Ping | Leave | TierReport


def encode(message: Message) -> bytes:
    """`message` with its length prefix.

    Raises:
        ProtocolError: it is too long.
    """
    body = _body(message).encode()
    if len(body) > MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body)} bytes; allowed: at most {MESSAGE_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in `body`, without its length prefix.

    Raises:
        ProtocolError: it is invalid.
    """
    try:
        kind, *values = cast("list[Any]", json.loads(body))
        return _DECODERS[kind](values)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(f"invalid message of {len(body)} bytes: {type(error).__name__}: {error}") from error


class MessageReader:
    """Splits a stream into message bodies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes.

        Raises:
            ProtocolError: a length is above `MESSAGE_BYTES_MAX`.
        """
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _LENGTH.size:
            (size_bytes,) = _LENGTH.unpack_from(buffer)
            if size_bytes > MESSAGE_BYTES_MAX:
                raise ProtocolError(f"a message of {size_bytes} bytes; allowed: at most {MESSAGE_BYTES_MAX}")
            end = _LENGTH.size + size_bytes
            if len(buffer) < end:
                return
            body = bytes(buffer[_LENGTH.size : end])
            del buffer[:end]
            yield body


def _body(message: Message) -> str:
    if isinstance(message, CommandMessage):
        kind, fields = _command(message.command)
        return f'["{kind}",{message.number},{fields[1:]}'
    if isinstance(message, CompletionMessage):
        number, outcome, present, *rest = message
        plain = ["answer", number, outcome.value, "".join("1" if each else "0" for each in present), *rest]
    elif isinstance(message, TierReport):
        tier, (*fill, written, _), stuck_queues = message
        plain = ["report", tier, *fill, dict(written), stuck_queues]
    else:
        plain = [type(message).__name__.lower(), *message]
    return _to_json(plain)


def _command(command: Work) -> tuple[str, str]:
    """The kind of `command`, and its fields as a JSON list."""
    if isinstance(command, Transfer):
        return "transfer", _transfer_fields(command)
    if isinstance(command, Probe):
        keys = [key.hex() for key, _ in command.objects]
        groups = [group for _, group in command.objects]
        return "probe", _to_json([command.id, command.tier, keys, groups, command.deadline_s])
    if isinstance(command, Tell):
        next_turn = None if command.next_turn is None else command.next_turn.value
        return "tell", _to_json([command.tier, command.session, next_turn])
    return "drop", _to_json([command.tier, command.key.hex(), command.group])


@lru_cache(maxsize=CACHED_TRANSFERS_MAX)
def _transfer_fields(transfer: Transfer) -> str:
    parent = None if transfer.parent is None else transfer.parent.hex()
    fields = [
        *(transfer.id, transfer.link.value, transfer.key.hex(), transfer.group, transfer.slot),
        *(transfer.tier, transfer.request, transfer.blocks, parent, transfer.depth, transfer.deadline_s),
        transfer.session,
    ]
    return _to_json(fields)


def _transfer(values: list[Any]) -> CommandMessage:
    number, id_, link, key, group, slot, tier, request, blocks, parent, depth, deadline_s, session = _checked(
        values, int, int, str, str, int, int, str, _WORD, list, _WORD, int, _NUMBER, _WORD
    )
    transfer = Transfer(
        id_,
        Link(link),
        ChunkKey(bytes.fromhex(key)),
        group,
        slot,
        tier,
        request,
        _integers(blocks),
        None if parent is None else ChunkKey(bytes.fromhex(parent)),
        depth,
        deadline_s,
        session,
    )
    return CommandMessage(number, transfer)


def _probe(values: list[Any]) -> CommandMessage:
    number, id_, tier, keys, groups, deadline_s = _checked(values, int, int, str, list, list, _NUMBER)
    objects = tuple((ChunkKey(bytes.fromhex(key)), group) for key, group in zip(keys, _integers(groups), strict=True))
    return CommandMessage(number, Probe(id_, tier, objects, deadline_s))


def _drop(values: list[Any]) -> CommandMessage:
    number, tier, key, group = _checked(values, int, str, str, int)
    return CommandMessage(number, Drop(tier, ChunkKey(bytes.fromhex(key)), group))


def _tell(values: list[Any]) -> CommandMessage:
    number, tier, session, next_turn = _checked(values, int, str, str, _WORD)
    return CommandMessage(number, Tell(tier, session, None if next_turn is None else NextTurn(next_turn)))


def _answer(values: list[Any]) -> CompletionMessage:
    number, outcome, present, *rest = _checked(values, int, str, str, int, _NUMBER, _NUMBER, str, bool)
    return CompletionMessage(number, Outcome(outcome), tuple(each == "1" for each in present), *rest)


def _cancel(values: list[Any]) -> Cancel:
    return Cancel(_integers(*_checked(values, list)))


def _note(values: list[Any]) -> Note:
    subject, request, numbers, flag = _checked(values, str, str, list, bool)
    return Note(subject, RequestId(request), _integers(numbers), flag)


def _report(values: list[Any]) -> TierReport:
    tier, used_bytes, capacity_bytes, evictions, written, stuck_queues = _checked(
        values, str, _COUNT, _COUNT, _COUNT, dict, int
    )
    fill = [count for count in (used_bytes, capacity_bytes, evictions) if count is not None]
    counts = _integers([*fill, *written.values(), stuck_queues])
    if min(counts) < 0 or max(counts) > COUNT_MAX or not written.keys() <= set(WRITE_KINDS):
        raise ValueError("not a tier's figures")
    return TierReport(tier, Figures(used_bytes, capacity_bytes, evictions, written), stuck_queues)


def _ping(values: list[Any]) -> Ping:
    return Ping(*values)


def _leave(values: list[Any]) -> Leave:
    return Leave(*values)


def _checked(values: list[Any], *kinds: type | tuple[type, ...]) -> list[Any]:
    if len(values) != len(kinds) or not all(map(isinstance, values, kinds)):
        raise TypeError("wrong types of fields")
    return values


def _integers(values: list[Any]) -> tuple[int, ...]:
    if not all(type(value) is int for value in values):
        raise TypeError("not an integer")
    return tuple(cast("list[int]", values))


_DECODERS = {
    "transfer": _transfer,
    "probe": _probe,
    "drop": _drop,
    "tell": _tell,
    "answer": _answer,
    "cancel": _cancel,
    "note": _note,
    "report": _report,
    "ping": _ping,
    "leave": _leave,
}
