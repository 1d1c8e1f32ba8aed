"""Results of the operations in `inspection.inspector`. `kvtier inspect --json` prints them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.tier.store_view import ObjectFile, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRow:
    """One object, as described by its file and the head of its frame."""

    name: str
    size_bytes: int
    used: float | None
    """Last known use, in seconds since 1970; None if unknown. Other processes record uses about once a minute."""
    age_s: float | None
    group: int | None = None
    """This field, part, depth, tokens and parent are None if the frame is sealed."""
    part: str | None = None
    """The layers and heads of the group that the object holds, or the rank if the heads are unknown."""
    depth: int | None = None
    tokens: int | None = None
    model: str | None = None
    """The model id in hexadecimal digits."""
    parent: str | None = None
    version: int | None = None
    """Format version of the frame; None if the head is damaged or was not read."""
    codec: str | None = None
    """Names of the sections' codecs, separated by commas; None under the same conditions as `version`."""
    state: str | None = None
    """`plain`, `sealed`, or why the head cannot be read: `other_version`, `damaged`, `io_error`; None if it was not
    read."""
    problem: str | None = None
    """The reason why the head is damaged or cannot be read. The head's fields are then None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A page of a store's objects, sorted by name."""

    directory: str
    objects: list[ObjectRow]
    total: int
    next: str | None
    """Argument of ``--after`` for the next page; None on the last page."""


@dataclass(slots=True, kw_only=True)
class ObjectCount:
    """A number of objects, and the bytes of their frames."""

    objects: int = 0
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class ModelShare:
    """A store's objects of one model (weights, revision, attention and RoPE settings, dtype) under one secret."""

    objects: int = 0
    bytes: int = 0
    tokens: int = 0
    groups: list[int] = field(default_factory=list[int])
    parts: list[str] = field(default_factory=list[str])
    lengths: list[int] = field(default_factory=list[int])
    """The distinct numbers of tokens per object; empty if all objects are sealed."""
    loss: str | None = None
    """The engines' class (`store.loss`); None if no note next to the store gives it and no lossy codec was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStat(Usage):
    """The totals of a store."""

    directory: str
    objects: int
    bytes: int
    """Total bytes of the objects' frames."""
    unreadable: int
    """Number of objects whose head is damaged or cannot be read."""
    formats: dict[str, ObjectCount]
    """Objects whose head was read and is not damaged, by version of the frame."""
    states: dict[str, ObjectCount]
    """Objects whose head was read, by `ObjectRow.state`."""
    oldest_age_s: float | None
    newest_age_s: float | None
    models: dict[str, ModelShare]
    """The share of each model, by the first digits of its id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectView:
    """One object's head and section table."""

    object: ObjectRow
    path: str
    version: int | None = None
    codec: str | None = None
    loss: str | None = None
    """The engine's class; see `ModelShare`."""
    header_bytes: int | None = None
    frame_bytes: int | None = None
    raw_bytes: int | None = None
    layers: int | None = None
    key_check: str | None = None
    """Hexadecimal digits that identify the key of a sealed frame."""
    sections: list[dict[str, int | str]] = field(default_factory=list[dict[str, int | str]])
    """The section table: the fields of `codec.frame_header.Section`, with checksum and codec as text."""


class ReadResult(NamedTuple):
    """The result of reading one whole object."""

    outcome: str
    """`good`, `plain` (intact, but without a seal, although keys are given), `sealed` (intact, but it may be forged,
    because its key is not known), an outcome of `StoreInspector.reseal`, or one of `BadObject`."""
    reason: str = ""
    has_token_ids: bool = False
    """Whether the sealed head contains the token ids of the chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """An object that fails verification or cannot be read here."""

    name: str
    size_bytes: int
    outcome: str
    """`damaged`, `forged`, `unsealed`, `foreign` (another tenant's), or `unreadable`."""
    reason: str


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """The counted results of reading objects."""

    directory: str
    bytes: int = 0
    """Bytes of the frames that were verified or rewritten."""
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    """Number of objects by `ReadResult.outcome`."""
    bad_objects: list[BadObject] = field(default_factory=list[BadObject])

    def add(self, stored: ObjectFile, finding: ReadResult, to: list[BadObject]) -> None:
        """Count a finding, and append the object to `to` if the finding has a reason."""
        self.outcomes[finding.outcome] = self.outcomes.get(finding.outcome, 0) + 1
        if finding.reason:
            to.append(
                BadObject(
                    name=stored.name.hex(), size_bytes=stored.size_bytes, outcome=finding.outcome, reason=finding.reason
                )
            )


@dataclass(slots=True, kw_only=True)
class Verification(Outcomes):
    """The result of verifying all objects. Every reader treats `bad_objects` as misses and drops them."""

    checked: int = 0
    with_token_ids: int = 0
    """Number of objects whose head was opened with a key and contains the token ids of its chunk."""
    bad: int = 0
    dropped: int = 0
    """Number of bad objects that a repair removed."""
    unreadable: int = 0
    unreadable_objects: list[BadObject] = field(default_factory=list[BadObject])
    """Objects that are kept: they cannot be read, their codec or frame version is unknown, or another tenant owns them.
    Readers of one tenant never look up names of another."""
