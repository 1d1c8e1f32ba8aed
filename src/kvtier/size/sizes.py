"""KV size of a model: per token, session, rank and chunk.

Two sizes are given wherever they differ. The *minimum* is what the model can still read: a window's last tokens, one
copy. The *stored* size is that of an engine or store that keeps every layer for every token, with the copies of tensor
parallelism.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from kvtier.codec.head import SECTIONS_MAX, frame_layout
from kvtier.errors import ConfigError
from kvtier.layout import SECTION_BYTES_MAX, GroupLayout, History, State, Validity, Window
from kvtier.report.format import both, decimal, exact
from kvtier.size.caches import LayerCache, TokenPart
from kvtier.size.dtype import Format, parse_dtype
from kvtier.size.model import Model, model

CHUNK_TOKENS = 256
CHUNK_TOKENS_MAX = 1 << 20
TOKENS_MAX = 10**12
USERS_MAX = 10**12
TP_MAX = 1024


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Equal caches of several layers: all of them together, one sequence, one copy, in bytes."""

    cache: LayerCache
    count: int
    """Layers with this cache."""
    bytes_per_token: float
    """For tokens inside the window; 0 for a state."""
    bytes_per_session: float
    """Bytes that do not depend on the length: a full window, a state."""
    formula: str
    """The formula with its numbers: ``36 layers x 2 x 8 x 128 x 2 B``."""


@dataclass(frozen=True, slots=True)
class ObjectSize:
    """One stored object: one KV group of one chunk on one rank."""

    rule: str
    """When it is valid: ``history``, ``window 128``, or ``state``."""
    layers: int
    """Caches in it."""
    bytes: int
    """Bytes of the caches, without padding."""
    padded_bytes: int
    """With every layer at a multiple of `kvtier.layout.ALIGNMENT`."""
    frame_bytes: int
    """As stored: header, section table and padded layers."""

    @property
    def overhead(self) -> float:
        """Share of the stored bytes above the plain ones: 0.01 is one per cent."""
        return self.frame_bytes / self.bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Sessions of equal length, in bytes."""

    tokens: int
    """Tokens of one session."""
    users: int
    """Sessions."""
    bytes: float
    """Stored: every layer for every token, on all ranks."""
    bytes_minimum: float
    """Minimum: windows forget, one copy."""


@dataclass(frozen=True, kw_only=True)
class KvSize:
    """The sizes of one model in one format on one arrangement of ranks, in bytes. Made by `of`."""

    model: Model
    form: Format
    tp: int
    pp: int
    chunk_tokens: int

    @cached_property
    def layers(self) -> tuple[LayerSize, ...]:
        """Each distinct cache with its formula."""
        return tuple(_layer_size(cache, count, self.form) for cache, count in self.model.runs)

    @cached_property
    def bytes_per_token(self) -> float:
        """Every layer that has a token axis, all heads, one copy."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @cached_property
    def bytes_per_token_growing(self) -> float:
        """Only layers without a window: the cost of one more token in a long context."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.cache.window is None)

    @cached_property
    def bytes_per_session_constant(self) -> float:
        """Full windows and states: the part of a session that does not grow."""
        return sum(layer.bytes_per_session for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """One snapshot of all states, valid only at the boundary at which it was taken."""
        return sum(count * cache.state_bytes for cache, count in self.model.runs)

    @cached_property
    def bytes_per_token_stored(self) -> float:
        """All ranks together, copies included, every layer kept."""
        return self.tp * sum(count * cache.rank_token_bytes(self.form, self.tp) for cache, count in self.model.runs)

    @cached_property
    def state_bytes_stored(self) -> float:
        """A snapshot on all ranks together, copies included."""
        return self.tp * sum(count * cache.rank_state_bytes(self.tp) for cache, count in self.model.runs)

    @property
    def named_sizes(self) -> list[tuple[str, float]]:
        """Name and bytes of each size of a token or session that differs from those before it."""
        growing = self.bytes_per_token_growing
        is_mixed = growing not in {0, self.bytes_per_token}
        rows = (
            ("a token, all layers" if is_mixed else "a token", self.bytes_per_token),
            ("a token, layers without a window", growing if is_mixed else 0),
            ("windows and states of a session", self.bytes_per_session_constant),
            (
                f"a token on all {self.tp} ranks, {self.duplication:.3g} times",
                self.bytes_per_token_stored if self.duplication > 1 else 0,
            ),
        )
        return [row for row in rows if row[1]]

    @property
    def duplication(self) -> float:
        """Bytes a token on all ranks over the minimum; 1 without copies."""
        return self.bytes_per_token_stored / self.bytes_per_token if self.bytes_per_token else 1.0

    @property
    def chunk_bytes_per_rank(self) -> int:
        """Plain bytes of a chunk on the fullest rank, all KV groups with a token axis; no padding, no states."""
        return sum(each.bytes for each in self.objects if each.rule != "state")

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """Layers of each pipeline stage."""
        return pipeline_stages(len(self.model.layers), self.pp)

    @cached_property
    def stage_objects(self) -> tuple[tuple[ObjectSize, ...], ...]:
        """The objects of a chunk on a rank of each stage: one for each KV group."""
        return tuple(
            _rank_objects([self.model.layers[layer] for layer in stage], self.form, self.tp, self.chunk_tokens)
            for stage in self.stages
        )

    @cached_property
    def objects(self) -> tuple[ObjectSize, ...]:
        """The objects of a chunk on the fullest rank: one for each KV group."""
        return max(self.stage_objects, key=lambda objects: sum(each.bytes for each in objects))

    def rank_session_bytes(self, stage: int, tokens: float, in_flight: int = 0) -> float:
        """For one session of `tokens` on a rank of `stage`, as vLLM keeps it beside `in_flight` tokens of its steps.

        A windowed layer forgets when a step is done, in whole blocks. A state is kept as it is now and as it was at the
        last boundary. Source: `SlidingWindowSpec` and `MambaSpec` of vLLM 0.32, with prefix caching.
        """
        caches = Counter(cache for layer in self.stages[stage] for cache in self.model.layers[layer])
        return sum(
            count
            * (
                cache.rank_token_bytes(self.form, self.tp) * min(tokens, cache.tokens_on_gpu(in_flight) or tokens)
                + 2 * cache.rank_state_bytes(self.tp)
            )
            for cache, count in caches.items()
        )

    def session_bytes(self, tokens: int) -> float:
        """The minimum for one session of `tokens`: windows hold their last tokens only, states once, one copy."""
        held = sum(
            layer.bytes_per_token * (tokens if layer.cache.window is None else min(tokens, layer.cache.window))
            for layer in self.layers
        )
        return held + self.state_bytes

    def session_bytes_stored(self, tokens: int) -> float:
        """For one session of `tokens` when every layer keeps every token: all ranks, and one snapshot of the states."""
        return self.bytes_per_token_stored * tokens + self.state_bytes_stored

    def total(self, tokens: int, users: int) -> Total:
        """`users` sessions of `tokens` each.

        Raises:
            ConfigError: a number is not positive, or too large.
        """
        for name, value, most in (("tokens", tokens, TOKENS_MAX), ("users", users, USERS_MAX)):
            if not 1 <= value <= most:
                raise ConfigError(f"{name}: {value} is not allowed; it must be from 1 to {most}")
        stored, least = self.session_bytes_stored(tokens), self.session_bytes(tokens)
        return Total(tokens=tokens, users=users, bytes=stored * users, bytes_minimum=least * users)


def of(
    what: Model | str | Path,
    *,
    dtype: str = "bf16",
    index_dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
) -> KvSize:
    """The sizes of a model's KV.

    Args:
        what: a model, or an argument of `model`.
        dtype: format of the KV, for `parse_dtype`.
        index_dtype: format of the keys of indexers, where it is another.
        tp: tensor-parallel ranks. Each holds whole heads. Ranks beyond the KV heads hold copies; every rank holds the
            whole of a latent.
        pp: pipeline stages.
        chunk_tokens: tokens of a stored chunk.

    Raises:
        ConfigError: the model or format is unknown, the ranks cannot share the model, or a chunk is too large.
    """
    found = what if isinstance(what, Model) else model(what)
    form = parse_dtype(dtype)
    caches = [cache for cache, _ in found.runs]
    if "latent" in form.by_role and not any(
        part.role in {"latent", "compressed"} for cache in caches for part in cache.parts
    ):
        raise ConfigError(f"dtype: {dtype} packs MLA latents, and {found.name} has none")
    if index_dtype is not None:
        if all(cache.kind != "indexer" for cache in caches):
            raise ConfigError(f"index-dtype: {index_dtype} is for the keys of indexers, and {found.name} has none")
        form = form.with_index(parse_dtype(index_dtype, "index-dtype"))
    _check_ranks(found, tp, pp)
    if not 1 <= chunk_tokens <= CHUNK_TOKENS_MAX:
        raise ConfigError(f"chunk-tokens: {chunk_tokens} is not allowed; it must be from 1 to {CHUNK_TOKENS_MAX}")
    kv = KvSize(model=found, form=form, tp=tp, pp=pp, chunk_tokens=chunk_tokens)
    _ = kv.objects  # refuse a chunk too large for a frame before anything is printed
    return kv


def _check_ranks(found: Model, tp: int, pp: int) -> None:
    layers, heads = len(found.layers), found.attention_heads
    if not 1 <= tp <= TP_MAX:
        raise ConfigError(f"tp: {tp} is not allowed; it must be from 1 to {TP_MAX}")
    if not 1 <= pp <= layers:
        raise ConfigError(f"pp: {pp} is not allowed; {found.name} has {layers} layers, so from 1 to that")
    if heads is not None and heads % tp:
        raise ConfigError(
            f"tp: {tp} ranks cannot share the {heads} attention heads of {found.name}; it must divide them"
        )
    for cache, _ in found.runs:
        if not cache.can_be_split(tp):
            pieces = cache.kv_heads or min(part.heads for part in cache.state)
            raise ConfigError(
                f"tp: {tp} ranks cannot share the {pieces} heads of {found.name}'s {cache.kind} layers evenly"
            )


def _layer_size(cache: LayerCache, count: int, form: Format) -> LayerSize:
    token = count * cache.token_bytes(form)
    session = token * (cache.window or 0) + count * cache.state_bytes
    return LayerSize(cache, count, token, session, f"{count} layers x {_formula(cache, form)}")


def _formula(cache: LayerCache, form: Format) -> str:
    parts = Counter(_term(part, form) for part in cache.parts)
    terms = [f"{count} x {term}" if count > 1 else term for term, count in parts.items()]
    terms += [f"{part.elements:,} x {part.element_bytes} B" for part in cache.state]
    inner = f"({' + '.join(terms)})" if len(terms) > 1 else "".join(terms) or "0 B"
    return f"{inner} / {cache.every} tokens" if cache.every > 1 else inner


def _term(part: TokenPart, form: Format) -> str:
    encoding = form.encoding(part.role)
    heads = f"{part.count} x " if part.count > 1 else ""
    if encoding.group or encoding.padding:
        return f"{heads}{form.vector_bytes(part.role, part.size):g} B"
    return f"{heads}{part.size} x {encoding.bits / 8:g} B"


def pipeline_stages(layer_count: int, pp: int) -> tuple[range, ...]:
    """Layers of each of `pp` stages: equal shares, the rest to the later stages but not to the last.

    As in vLLM 0.32 (`get_pp_indices`).
    """
    shares = [layer_count // pp] * pp
    for stage in range(2, layer_count % pp + 2):
        shares[-stage] += 1
    return tuple(range(end - share, end) for share, end in zip(shares, accumulate(shares), strict=True))


def _rank_objects(
    layers: Sequence[tuple[LayerCache, ...]], form: Format, tp: int, chunk_tokens: int
) -> tuple[ObjectSize, ...]:
    """The objects of one chunk on a rank with `layers`."""
    groups: dict[Validity, list[int]] = {}
    for cache in (cache for layer in layers for cache in layer):
        if cache.parts:
            rule: Validity = History() if cache.window is None else Window(cache.window)
            kept = cache.rank_token_bytes(form, tp) * cache.tokens_in_store(chunk_tokens)
            groups.setdefault(rule, []).append(math.ceil(kept))
        if cache.state:
            groups.setdefault(State(), []).append(math.ceil(cache.rank_state_bytes(tp)))
    largest = max(sum(sizes) for sizes in groups.values()) if groups else 0
    if largest > SECTIONS_MAX * SECTION_BYTES_MAX:  # checked here, since a list of all sections might fill the memory
        raise ConfigError(f"chunk-tokens: {chunk_tokens} tokens make too large a chunk: {exact(largest)} bytes")
    try:
        return tuple(
            _object_size(GroupLayout(rule, tuple(sizes), "", chunk_tokens=chunk_tokens))
            for rule, sizes in groups.items()
        )
    except ValueError as error:
        raise ConfigError(f"chunk-tokens: {chunk_tokens} tokens make too large a chunk: {error}") from error


def _object_size(group: GroupLayout) -> ObjectSize:
    rule, sizes = group.validity, group.layer_bytes
    name = f"window {rule.tokens}" if isinstance(rule, Window) else type(rule).__name__.lower()
    return ObjectSize(name, len(sizes), sum(sizes), group.payload_bytes, frame_layout(group).frame_bytes)


def reasons(kv: KvSize) -> list[str]:
    """Sentences that explain the sizes, the most important first: windows, states, copies, stages, alignment."""
    windows = " or ".join(f"{each:,}" for each in sorted({cache.window for cache, _ in kv.model.runs if cache.window}))
    found: list[str] = []
    if windows and kv.bytes_per_token_growing:
        kept = sum(n * it.token_bytes(kv.form) * it.tokens_in_store(kv.chunk_tokens) for it, n in kv.model.runs)
        found.append(
            f"Windowed layers need only the last {windows} tokens before the boundary that is resumed from. A store "
            "that can resume at every chunk keeps all their tokens, or the window of each chunk where that is shorter: "
            f"a chunk of all layers takes {kept / kv.chunk_tokens / kv.bytes_per_token_growing:.3g} times the bytes of "
            "those that grow."
        )
    elif windows:
        limit = both(kv.bytes_per_session_constant)
        found.append(f"Every layer has a window: a session never needs more than {limit}.")
    if kv.state_bytes:
        beside = f" to the {decimal(kv.bytes_per_token)} of KV" if kv.bytes_per_token else ""
        found.append(
            f"A state is valid only at the boundary at which it was taken. A snapshot is {both(kv.state_bytes)}; one "
            f"at every chunk of {kv.chunk_tokens:,} tokens would add {decimal(kv.state_bytes / kv.chunk_tokens)} a "
            f"token{beside}."
        )
    if kv.duplication > 1:
        found.append(
            f"At TP {kv.tp}, {' and '.join(_copied(kv))}, so the ranks together hold {kv.duplication:.3g} times the "
            "minimum, unless one rank stores for all that hold the same."
        )
    if kv.pp > 1:
        found.append(f"With PP {kv.pp} each stage keeps its own layers; the chunk shown is that of the fullest stage.")
    plain, stored = (sum(each.bytes for each in kv.objects), sum(each.frame_bytes for each in kv.objects))
    if stored > plain * 1.01:
        found.append(
            f"Layers start at multiples of 4,096 bytes and each object has a header, so {exact(plain)} B are stored as "
            f"{exact(stored)} B: {stored / plain - 1:.1%} more. Larger chunks reduce the overhead."
        )
    return [*found, *kv.model.notes]


def _copied(kv: KvSize) -> list[str]:
    """Clauses that name the copies of tensor parallelism."""
    whole_of = {"mla": "latent", "compressed": "latent", "indexer": "index key"}
    caches = [cache for cache, _ in kv.model.runs]
    whole = {whole_of[cache.kind] for cache in caches if cache.kind in whole_of}
    few = {cache.kv_heads for cache in caches if cache.kind not in whole_of and cache.kv_heads}
    return [f"{heads} KV heads are shared by {kv.tp} ranks" for heads in sorted(few) if heads < kv.tp] + [
        f"every rank needs the whole {name}" for name in sorted(whole, reverse=True)
    ]
