"""Layout of a chunk's bytes: KV groups, their layers, and the offset of each layer in a slot.

A payload is layer-major: layer 0 of the whole chunk, then layer 1, and so on. Each layer begins at a multiple of
`ALIGNMENT`, so any layer can be read with direct I/O. Within a layer the arrangement is the engine's. `pages` names it;
it is never inferred from shapes. A layer consists of runs, without gaps, and no section crosses a run.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

ALIGNMENT = 4096
"""Bytes; direct I/O needs 512 or 4096, depending on the device."""

SECTION_BYTES_MAX = 1 << 20
"""Longest section: the unit of checksums and ranged reads."""


Element = Literal["bf16", "fp16", "fp8e4m3", "fp8e5m2", "fp32", "bytes"]
"""Type of the numbers in a run of bytes; little-endian. A codec may use it; the bytes are restored in any case."""

ELEMENT_BYTES = MappingProxyType[Element, int](
    {"bf16": 2, "fp16": 2, "fp8e4m3": 1, "fp8e5m2": 1, "fp32": 4, "bytes": 1}
)


RunKind = Literal["keys", "values", "kv", "latent", "index", "state", "bytes"]
"""What a run holds. `kv`: keys and values of a page; `latent`: MLA's, with its RoPE part in the same row; `index`: of a
sparse attention's indexer; `state`: of a recurrent layer; `bytes`: the engine does not say."""


class Run(NamedTuple):
    """A stretch of a layer's bytes that has one kind and one type of number."""

    kind: RunKind
    element: Element
    size_bytes: int


_ELEMENTS = MappingProxyType[str, Element]({
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2",
})  # fmt: skip


def run_of(kind: RunKind, dtype: object, size_bytes: int) -> Run:
    """A run of numbers of a torch dtype, or of its name; `bytes` where that is no known one or does not divide it."""
    element = _ELEMENTS.get(str(dtype).removeprefix("torch."), "bytes")
    return Run(kind, "bytes" if size_bytes % ELEMENT_BYTES[element] else element, size_bytes)


class Cut(NamedTuple):
    """A section of a payload: its place and the type of its numbers."""

    layer: int
    offset: int
    """In the payload."""
    size_bytes: int
    element: Element


def align_up(count: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `count`."""
    return -(-count // alignment) * alignment


@dataclass(frozen=True, slots=True)
class History:
    """Full attention: a prefix is valid when every one of its chunks is present."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding window: a boundary is valid when the chunks that cover the `tokens` before it are present."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"window.tokens must be at least 1, got {self.tokens}")


@dataclass(frozen=True, slots=True)
class State:
    """Recurrent state: valid at exactly the boundary it was taken at, and nowhere else."""


Validity = History | Window | State


ELSEWHERE = -1
"""`GroupLayout.copy` of a group that other ranks hold, and this one does not."""


class Part(NamedTuple):
    """What a rank holds of a KV group: layers, KV heads, and a share of the tokens. It is in every object name.

    Ranks with equal parts hold the same KV, and their objects have the same names.
    """

    first_layer: int
    """Counted in the group's layers of the whole model."""
    end_layer: int
    first_head: int = 0
    end_head: int = 0
    """Equal to `first_head`: the engine does not name the heads, and `rank` is the number of the rank."""
    rank: int = 0
    """0 of 1 for all tokens of these heads; otherwise the number of the share of their tokens. `GroupLayout.pages` says
    which tokens those are."""
    ranks: int = 1

    @property
    def text(self) -> str:
        """For people: ``layers 0-31, heads 4-7``."""
        heads = f", heads {self.first_head}-{self.end_head - 1}" if self.first_head < self.end_head else ""
        share = "token share" if heads else "rank"
        rank = f", {share} {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        return f"layers {self.first_layer}-{self.end_layer - 1}{heads}{rank}"


@dataclass(frozen=True)
class GroupLayout:
    """One KV group's share of a chunk, on one rank.

    Args:
        validity: which chunks make a boundary restorable.
        layer_bytes: payload bytes of each of the group's layers in a full chunk, in layer order.
        pages: the engine's name for the arrangement within a layer, for example ``transformers/K[head,token,dim]
            V[head,token,dim]/float32/heads=2/dim=64``. Part of every object name.
        part: which layers and heads these are; None if the engine does not say. Not in the layout digest.
        copy: how many ranks before this one hold the same part; `ELSEWHERE`: this rank does not hold it.
        runs: of each layer; empty: each layer is a run of `bytes`. Part of every object name.
        chunk_tokens: tokens of a full chunk, set by `KvLayout`: a frame has room for their ids. 0: it has none.
    """

    validity: Validity
    layer_bytes: tuple[int, ...]
    pages: str
    part: Part | None = None
    copy: int = 0
    runs: tuple[tuple[Run, ...], ...] = ()
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.layer_bytes or min(self.layer_bytes) < 1:
            raise ValueError(f"a group needs layers of at least one byte each, got {self.layer_bytes}")
        whole = tuple((Run("bytes", "bytes", size),) for size in self.layer_bytes)
        object.__setattr__(self, "runs", self.runs or whole)
        if tuple(sum(run.size_bytes for run in layer) for layer in self.runs) != self.layer_bytes:
            raise ValueError(f"the runs {self.runs} are not the whole of layers of {self.layer_bytes} bytes")
        for run in set(chain.from_iterable(self.runs)):
            if run.size_bytes < 1 or run.size_bytes % ELEMENT_BYTES[run.element]:
                raise ValueError(f"{run} is not a positive number of {run.element}")
        if self.part is not None:
            self._check(self.part)

    def _check(self, part: Part) -> None:
        is_rectangle = 0 <= part.first_layer < part.end_layer and 0 <= part.first_head <= part.end_head
        if not is_rectangle or not 0 <= part.rank < part.ranks:
            raise ValueError(f"impossible part of a group: {part}")
        if part.end_layer - part.first_layer != len(self.layer_bytes):
            raise ValueError(f"{part} is not the part of a rank with {len(self.layer_bytes)} layers of this group")

    def __hash__(self) -> int:
        """Quick, because frames are looked up by their group for each object."""
        return hash((self.layer_bytes, self.pages, self.chunk_tokens))

    @property
    def is_absent(self) -> bool:
        """Whether only other ranks hold the part: this one answers all commands about it at once."""
        return self.copy == ELSEWHERE

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer in the payload; multiples of `ALIGNMENT`."""
        offsets: list[int] = []
        position = 0
        for size in self.layer_bytes:
            offsets.append(position)
            position += align_up(size)
        return tuple(offsets)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of a payload in a slot, including padding; a multiple of `ALIGNMENT`."""
        return self.layer_offsets[-1] + align_up(self.layer_bytes[-1])

    @cached_property
    def sections(self) -> tuple[Cut, ...]:
        """Each section, in order."""
        cuts: list[Cut] = []
        for layer, (offset, runs) in enumerate(zip(self.layer_offsets, self.runs, strict=True)):
            stop = offset
            for _, element, size in runs:
                start, stop = stop, stop + size
                cuts += [
                    Cut(layer, at, min(SECTION_BYTES_MAX, stop - at), element)
                    for at in range(start, stop, SECTION_BYTES_MAX)
                ]
        return tuple(cuts)


@dataclass(frozen=True)
class KvLayout:
    """The layout of all KV groups of one model on one engine."""

    chunk_tokens: int
    groups: tuple[GroupLayout, ...]
    _digests: tuple[bytes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not self.groups:
            raise ValueError("a model needs at least one KV group")
        groups = tuple(replace(group, chunk_tokens=self.chunk_tokens) for group in self.groups)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "_digests", tuple(_digest(self.chunk_tokens, group) for group in self.groups))

    def digest(self, group: int) -> bytes:
        """32-byte digest of everything needed to read one group's bytes; part of its object names."""
        return self._digests[group]

    def part(self, group: int) -> Part:
        """The part of one group on this rank; the whole group unless the layout says otherwise."""
        known = self.groups[group]
        return known.part or Part(0, len(known.layer_bytes))

    def with_parts(self, held: Iterable[tuple[Part | None, int]]) -> "KvLayout":
        """This layout with the part and copy of each group.

        Raises:
            ValueError: a part is impossible, or there are not as many as groups.
        """
        groups = zip(self.groups, held, strict=True)
        return KvLayout(
            self.chunk_tokens, tuple(replace(group, part=part, copy=copy) for group, (part, copy) in groups)
        )

    def on_rank(self, rank: int, ranks: int) -> "KvLayout":
        """This layout with a part for every group: where the engine does not say it, ranks share no object name."""
        return self.with_parts(
            (group.part or Part(0, len(group.layer_bytes), rank=rank, ranks=ranks), group.copy) for group in self.groups
        )

    @property
    def bytes_per_token(self) -> float:
        """Payload bytes (without padding) of one token in all groups."""
        return sum(sum(group.layer_bytes) for group in self.groups) / self.chunk_tokens


def of_all_ranks(layouts: Sequence[KvLayout], size: Callable[[GroupLayout], int]) -> list[int]:
    """What `size` says of each group, on all ranks together. Ranks may hold different layers.

    Raises:
        ValueError: the ranks have different numbers of groups.
    """
    return [sum(map(size, groups)) for groups in zip(*(it.groups for it in layouts), strict=True)]


def engine_bytes(group: GroupLayout) -> int:
    """Bytes of a full chunk in the engine's blocks on this rank: a payload without padding."""
    return 0 if group.is_absent else sum(group.layer_bytes)


def largest(layouts: Sequence[KvLayout]) -> KvLayout:
    """The layout with the largest payload of each group: a transfer of all ranks lasts as long as that of the largest.

    Raises:
        ValueError: the ranks have different numbers of groups.
    """
    groups = zip(*(it.groups for it in layouts), strict=True)
    return KvLayout(
        layouts[0].chunk_tokens, tuple(max(of_ranks, key=lambda it: it.payload_bytes) for of_ranks in groups)
    )


def _digest(chunk_tokens: int, group: GroupLayout) -> bytes:
    validity = group.validity
    rule = f"window:{validity.tokens}" if isinstance(validity, Window) else type(validity).__name__.lower()
    fields = json.dumps([2, chunk_tokens, rule, group.runs, group.pages], separators=(",", ":"))
    return hashlib.sha256(b"kvtier.layout\0" + fields.encode()).digest()
