"""Keeps the trace of a run, and computes a digest of it that no rename changes.

The digest covers numbers only. Each kind of record and each enum member has a fixed number in this file. Keys,
requests, tiers and conversations are numbered in order of first appearance. If the core renames a class, field or
member, rename it here too and keep the number. Fields without effect on behaviour (texts, hints) are left out.
"""

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from hashlib import blake2b
from typing import Any

from kvtier.types import (
    Cancel,
    Direction,
    Drop,
    LoadDone,
    LoadOption,
    Lookup,
    NextTurn,
    ObjectsDone,
    Outcome,
    Presence,
    Probe,
    StoreDone,
    Tell,
    TierNotice,
    Transfer,
)

TAIL = 400
"""Number of records that are kept for the report of a failure."""


class RecordKind(IntEnum):
    """Kinds of records. The numbers are part of the recorded digests, so never change or reuse one."""

    DRAIN = 1
    TICK = 2
    ARRIVE = 3
    LOOKUP = 4
    LOAD = 5
    STORE = 6
    RELEASE = 7
    EXPECTS = 8
    ANSWER = 9
    PROBE_ANSWER = 10
    LOAD_DONE = 11
    STORE_DONE = 12
    TIER_NOTICE = 13
    TRANSFER = 14
    PROBE = 15
    CANCEL = 16
    DROP = 17
    TELL = 18
    EVICTED = 19
    OBJECTS_DONE = 20
    HINT = 21


MEMBERS: dict[Enum, int] = {
    Outcome.DONE: 0,
    Outcome.FAILED: 1,
    Outcome.ABSENT: 2,
    Outcome.CORRUPT: 3,
    Outcome.CANCELLED: 4,
    Presence.READY: 10,
    Presence.ARRIVING: 11,
    Presence.PROBING: 12,
    Presence.ABSENT: 13,
    Direction.GATHER: 20,
    Direction.SCATTER: 21,
    Direction.DEMOTE: 22,
    Direction.PROMOTE: 23,
    NextTurn.TOOL: 30,
    NextTurn.USER: 31,
    NextTurn.NOBODY: 32,
}

FIELDS: dict[type, tuple[RecordKind | None, Callable[[Any], tuple[object, ...]]]] = {
    Lookup: (None, lambda a: (a.tokens, a.ready_tokens, a.presence, a.sources, a.options, a.history_tokens)),
    LoadOption: (None, lambda a: (a.tokens, a.source, a.seconds)),
    LoadDone: (RecordKind.LOAD_DONE, lambda a: (a.request, a.tokens, a.failed, a.sources, a.was_cut)),
    StoreDone: (RecordKind.STORE_DONE, lambda a: (a.request, a.stored, a.dropped)),
    ObjectsDone: (RecordKind.OBJECTS_DONE, lambda a: (a.request, a.outcomes)),
    TierNotice: (RecordKind.TIER_NOTICE, lambda a: (a.tier, a.way, a.is_up)),
    Transfer: (
        RecordKind.TRANSFER,
        lambda a: (a.id, a.direction, a.key, a.group, a.slot, a.tier, a.request, a.blocks, a.depth, a.deadline_s),
    ),
    Probe: (RecordKind.PROBE, lambda a: (a.id, a.tier, a.objects, a.deadline_s)),
    Cancel: (RecordKind.CANCEL, lambda a: (a.ids,)),
    Drop: (RecordKind.DROP, lambda a: (a.tier, a.key, a.group)),
    Tell: (RecordKind.TELL, lambda a: (a.tier, a.conversation, a.next_turn)),
}


class RunTrace:
    """Records of what passes between engine, core and executor.

    Args:
        has_digest: digest every record. Without it only the last records are kept.
    """

    def __init__(self, *, has_digest: bool) -> None:
        self._tail: deque[tuple[float, RecordKind, tuple[object, ...]]] = deque(maxlen=TAIL)
        self._digest = blake2b(digest_size=16) if has_digest else None
        self._numbers: dict[str | bytes, int] = {}

    def event(self, now_s: float, event: Any) -> None:
        """Add an event or a command of the core."""
        kind, _ = FIELDS[type(event)]
        assert kind is not None
        self.add(now_s, kind, event)

    def add(self, now_s: float, kind: RecordKind, *values: object) -> None:
        """Add a record."""
        self._tail.append((now_s, kind, values))
        if self._digest is not None:
            words = [f"{now_s:.6f}", str(int(kind))]
            self._encode(values, words)
            self._digest.update(" ".join(words).encode() + b"\n")

    def lines(self) -> tuple[str, ...]:
        """Return the last records as text."""
        return tuple(
            f"{now_s:.6f} {kind.name.lower()} {' '.join(map(str, values))}" for now_s, kind, values in self._tail
        )

    def digest(self) -> str:
        """Return the digest of all records. Empty without one."""
        return self._digest.hexdigest() if self._digest is not None else ""

    def _encode(self, values: Iterable[object], words: list[str]) -> None:
        for value in values:
            if type(value) in FIELDS:
                self._encode(FIELDS[type(value)][1](value), words)
            elif value is None:
                words.append("-")
            elif isinstance(value, Enum):
                words.append(str(MEMBERS[value]))
            elif isinstance(value, float):
                words.append(f"{value:.6f}")
            elif isinstance(value, int):  # also for a bool
                words.append(str(int(value)))
            elif isinstance(value, str | bytes):
                words.append(f"#{self._numbers.setdefault(value, len(self._numbers))}")
            elif isinstance(value, list | tuple):
                words.append(f"({len(value)}")
                self._encode(value, words)
            else:
                raise TypeError(f"{value!r} has no number")
