"""The plain values that travel between the layers. No behaviour, no imports of ours."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32-byte digest of parent key, tokens and extras: names a whole prefix. The same for all groups and ranks."""

ObjectName = NewType("ObjectName", bytes)
"""32-byte digest of key, group, rank and layout: names one stored object."""

RequestId = NewType("RequestId", str)
"""The engine's name of a request; unique while the request lives."""

Way = Literal["read", "write"]
"""What is done with a lower tier."""


class Presence(Enum):
    """Whether a chunk can be given."""

    READY = "ready"  # in host memory
    ARRIVING = "arriving"  # on its way to host memory, or a lower tier says that it holds it
    PROBING = "probing"  # a lower tier is being asked
    ABSENT = "absent"


class Outcome(Enum):
    """How a transfer ended."""

    DONE = "done"
    FAILED = "failed"  # the bytes did not move; the source may still be good
    ABSENT = "absent"  # the source no longer has them
    CORRUPT = "corrupt"  # the source is bad; drop it
    CANCELLED = "cancelled"  # never started

    __hash__ = object.__hash__  # a member is one object; the hash that Enum brings runs in Python


class Link(Enum):
    """The way a transfer takes. One end is always a host slot."""

    GATHER = "gather"  # engine blocks -> slot
    SCATTER = "scatter"  # slot -> engine blocks
    DEMOTE = "demote"  # slot -> lower tier
    PROMOTE = "promote"  # lower tier -> slot

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys of a prompt's full chunks. Chunk `i` covers tokens [i * chunk_tokens, (i + 1) * chunk_tokens)."""

    keys: tuple[ChunkKey, ...]
    chunk_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens in all its chunks."""
        return len(self.keys) * self.chunk_tokens


class NextTurn(Enum):
    """Who goes on with a conversation, as somebody who should know says; values as in files and requests."""

    TOOL = "tool"
    """A tool or an agent: seconds."""
    USER = "user"
    """A person: minutes, or never."""
    NOBODY = "nobody"
    """It is over."""


class Place(NamedTuple):
    """Where one chunk of one group lies in the engine: `blocks` is an address that only the copier understands."""

    group: int
    chunk: int
    """Position of the chunk in the prefix."""
    blocks: tuple[int, ...]


class Transfer(NamedTuple):
    """One movement of one object, decided by the core, obeyed by the mover, complete when every rank has answered."""

    id: int
    link: Link
    key: ChunkKey
    group: int
    slot: int
    tier: str  # "" on gather and scatter
    request: RequestId | None  # whose blocks; None on demote and promote
    blocks: tuple[int, ...]  # () on demote and promote
    parent: ChunkKey | None
    depth: int  # chunks before this one in its prefix
    deadline_s: float  # on the session's clock; after it the answer no longer counts
    session: str | None  # the conversation, for eviction policies


class Probe(NamedTuple):
    """A question to one lower tier: which of these objects does it hold? Objects are (key, group) pairs."""

    id: int
    tier: str
    objects: tuple[tuple[ChunkKey, int], ...]
    deadline_s: float


class Drop(NamedTuple):
    """An order to remove a bad copy from a lower tier. A demotion of the same object ordered later begins after it."""

    tier: str
    key: ChunkKey
    group: int


class Tell(NamedTuple):
    """News for a lower tier whose evictor takes hints: who goes on with `session`."""

    tier: str
    session: str
    next_turn: NextTurn | None


class Cancel(NamedTuple):
    """Transfers whose result nobody waits for any more; those that have not begun need not begin."""

    ids: tuple[int, ...]


Command = Transfer | Probe | Drop | Tell | Cancel


class LoadOption(NamedTuple):
    """What a load would take."""

    tokens: int
    """Leading tokens that it would bring: a valid boundary for every KV group."""
    place: str
    """The slowest place that it needs."""
    seconds: float
    """Expected time from the beginning of the load to its end, with what is under way before it."""
    wait_s: float
    """The longest time in it during which nothing comes that would be of use by itself."""
    is_known: bool
    """Whether every link that it needs has been used before; otherwise the times are mere hope."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many leading tokens can be given.

    `presence` is READY or ARRIVING when `tokens` > 0 and no question is open, PROBING while a lower tier's answer could
    still make `tokens` larger, ABSENT when nothing can be given.
    """

    tokens: int
    """Leading tokens that a load can bring: a valid boundary for every KV group."""
    ready_tokens: int
    """Of these, the leading tokens that are in host memory now."""
    presence: Presence
    sources: tuple[tuple[str, int], ...] = ()
    """(place, tokens) for the tokens of a load, "host" first."""
    options: tuple[LoadOption, ...] = ()
    """What loading would take: up to `tokens`, and up to shorter boundaries that do without the slower places. None
    while PROBING."""
    history_tokens: int = 0
    """Leading tokens of which every history group has all chunks. More than `tokens` where a window or state is missing
    at that boundary: another prompt was alike up to there, and parted. `tokens` where no group is of history."""


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended; none of its transfers touches the engine's blocks any more."""

    request: RequestId
    tokens: int
    """Leading tokens whose KV is now in the engine's blocks: a valid boundary for every group, possibly 0."""
    wanted_tokens: int
    failed: tuple[tuple[int, int], ...]
    """(group, chunk) of every chunk that did not arrive."""
    sources: tuple[tuple[str, int], ...] = ()
    """(place the bytes came from, tokens), for the tokens delivered."""
    was_cut: bool = False
    """It had ceased to pay (`LoadBudget`): compute the rest, do not ask again."""


@dataclass(frozen=True, slots=True)
class StoreDone:
    """A store has ended; none of its transfers reads the engine's blocks any more. What is `held` is readable now."""

    request: RequestId
    held: int
    """Chunks (all groups counted) that are in host memory, whether new or already there."""
    dropped: int
    """Chunks that were not admitted, found no room in time, or failed."""


@dataclass(frozen=True, slots=True)
class TierNotice:
    """The reads or the writes of a lower tier stopped (`is_up` false) or began again."""

    tier: str
    way: Way
    is_up: bool
    detail: str


Event = LoadDone | StoreDone | TierNotice
