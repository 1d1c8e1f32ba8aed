"""Plain values that pass between layers. They have no behavior, and the module imports nothing from kvtier."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NewType

ChunkKey = NewType("ChunkKey", bytes)
"""32-byte digest of parent key, tokens and extras. It names a whole prefix and is the same for all groups and ranks."""

ObjectName = NewType("ObjectName", bytes)
"""32-byte digest of key, group, part and layout. It names one stored object, which ranks with equal parts share."""

RequestId = NewType("RequestId", str)
"""The engine's name of a request; unique while the request is open."""

Way = Literal["read", "write"]
"""Direction of an operation on a lower tier."""


class Presence(Enum):
    """Whether a chunk can be loaded."""

    READY = "ready"  # in host memory
    ARRIVING = "arriving"  # in transfer to host memory, or reported by a lower tier
    PROBING = "probing"  # a probe is open
    ABSENT = "absent"


class Outcome(Enum):
    """The result of a transfer."""

    DONE = "done"
    FAILED = "failed"  # no bytes moved; the source may be good
    ABSENT = "absent"  # the source has no such object, or none that this process can read
    CORRUPT = "corrupt"  # the source is bad and must be dropped
    CANCELLED = "cancelled"  # never started

    __hash__ = object.__hash__  # members are singletons, and Enum's own hash runs in Python


SEVERITY = {
    Outcome.DONE: 0,
    Outcome.CANCELLED: 1,
    Outcome.ABSENT: 2,
    Outcome.FAILED: 3,
    Outcome.CORRUPT: 4,
}
"""Severity of outcomes: when ranks disagree, the most severe outcome counts."""


class Direction(Enum):
    """Direction of a transfer. One end is always a host slot."""

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
        """Number of tokens in all chunks."""
        return len(self.keys) * self.chunk_tokens


class NextTurn(Enum):
    """The next turn that a conversation is expected to have, as a hint. Files and requests use the same values."""

    TOOL = "tool"
    """A tool or an agent continues within seconds."""
    USER = "user"
    """A person continues within minutes, or never."""
    NOBODY = "nobody"
    """The conversation is over."""


class ObjectId(NamedTuple):
    """One object: a page or state of the engine, in one KV group."""

    key: ChunkKey
    """32 bytes with which the engine names the content, such as a SHA-256 of its tokens. They need not be secret,
    because stored names are keyed with the store's secret and the fingerprint."""
    group: int = 0
    """Index of its KV group in `KvLayout.groups`."""


class Origin(NamedTuple):
    """The origin of an object, for the tiers' eviction policies."""

    parent: ChunkKey | None = None
    """Key of the page before it; None at the start of a prefix, and for groups without history."""
    depth: int = 0
    """Number of pages before it."""
    conversation: str | None = None
    """The conversation that the object belongs to; None if unknown."""


class ObjectBytes(NamedTuple):
    """One object, and the caller's memory for it."""

    object: ObjectId
    pieces: Sequence[Any]
    """Contiguous buffers (memoryview, numpy array and so on) of `GroupLayout.layer_bytes` bytes: one for each layer of
    the KV group, in order. A layer is data that the engine keeps in one piece, such as the K or the V of a page."""
    origin: Origin = Origin()


class Place(NamedTuple):
    """The engine's blocks of one object: a chunk in one group. Only the copier understands `blocks`."""

    group: int
    chunk: int
    """Position of the chunk in the prefix."""
    blocks: tuple[int, ...]


class Transfer(NamedTuple):
    """Moves one object. The core issues it, the mover executes it, and it is complete when every rank has answered."""

    id: int
    direction: Direction
    key: ChunkKey
    group: int
    slot: int
    tier: str  # "" for gather and scatter
    request: RequestId | None  # owner of the blocks; None for demote and promote
    blocks: tuple[int, ...]  # () for demote and promote
    parent: ChunkKey | None
    depth: int  # number of chunks before this one
    deadline_s: float  # on the session's clock; later completions do not count
    conversation: str | None  # the conversation, for eviction policies
    text: bytes = b""  # for a demotion to a sealed frame, which stores it: the chunk's token ids as u32, then extras
    is_relay: bool = False  # the slot is in the staging area, where no request finds the object


class Probe(NamedTuple):
    """Asks one lower tier which objects it holds. Objects are (key, group) pairs."""

    id: int
    tier: str
    objects: tuple[tuple[ChunkKey, int], ...]
    deadline_s: float


class Drop(NamedTuple):
    """Removes a bad copy from a lower tier. A later demotion of the same object starts after the drop."""

    tier: str
    key: ChunkKey
    group: int


class Tell(NamedTuple):
    """Passes a hint about the next turn of `conversation` to a lower tier's evictor."""

    tier: str
    conversation: str
    next_turn: NextTurn | None


class Recall(NamedTuple):
    """Asks one rank for those chunks of a lower tier whose tokens are in their objects' encrypted headers.

    The first command with a new `number` starts a recall in its own thread. Each command completes immediately with a
    `RecallPage` of the records that are known by then.
    """

    tier: str
    group: int
    number: int  # number of the recall, at least 1; a new number starts a new recall
    position: int  # number of this recall's records that earlier commands returned


class Cancel(NamedTuple):
    """Names transfers that no operation waits for anymore. Transfers that have not started need not start."""

    ids: tuple[int, ...]


Command = Transfer | Probe | Drop | Tell | Recall | Cancel


class ChunkRecord(NamedTuple):
    """A chunk that a lower tier holds, as the encrypted header of its object describes it."""

    key: ChunkKey
    parent: ChunkKey | None
    """Key of the chunk before it; None at the start of a prompt."""
    depth: int
    """Number of chunks before it."""
    tokens: bytes
    """Ids of its tokens, each a little-endian u32."""
    extras: bytes
    """The extras, at most 388 bytes, as passed by the engine adapter that stored the chunk."""


class RecallPage(NamedTuple):
    """Some records of a recall."""

    records: tuple[ChunkRecord, ...]
    """Each record follows its parent, which may be in an earlier page. Chains of newer objects come first."""
    is_last: bool
    """Whether no more records will follow. If it is false, `records` may still be empty, because the
    tier is being read."""


class LoadOption(NamedTuple):
    """One possible load and its expected time."""

    tokens: int
    """Number of leading tokens that it loads: a valid boundary for every KV group."""
    source: str
    """The slowest source (host memory or a tier) that the load requires."""
    seconds: float
    """Expected time from start to end, including transfers queued before it."""
    wait_s: float
    """Longest time during the load in which no further chunk becomes usable."""
    is_known: bool
    """Whether every link that the load requires has a measurement. Otherwise the times are guesses."""
    chunk_tokens: int = 0
    """The load may end early at any multiple of this number of tokens; 0 if it may not end early."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a lookup: how many leading tokens can be loaded.

    `presence` is PROBING while an open probe could still raise `tokens`. Otherwise it is READY or ARRIVING when
    `tokens` > 0, and ABSENT when nothing can be loaded.
    """

    tokens: int
    """Number of leading tokens that a load can bring: a valid boundary for every KV group."""
    ready_tokens: int
    """Number of leading tokens that host memory can serve now, at most `tokens`."""
    presence: Presence
    sources: tuple[tuple[str, int], ...] = ()
    """(source, tokens) for each source of a load of `tokens`, "host" first."""
    options: tuple[LoadOption, ...] = ()
    """The load of `tokens`, and loads of the fewer tokens that faster sources alone can bring. Empty while PROBING."""
    history_tokens: int = 0
    """Number of leading tokens whose chunks are present in every history group; `tokens` if there is no such group. It
    exceeds `tokens` where a window or state is missing at the boundary, because another prompt diverged there.
    """


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended. None of its transfers touches the engine's blocks anymore."""

    request: RequestId
    tokens: int
    """Number of leading tokens whose KV is in the engine's blocks: a valid boundary for every group, possibly 0."""
    wanted_tokens: int
    failed: tuple[tuple[int, int], ...]
    """(group, chunk) of every object that did not arrive."""
    sources: tuple[tuple[str, int], ...] = ()
    """(source, tokens) for each source that delivered tokens."""
    was_cut: bool = False
    """Whether the load ended because it exceeded its `LoadBudget`. The engine should compute the rest without
    another load."""


@dataclass(frozen=True, slots=True)
class StoreDone:
    """A store has ended. None of its transfers reads the engine's blocks anymore."""

    request: RequestId
    stored: int
    """Number of objects that are readable in host memory, new or already there."""
    dropped: int
    """Number of objects that got no slot in time, or whose transfer failed."""


@dataclass(frozen=True, slots=True)
class TierNotice:
    """The reads or writes of a lower tier stopped (`is_up` is false) or resumed."""

    tier: str
    way: Way
    is_up: bool
    detail: str
    is_late: bool = False
    """Whether the last failed operation was overdue, and so has no error yet."""


@dataclass(frozen=True, slots=True)
class ObjectsDone:
    """A lookup, get or put of objects has ended. None of its copies touches the caller's memory anymore."""

    request: RequestId
    outcomes: tuple[Outcome, ...]
    """Outcome of each object, in order. A lookup reports DONE if a tier holds the object, otherwise ABSENT."""


Event = LoadDone | StoreDone | ObjectsDone | TierNotice


class Priority(IntEnum):
    """Priority of a retention. Once hints use up their share of host memory, the retention of lowest priority ends."""

    NORMAL = 0
    HIGH = 1
    """Requests may ask for it if the settings allow it."""
    OPERATOR = 2
    """Only calls on the control socket have it. Their prefetches have a separate limit."""


WRITE_KINDS = ("frames", "upkeep", "avoided")
"""Kinds of bytes, in order: frames; the index, and copies during eviction; bytes that the write budget kept from being
written."""


class Figures(NamedTuple):
    """A tier's fill level and writes. A field is None if the tier does not report it."""

    used_bytes: int | None = None
    capacity_bytes: int | None = None
    """The current cap. It is below its setting while the file system is full."""
    evictions: int | None = None
    """Number of objects evicted by this process since the start."""
    write_bytes: Mapping[str, int] = MappingProxyType({})
    """Bytes written since the start, by kind. Kinds other than `WRITE_KINDS` are ignored."""
    direct_io: bool | None = None
    """Whether reads and writes bypass the page cache."""
