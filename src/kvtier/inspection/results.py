"""What the operations of `inspection.inspector` return; `kvtier inspect --json` prints them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.tier.store_view import ObjectFile, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRow:
    """One object, by its file and the head of its frame."""

    name: str
    size_bytes: int
    used: float | None
    """Last known use, seconds since 1970; other processes record theirs about once a minute. None: unknown."""
    age_s: float | None
    group: int | None = None
    """This, part, depth, tokens and parent are None in a sealed frame."""
    part: str | None = None
    """Layers and heads of the group, and the rank if the heads are not known."""
    depth: int | None = None
    tokens: int | None = None
    model: str | None = None
    """The model id, in hexadecimal digits."""
    parent: str | None = None
    version: int | None = None
    """Format of the frame; None: the head is damaged or was not read."""
    state: str | None = None
    """`plain`, `sealed`, or why the head is not understood: `other_version`, `damaged`, `io_error`. None: the head was
    not read."""
    problem: str | None = None
    """Why the head is damaged or not understood; the fields from the head are None then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A page of a store's objects, by name."""

    directory: str
    objects: list[ObjectRow]
    total: int
    next: str | None
    """Argument of ``--after`` for the next page; None on the last page."""


@dataclass(slots=True, kw_only=True)
class Count:
    """Objects and the sum of their frames."""

    objects: int = 0
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class ModelShare:
    """Objects of one model (weights, revision, attention and RoPE settings, dtype) under one secret in a store."""

    objects: int = 0
    bytes: int = 0
    tokens: int = 0
    groups: list[int] = field(default_factory=list[int])
    parts: list[str] = field(default_factory=list[str])
    lengths: list[int] = field(default_factory=list[int])
    """Tokens of an object, each number once. Empty where all objects are sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat(Usage):
    """The totals of a store."""

    directory: str
    objects: int
    bytes: int
    """Sum of the objects' frames."""
    unreadable: int
    """Objects whose head is damaged or not understood."""
    formats: dict[str, Count]
    """By version of the frame, of the heads that were read and are not damaged."""
    states: dict[str, Count]
    """By `ObjectRow.state`, of the heads that were read."""
    oldest_age_s: float | None
    newest_age_s: float | None
    models: dict[str, ModelShare]
    """Share of each model, by the first digits of its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """One object's head and section table."""

    object: ObjectRow
    path: str
    version: int | None = None
    codec: str | None = None
    header_bytes: int | None = None
    frame_bytes: int | None = None
    raw_bytes: int | None = None
    layers: int | None = None
    key_check: str | None = None
    """Of a sealed frame: what tells the key, in hexadecimal digits."""
    sections: list[dict[str, int | str]] = field(default_factory=list[dict[str, int | str]])
    """The section table: the fields of `codec.head.Section`, with checksum and codec as text."""


class Finding(NamedTuple):
    """Of one object that was read whole."""

    outcome: str
    """`good`, `sealed` (intact, and nothing here tells whether it is forged), or as of `BadObject`."""
    reason: str = ""
    has_token_ids: bool = False
    """Whether its sealed head holds the token ids of its chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """An object that fails verification, or that cannot be read here."""

    name: str
    size_bytes: int
    outcome: str
    """`damaged`, `forged`, `foreign` (of another tenant), or `unreadable`."""
    reason: str


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """Result of reading objects."""

    directory: str
    bytes: int = 0
    """Of the frames that were verified or rewritten."""
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    """Objects by `Finding.outcome`."""
    bad_objects: list[BadObject] = field(default_factory=list[BadObject])

    def add(self, stored: ObjectFile, finding: Finding, to: list[BadObject]) -> None:
        """Count what was found in an object, and add the object to the list `to` if there is a reason to name it."""
        self.outcomes[finding.outcome] = self.outcomes.get(finding.outcome, 0) + 1
        if finding.reason:
            to.append(
                BadObject(
                    name=stored.name.hex(), size_bytes=stored.size_bytes, outcome=finding.outcome, reason=finding.reason
                )
            )


@dataclass(slots=True, kw_only=True)
class Verification(Outcomes):
    """Result of verifying all objects. Reading one of `bad_objects`, here or anywhere, is a miss and drops it."""

    checked: int = 0
    with_token_ids: int = 0
    """Objects whose head was opened with a key and holds the token ids of its chunk."""
    bad: int = 0
    dropped: int = 0
    """Bad objects removed by a repair."""
    unreadable: int = 0
    unreadable_objects: list[BadObject] = field(default_factory=list[BadObject])
    """Those that are kept: a codec or a frame version is unknown, or they are of another tenant, whose names no reader
    of this tenant asks for."""
