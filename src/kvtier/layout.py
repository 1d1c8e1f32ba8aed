"""Layout of a chunk's bytes: KV groups, their layers, and the offset of each layer in a slot.

A payload is layer-major: layer 0 of the whole chunk, then layer 1, and so on. Each layer begins at a multiple of
`ALIGNMENT`, so any layer can be read with direct I/O. The engine arranges the bytes within a layer. `pages` names the
arrangement, which is never inferred from shapes. A layer consists of runs without gaps, and no section spans two runs.

Where the engine defines the arrangement of the numbers, a run also has axes. Only lossy codecs use axes.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from types import MappingProxyType
from typing import Literal, NamedTuple

ALIGNMENT = 4096
"""Alignment in bytes. Direct I/O requires 512 or 4096, depending on the device."""

SECTION_BYTES_MAX = 1 << 20
"""Maximum size of a section, which is the unit of checksums and ranged reads."""


Element = Literal["bf16", "fp16", "fp8e4m3", "fp8e5m2", "fp32", "bytes"]
"""Type of the little-endian numbers in a run of bytes. A codec may use it to compress better.
Lossless codecs restore the bytes even if the type is wrong."""

ELEMENT_BYTES = MappingProxyType[Element, int](
    {"bf16": 2, "fp16": 2, "fp8e4m3": 1, "fp8e5m2": 1, "fp32": 4, "bytes": 1}
)


RunKind = Literal["keys", "values", "kv", "latent", "index", "state", "bytes"]
"""The content of a run. `kv`: keys and values of a page. `latent`: MLA's latent vector, with its RoPE part in the same
row. `index`: data of a sparse attention's indexer. `state`: a recurrent layer's state. `bytes`: the engine does not
say."""


class Run(NamedTuple):
    """A stretch of a layer's bytes that has one kind and one type of number."""

    kind: RunKind
    element: Element
    size_bytes: int


_ELEMENTS = MappingProxyType[str, Element]({
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8e4m3", "float8_e5m2": "fp8e5m2",
})  # fmt: skip


def run_of(kind: RunKind, dtype: object, size_bytes: int) -> Run:
    """Return a run whose numbers have the type `dtype` (a torch dtype or its name).

    The type is ``bytes`` if `dtype` is unknown, or if `size_bytes` is not a multiple of the size of one number.
    """
    element = _ELEMENTS.get(str(dtype).removeprefix("torch."), "bytes")
    return Run(kind, "bytes" if size_bytes % ELEMENT_BYTES[element] else element, size_bytes)


Axis = Literal["layer", "side", "head", "page", "token", "channel"]
"""A dimension of a run. `layer`: outermost, if present; each layer has its own sections. `side`: keys, then values.
`head`: heads of one layer or of several. `page`: pages of consecutive tokens."""

TOKEN_GROUP = 64
"""Sections with axes are cut at multiples of this many tokens. In smaller sections, the codec's scales take a
larger share of the bytes."""

TOKENS_MIN = 16
"""Minimum number of tokens in a section that a lossy codec stores. With fewer, most stored bytes would be scales."""


class Axes(NamedTuple):
    """The arrangement of a run of keys, values or both: its dimensions, outermost first. The last is `channel`."""

    names: tuple[Axis, ...]
    sizes: tuple[int, ...]
    kind: RunKind | None = None
    """`keys` or `values`, for a run of kind `kv` that holds only these; None for the run's own kind."""

    def fitting(self, run: Run) -> "Axes | None":
        """Return these axes, or None if they do not fit `run`, for example because its type of numbers is unknown."""
        kind, has_side = self.kind or run.kind, "side" in self.names
        is_wrong = (
            len(self.names) != len(self.sizes)
            or self.names[-1:] != ("channel",)
            or len(set(self.names)) != len(self.names)
            or "layer" in self.names[1:]
            or [it for it in self.names if it in {"page", "token"}] == ["token", "page"]
            or min(self.sizes) < 1
            or kind not in LOSSY_KINDS
            or run.kind not in {kind, "kv"}
            or has_side != (kind == "kv")
            or (has_side and self.size("side") != 2)
            or math.prod(self.sizes) * ELEMENT_BYTES[run.element] != run.size_bytes
        )
        return None if is_wrong else self

    def size(self, *names: Axis) -> int:
        """Return the product of the sizes of these dimensions. A missing dimension has size 1."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in names)

    @property
    def tokens(self) -> int:
        """Number of tokens in all pages."""
        return self.size("page", "token")

    def step(self, name: Axis) -> int:
        """Return the distance between neighbors along a dimension, in numbers; 0 if the run lacks the dimension."""
        return math.prod(self.sizes[self.names.index(name) + 1 :]) if name in self.names else 0

    def cuts(self, numbers_max: int) -> Iterator[tuple[int, "Axes"]]:
        """Cut the run into pieces of at most `numbers_max` numbers, if possible at multiples of `TOKEN_GROUP` tokens.

        Yields:
            The first token and the axes (without `layer`) of each piece, in memory order.
        """
        is_layer = self.names[0] == "layer"
        count = 0 if is_layer else numbers_max // math.prod(self.sizes[1:])
        tokens = {"page": self.size("token"), "token": 1}.get(self.names[0], 0)  # per index of the outermost dimension
        if not count:
            for index in range(self.sizes[0]):
                for first, axes in Axes(self.names[1:], self.sizes[1:]).cuts(numbers_max):
                    its_axes = axes if is_layer else Axes((self.names[0], *axes.names), (1, *axes.sizes))
                    yield index * tokens + first, its_axes
            return
        unit = -(-TOKEN_GROUP // tokens) if tokens else 1
        step = count // unit * unit or count
        for start in range(0, self.sizes[0], step):
            yield start * tokens, Axes(self.names, (min(step, self.sizes[0] - start), *self.sizes[1:]))


class Cut(NamedTuple):
    """A section of a payload: its place and the facts that codecs use. It has axes if a lossy codec may encode it."""

    layer: int
    offset: int
    """Offset in the payload."""
    size_bytes: int
    element: Element
    kind: RunKind = "bytes"
    axes: Axes | None = None
    first_token: int = 0
    """The section's first token, counted from the beginning of the chunk; 0 for a section without axes."""


Loss = Literal["none", "k8v4", "int4"]
"""The class of an engine: the lossy codec with which its KV may be stored, or ``none``."""

EXACT_SALT = "exact:"
"""A request whose `cache_salt` begins with this gets exact KV: an engine with a lossy class computes it without stored
KV. vLLM's own cache separates blocks by salt anyway. An engine without a class treats the salt like any other."""

LOSSY_ELEMENTS = frozenset[Element]({"bf16", "fp16", "fp32"})
LOSSY_KINDS = frozenset[RunKind]({"keys", "values", "kv"})
"""Kinds of runs to which a class applies. Latents, indexes and states stay exact."""


def align_up(count: int, alignment: int = ALIGNMENT) -> int:
    """Return the smallest multiple of `alignment` that is at least `count`."""
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
    """Recurrent state: valid only at the boundary where it was taken."""


Validity = History | Window | State


ELSEWHERE = -1
"""Value of `GroupLayout.copy` for a group that other ranks hold and this one does not."""


class Part(NamedTuple):
    """The part of a KV group on a rank: layers, KV heads, and a share of the tokens. Every object name depends on it.

    Ranks with equal parts hold the same KV, and their objects have the same names.
    """

    first_layer: int
    """The first layer, counted among the group's layers in the whole model."""
    end_layer: int
    first_head: int = 0
    end_head: int = 0
    """Equal to `first_head` if the engine does not name the heads. Then `rank` is the number of the rank."""
    rank: int = 0
    """Number of the part's share of the tokens, out of `ranks` shares; 0 of 1 if it has all tokens. `GroupLayout.pages`
    says which tokens are in a share."""
    ranks: int = 1

    @property
    def text(self) -> str:
        """The part in words, such as ``layers 0-31, heads 4-7``."""
        heads = f", heads {self.first_head}-{self.end_head - 1}" if self.first_head < self.end_head else ""
        share = "token share" if heads else "rank"
        rank = f", {share} {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        return f"layers {self.first_layer}-{self.end_layer - 1}{heads}{rank}"


@dataclass(frozen=True)
class GroupLayout:
    """One KV group's share of a chunk, on one rank.

    Args:
        validity: the rule that decides which chunks make a boundary restorable.
        layer_bytes: payload bytes of each of the group's layers in a full chunk, in layer order.
        pages: the engine's name for the arrangement within a layer, for example ``transformers/K[head,token,dim]
            V[head,token,dim]/float32/heads=2/dim=64``. It is part of every object name.
        part: the layers and heads of this share; None if the engine does not state them. The layout digest omits it.
        copy: number of ranks before this one that hold the same part; `ELSEWHERE` if this rank does not hold it.
        runs: the runs of each layer. If empty, each layer is one run of `bytes`. They are part of every object name.
        chunk_tokens: tokens per full chunk, set by `KvLayout`. A frame has room for the ids of that many tokens.
        axes: the axes of each run of each layer, None where the engine does not define them; empty if it defines none.
        loss: the class of the engine, set by `KvLayout.of_class`. Without a class, axes affect neither bytes nor names.
    """

    validity: Validity
    layer_bytes: tuple[int, ...]
    pages: str
    part: Part | None = None
    copy: int = 0
    runs: tuple[tuple[Run, ...], ...] = ()
    chunk_tokens: int = 0
    axes: tuple[tuple[Axes | None, ...], ...] = ()
    loss: Loss = "none"

    def __post_init__(self) -> None:
        if not self.layer_bytes or min(self.layer_bytes) < 1:
            raise ValueError(f"a group needs layers of at least one byte each, got {self.layer_bytes}")
        whole = tuple((Run("bytes", "bytes", size),) for size in self.layer_bytes)
        object.__setattr__(self, "runs", self.runs or whole)
        if tuple(sum(run.size_bytes for run in layer) for layer in self.runs) != self.layer_bytes:
            raise ValueError(f"the runs {self.runs} do not fill layers of {self.layer_bytes} bytes")
        for run in set(chain.from_iterable(self.runs)):
            if run.size_bytes < 1 or run.size_bytes % ELEMENT_BYTES[run.element]:
                raise ValueError(f"{run}: its size is not a positive multiple of {ELEMENT_BYTES[run.element]} bytes")
        for run, axes in self.runs_with_axes:
            if axes is not None and axes.fitting(run) is None:
                raise ValueError(f"{axes} are not the axes of {run}")
        if self.part is not None:
            self._check(self.part)

    @property
    def runs_with_axes(self) -> Iterator[tuple[Run, Axes | None]]:
        """All runs, layer by layer, each with its axes.

        Raises:
            ValueError: axes are given, but not one entry for each run.
        """
        axes = self.axes or tuple((None,) * len(layer) for layer in self.runs)
        for layer, its_axes in zip(self.runs, axes, strict=True):
            yield from zip(layer, its_axes, strict=True)

    def _check(self, part: Part) -> None:
        is_rectangle = 0 <= part.first_layer < part.end_layer and 0 <= part.first_head <= part.end_head
        if not is_rectangle or not 0 <= part.rank < part.ranks:
            raise ValueError(f"a group cannot have the part {part}")
        if part.end_layer - part.first_layer != len(self.layer_bytes):
            raise ValueError(f"{part} does not span the {len(self.layer_bytes)} layers that this rank has of the group")

    def __hash__(self) -> int:
        """Hash only a few fields, to be fast: the frame layout of each object is looked up by its group."""
        return hash((self.layer_bytes, self.pages, self.chunk_tokens))

    @property
    def is_absent(self) -> bool:
        """Whether only other ranks hold the part. If so, this rank answers all commands about it immediately."""
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
        """All sections, in order."""
        cuts: list[Cut] = []
        places = iter(self.runs_with_axes)
        for layer, (offset, runs) in enumerate(zip(self.layer_offsets, self.runs, strict=True)):
            stop = offset
            for (kind, element, size), axes in islice(places, len(runs)):
                start, stop = stop, stop + size
                if axes is not None and _is_coded(self, kind, element):
                    width, at = ELEMENT_BYTES[element], 0
                    for first, piece in axes.cuts(SECTION_BYTES_MAX // width):
                        its_kind, numbers = axes.kind or kind, math.prod(piece.sizes)
                        if its_kind == "kv" and piece.size("side") == 1:
                            its_kind = "values" if at // axes.step("side") % 2 else "keys"
                        cuts.append(Cut(layer, start + at * width, numbers * width, element, its_kind, piece, first))
                        at += numbers
                    continue
                cuts += [
                    Cut(layer, at, min(SECTION_BYTES_MAX, stop - at), element)
                    for at in range(start, stop, SECTION_BYTES_MAX)
                ]
        return tuple(cuts)

    def of_class(self, loss: Loss) -> "GroupLayout":
        """Return a copy of this group for an engine of class `loss`.

        Raises:
            ValueError: the class applies to a run whose axes the engine does not define, or whose sections have too few
                tokens.
        """
        made = replace(self, loss=loss)
        for run, axes in made.runs_with_axes:
            is_unknown = run.kind == "bytes" and isinstance(self.validity, History) and loss != "none"
            if is_unknown or (axes is None and _is_coded(made, run.kind, run.element)):
                raise ValueError(
                    f"the engine does not define the arrangement of {run.kind} in pages {self.pages!r:.99}"
                )
        for cut in made.sections:
            if cut.axes is not None and cut.first_token == 0 and cut.axes.tokens < TOKENS_MIN:
                raise ValueError(
                    f"a section of pages {self.pages!r:.99} has {cut.axes.tokens} tokens; {loss} needs at least "
                    f"{TOKENS_MIN}"
                )
        return made


def _is_coded(group: GroupLayout, kind: RunKind, element: Element) -> bool:
    """Return whether the group's class applies to its runs of this kind and element."""
    is_lossy = group.loss != "none" and isinstance(group.validity, History)
    return is_lossy and kind in LOSSY_KINDS and element in LOSSY_ELEMENTS


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

    @property
    def loss(self) -> Loss:
        """The class of the engine."""
        return self.groups[0].loss

    def of_class(self, loss: Loss) -> "KvLayout":
        """Return a copy of this layout for an engine of class `loss`. ``none`` stands for an exact engine.

        Raises:
            ValueError: the class would have no effect, or as in `GroupLayout.of_class`.
        """
        made = KvLayout(self.chunk_tokens, tuple(group.of_class(loss) for group in self.groups))
        if loss != "none" and all(cut.axes is None for group in made.groups for cut in group.sections):
            raise ValueError("the engine has no keys and values that may be stored with loss")
        return made

    def digest(self, group: int) -> bytes:
        """Return the 32-byte digest of everything needed to read one group's bytes. Object names depend on it."""
        return self._digests[group]

    def part(self, group: int) -> Part:
        """Return the part of one group on this rank; the whole group unless the layout says otherwise."""
        known = self.groups[group]
        return known.part or Part(0, len(known.layer_bytes))

    def with_parts(self, parts: Iterable[tuple[Part | None, int]]) -> "KvLayout":
        """Return this layout with the given (part, copy) in each group, as `GroupLayout` defines them.

        Raises:
            ValueError: a part is invalid, or `parts` does not have one entry for each group.
        """
        groups = zip(self.groups, parts, strict=True)
        return KvLayout(
            self.chunk_tokens, tuple(replace(group, part=part, copy=copy) for group, (part, copy) in groups)
        )

    def on_rank(self, rank: int, ranks: int) -> "KvLayout":
        """Return this layout with a part in every group. Where the engine states none, it is this rank's alone."""
        return self.with_parts(
            (group.part or Part(0, len(group.layer_bytes), rank=rank, ranks=ranks), group.copy) for group in self.groups
        )

    @property
    def bytes_per_token(self) -> float:
        """Payload bytes (without padding) of one token in all groups."""
        return sum(sum(group.layer_bytes) for group in self.groups) / self.chunk_tokens


def of_all_ranks(layouts: Sequence[KvLayout], size: Callable[[GroupLayout], int]) -> list[int]:
    """Return the sum of `size` over all ranks, for each group. Ranks may hold different layers.

    Raises:
        ValueError: the ranks have different numbers of groups.
    """
    return [sum(map(size, groups)) for groups in zip(*(it.groups for it in layouts), strict=True)]


def engine_bytes(group: GroupLayout) -> int:
    """Return the size of a full chunk in the engine's blocks on this rank: that of a payload without padding."""
    return 0 if group.is_absent else sum(group.layer_bytes)


def largest(layouts: Sequence[KvLayout]) -> KvLayout:
    """Return a layout with each group's largest payload among the ranks, because a transfer takes as long as that.

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
    described: list[object] = [2, chunk_tokens, rule, group.runs, group.pages]
    if group.loss != "none":
        described += [group.loss, group.axes]
    fields = json.dumps(described, separators=(",", ":"))
    return hashlib.sha256(b"kvtier.layout\0" + fields.encode()).digest()
