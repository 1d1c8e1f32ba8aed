"""Compute the KV size of a model per token, session, rank and chunk, and how many sessions fit into memory or a tier.

With windows or copies there are two different sizes. The *minimum* covers the KV that the model can still read: one
copy, and only the last tokens of a window. The *stored* size covers every layer of every token, with the copies of
tensor parallelism: the need of an engine or store that keeps everything.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

from kvtier.codec.frame_header import SECTIONS_MAX, frame_layout
from kvtier.codec.lossy import share_of
from kvtier.errors import ConfigError
from kvtier.layout import (
    LOSSY_ELEMENTS,
    SECTION_BYTES_MAX,
    Element,
    GroupLayout,
    History,
    Loss,
    RunKind,
    State,
    Validity,
    Window,
)
from kvtier.report.format import both, decimal, exact
from kvtier.tools.size.caches import Format, LayerCache, TokenPart, parse_dtype
from kvtier.tools.size.model import Model, model

CHUNK_TOKENS = 256
CHUNK_TOKENS_MAX = 1 << 20
SESSIONS_MAX = 10**12
"""Maximum tokens of a session, and maximum number of users."""
TP_MAX = 1024


@dataclass(frozen=True, slots=True)
class LayerSize:
    """Bytes of all layers with equal caches together, for one copy of one sequence."""

    cache: LayerCache
    count: int
    """Layers with this cache."""
    bytes_per_token: float
    """Bytes per token inside the window; 0 for a state."""
    bytes_per_session: float
    """Bytes that do not depend on the length, of a full window or a state."""
    formula: str
    """The formula with numbers: ``36 layers x 2 x 8 x 128 x 2 B``."""


@dataclass(frozen=True, slots=True)
class ObjectSize:
    """One stored object: one KV group of one chunk on one rank."""

    rule: str
    """Rule by which the object is valid: ``history``, ``window 128``, or ``state``."""
    layers: int
    """Number of caches in the object."""
    bytes: int
    """Bytes of the caches, without padding."""
    padded_bytes: int
    """Bytes with every layer at a multiple of `kvtier.layout.ALIGNMENT`."""
    frame_bytes: int
    """Bytes as stored: header, section table and padded layers."""

    @property
    def overhead(self) -> float:
        """Additional stored bytes as a share of the plain bytes: 0.01 is one per cent."""
        return self.frame_bytes / self.bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Bytes of several sessions of equal length."""

    tokens: int
    """Tokens of one session."""
    users: int
    """Number of sessions."""
    bytes: float
    """Stored size: every layer for every token, on all ranks."""
    bytes_minimum: float
    """Minimum size: one copy, and only the last tokens of windows."""


@dataclass(frozen=True, kw_only=True)
class KvSize:
    """Sizes in bytes of one model, in one format, on one arrangement of ranks. `of` computes them."""

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
        """Bytes per token of all layers with a token axis, for all heads and one copy."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @cached_property
    def bytes_per_token_growing(self) -> float:
        """Bytes per token of layers without a window: the cost of one more token in a long context."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.cache.window is None)

    @cached_property
    def bytes_per_session_constant(self) -> float:
        """Bytes of full windows and states, which do not grow with a session."""
        return sum(layer.bytes_per_session for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of all states. A snapshot is valid only at its own boundary."""
        return sum(count * cache.state_bytes for cache, count in self.model.runs)

    @cached_property
    def bytes_per_token_stored(self) -> float:
        """Bytes per token on all ranks together, with copies, if every layer is kept."""
        return self.tp * sum(count * cache.rank_token_bytes(self.form, self.tp) for cache, count in self.model.runs)

    @cached_property
    def state_bytes_stored(self) -> float:
        """Bytes of a snapshot on all ranks together, with copies."""
        return self.tp * sum(count * cache.rank_state_bytes(self.tp) for cache, count in self.model.runs)

    @cached_property
    def storing_ranks(self) -> int:
        """Ranks of a stage that store a token's KV in tiers. Of ranks with equal parts, the first stores for all.

        kvtier's vLLM connector detects equal parts only if all layers have the same number of KV heads (ADR 14, ADR
        30). The connector counts no heads of states, so every rank stores its own state.
        """
        heads = {cache.kv_heads or 1 for cache, _ in self.model.runs if cache.parts}
        return min(self.tp, *heads) if len(heads) == 1 else self.tp

    @property
    def named_sizes(self) -> list[tuple[str, float]]:
        """Name and bytes of each size of a token or session that differs from the preceding sizes."""
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
        """Bytes per token on all ranks, divided by the minimum; 1 without copies."""
        return self.bytes_per_token_stored / self.bytes_per_token if self.bytes_per_token else 1.0

    def stored_share(self, loss: Loss) -> float:
        """Return the share of a token's raw bytes that a tier stores for an engine with this class (`store.loss`).

        The class applies to keys and values of full attention with 16 or 32 bits per number. The share leaves out frame
        headers, and the first tokens of a prompt, which stay exact: both are less than 1 % of the raw bytes.
        """
        raw = stored = 0.0
        for cache, count in self.model.runs:
            kept = count * cache.tokens_in_store(self.chunk_tokens) / self.chunk_tokens / cache.every
            for number, part in enumerate(cache.parts):
                size = kept * part.count * self.form.vector_bytes(part.role, part.size)
                raw += size
                kind: RunKind = "values" if number else "keys"
                is_coded = cache.kind == "full" and self.form.name in LOSSY_ELEMENTS and loss != "none"
                stored += size * (
                    share_of(loss, kind, cast("Element", self.form.name), self.chunk_tokens, part.size)
                    if is_coded
                    else 1
                )
        return stored / raw if raw else 1.0

    @property
    def chunk_bytes_per_rank(self) -> int:
        """Plain bytes of a chunk on the fullest rank, for KV groups with a token axis, without padding or states."""
        return sum(each.bytes for each in self.objects if each.rule != "state")

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """Layers of each pipeline stage."""
        return pipeline_stages(len(self.model.layers), self.pp)

    @cached_property
    def stage_objects(self) -> tuple[tuple[ObjectSize, ...], ...]:
        """The objects of a chunk on a rank of each stage, one per KV group."""
        return tuple(
            _rank_objects([self.model.layers[layer] for layer in stage], self.form, self.tp, self.chunk_tokens)
            for stage in self.stages
        )

    @cached_property
    def objects(self) -> tuple[ObjectSize, ...]:
        """The objects of a chunk on the fullest rank, one per KV group."""
        return max(self.stage_objects, key=lambda objects: sum(each.bytes for each in objects))

    def rank_session_bytes(self, stage: int, tokens: float, in_flight: int = 0) -> float:
        """Return the bytes that one session of `tokens` takes on a rank of `stage`.

        vLLM has `in_flight` tokens in its current steps. A windowed layer drops whole blocks at the end of a step. vLLM
        keeps two copies of a state: the current one, and that of the last boundary. Source: `SlidingWindowSpec` and
        `MambaSpec` of vLLM 0.32, with prefix caching.
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
        """Return the minimum bytes of a session of `tokens`: one copy, the last tokens of windows, and one state."""
        held = sum(
            layer.bytes_per_token * (tokens if layer.cache.window is None else min(tokens, layer.cache.window))
            for layer in self.layers
        )
        return held + self.state_bytes

    def session_bytes_stored(self, tokens: int) -> float:
        """Return the bytes of one session of `tokens` on all ranks, with every token of every layer and one state."""
        return self.bytes_per_token_stored * tokens + self.state_bytes_stored

    def total(self, tokens: int, users: int) -> Total:
        """Compute the bytes of `users` sessions of `tokens` each.

        Raises:
            ConfigError: a number is not positive, or too large.
        """
        for name, value in (("tokens", tokens), ("users", users)):
            if not 1 <= value <= SESSIONS_MAX:
                raise ConfigError(f"{name}: {value} is not allowed; it must be from 1 to {SESSIONS_MAX}")
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
    """Compute the sizes of a model's KV.

    Args:
        what: a model, or its name or path, as `model` takes it.
        dtype: format of the KV, as `parse_dtype` takes it.
        index_dtype: format of the keys of indexers, if it differs.
        tp: tensor-parallel ranks. Each holds whole heads. Ranks beyond the KV heads hold copies. Every rank holds the
            whole of a latent.
        pp: pipeline stages.
        chunk_tokens: number of tokens per stored chunk.

    Raises:
        ConfigError: the model or format is unknown, the ranks cannot share the model, or a chunk is too large.
    """
    found = what if isinstance(what, Model) else model(what)
    form = parse_dtype(dtype)
    caches = [cache for cache, _ in found.runs]
    if "latent" in form.by_role and not any(
        part.role in {"latent", "compressed"} for cache in caches for part in cache.parts
    ):
        raise ConfigError(f"dtype: {dtype} packs MLA latents, but {found.name} has none")
    if index_dtype is not None:
        if all(cache.kind != "indexer" for cache in caches):
            raise ConfigError(f"index-dtype: {index_dtype} is for the keys of indexers, but {found.name} has none")
        form = form.with_index(parse_dtype(index_dtype, "index-dtype"))
    _check_ranks(found, tp, pp)
    if not 1 <= chunk_tokens <= CHUNK_TOKENS_MAX:
        raise ConfigError(f"chunk-tokens: {chunk_tokens} is not allowed; it must be from 1 to {CHUNK_TOKENS_MAX}")
    kv = KvSize(model=found, form=form, tp=tp, pp=pp, chunk_tokens=chunk_tokens)
    _ = kv.objects  # refuses a chunk that is too large for a frame, before anything is printed
    return kv


def _check_ranks(found: Model, tp: int, pp: int) -> None:
    layers, heads = len(found.layers), found.attention_heads
    if not 1 <= tp <= TP_MAX:
        raise ConfigError(f"tp: {tp} is not allowed; it must be from 1 to {TP_MAX}")
    if not 1 <= pp <= layers:
        raise ConfigError(f"pp: {pp} is not allowed; {found.name} has {layers} layers, so the most stages are {layers}")
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
    terms = [
        *(f"{count} x {term}" if count > 1 else term for term, count in parts.items()),
        *(f"{part.elements:,} x {part.element_bytes} B" for part in cache.state),
    ]
    inner = f"({' + '.join(terms)})" if len(terms) > 1 else "".join(terms) or "0 B"
    return f"{inner} / {cache.every} tokens" if cache.every > 1 else inner


def _term(part: TokenPart, form: Format) -> str:
    encoding = form.encoding(part.role)
    heads = f"{part.count} x " if part.count > 1 else ""
    if encoding.group or encoding.padding:
        return f"{heads}{form.vector_bytes(part.role, part.size):g} B"
    return f"{heads}{part.size} x {encoding.bits / 8:g} B"


def pipeline_stages(layer_count: int, pp: int) -> tuple[range, ...]:
    """Return the layers of each of `pp` stages: equal shares, with the rest in later stages except the last.

    Source: `get_pp_indices` of vLLM 0.32.
    """
    shares = [layer_count // pp] * pp
    for stage in range(2, layer_count % pp + 2):
        shares[-stage] += 1
    return tuple(range(end - share, end) for share, end in zip(shares, accumulate(shares), strict=True))


def _rank_objects(
    layers: Sequence[tuple[LayerCache, ...]], form: Format, tp: int, chunk_tokens: int
) -> tuple[ObjectSize, ...]:
    """Return the objects of one chunk on a rank that has `layers`."""
    groups: dict[Validity, list[int]] = {}
    for cache in (cache for layer in layers for cache in layer):
        if cache.parts:
            rule: Validity = History() if cache.window is None else Window(cache.window)
            kept = cache.rank_token_bytes(form, tp) * cache.tokens_in_store(chunk_tokens)
            groups.setdefault(rule, []).append(math.ceil(kept))
        if cache.state:
            groups.setdefault(State(), []).append(math.ceil(cache.rank_state_bytes(tp)))
    largest = max(sum(sizes) for sizes in groups.values()) if groups else 0
    if largest > SECTIONS_MAX * SECTION_BYTES_MAX:  # checked here, because a list of all sections might exhaust memory
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
    """Return sentences that explain the sizes by windows, states, copies, stages and alignment, in this order."""
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
        in_tiers = ". kvtier's tiers keep one copy" if kv.storing_ranks < kv.tp else ", and so do kvtier's tiers"
        found.append(
            f"At TP {kv.tp}, {' and '.join(_copied(kv))}, so the ranks together hold {kv.duplication:.3g} times the "
            f"minimum{in_tiers}."
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
    """Return clauses that name the copies of tensor parallelism."""
    whole_of = {"mla": "latent", "compressed": "latent", "indexer": "index key"}
    caches = [cache for cache, _ in kv.model.runs]
    whole = {whole_of[cache.kind] for cache in caches if cache.kind in whole_of}
    few = {cache.kv_heads for cache in caches if cache.kind not in whole_of and cache.kv_heads}
    return [f"{heads} KV heads are shared by {kv.tp} ranks" for heads in sorted(few) if heads < kv.tp] + [
        f"every rank needs the whole {name}" for name in sorted(whole, reverse=True)
    ]


GPU_MEMORY_SHARE = 0.92
"""Share of GPU memory that the engine takes. Source: the default of gpu_memory_utilization in vLLM 0.32."""
GPU_OTHER_BYTES = 3_758_096_384
"""GPU memory for activations and libraries. Source: NVIDIA AIConfigurator, system files, 2026-08-21."""
WEIGHT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Bytes per weight. fp4 includes a one-byte scale for every 16 weights (NVFP4)."""


class HeldSessions(NamedTuple):
    """The sessions of one length that fit."""

    session_tokens: int
    sessions: int
    """Number of whole sessions."""
    tokens: int
    """Tokens of all sessions that fit. The last session may fit only in part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCapacity:
    """The KV that fits on GPUs of one kind, in addition to the weights."""

    kv: KvSize
    gpus: int
    replicas: int
    """Copies of the model. Each copy has all ranks and stages."""
    memory_bytes: float
    """Memory of one GPU."""
    weight_bytes: float
    """Weights of one copy of the model."""
    rank_bytes: tuple[float, ...]
    """Bytes left for KV on a GPU of each stage."""
    in_flight_tokens: int
    """Tokens of all current steps. Windowed layers keep these tokens in addition to their windows."""

    @property
    def kv_bytes(self) -> float:
        """Bytes left for KV on all GPUs."""
        return self.replicas * self.kv.tp * sum(self.rank_bytes)

    def held(self, tokens: int) -> HeldSessions:
        """Count the sessions of `tokens` each that fit together, as vLLM's log does. The fullest stage is the limit."""
        needed = (self.kv.rank_session_bytes(stage, tokens, self.in_flight_tokens) for stage in range(self.kv.pp))
        of_copy = min((left / need for left, need in zip(self.rank_bytes, needed, strict=True) if need), default=0.0)
        return HeldSessions(tokens, self.replicas * int(of_copy), int(self.replicas * of_copy * tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """The KV that fits into the bytes of a tier as kvtier stores it, with headers and padding.

    Ranks with equal KV store it once.
    """

    kv: KvSize
    capacity_bytes: int
    drive_bytes: int | None = None
    """Capacity of the drives, of which `capacity_bytes` are filled; None if only `capacity_bytes` was given."""

    def held(self, tokens: int) -> HeldSessions:
        """Count the sessions of `tokens` each that fit, as whole chunks with a snapshot of the states.

        A session shorter than a chunk is not stored.
        """
        chunks, chunk_tokens = tokens // self.kv.chunk_tokens, self.kv.chunk_tokens
        chunk, state = (
            ranks * sum(it.frame_bytes for stage in self.kv.stage_objects for it in stage if keep(it.rule))
            for ranks, keep in ((self.kv.storing_ranks, "state".__ne__), (self.kv.tp, "state".__eq__))
        )
        if not chunks or not chunk + state:
            return HeldSessions(tokens, 0, 0)
        sessions, rest = divmod(self.capacity_bytes, chunks * chunk + state)
        more = max(0, rest - state) // chunk if chunk else 0
        return HeldSessions(tokens, sessions, (sessions * chunks + more) * chunk_tokens)


def in_flight_by_default(memory_bytes: float, pp: int) -> int:
    """Return the tokens of all current steps: `pp` + 1 times the default max_num_batched_tokens of vLLM 0.32."""
    return (pp + 1) * (16_384 if memory_bytes >= 160 << 30 else 8192 if memory_bytes >= 70 << 30 else 2048)


def gpu_capacity(
    kv: KvSize, memory_bytes: float, gpus: int, weight_bytes: float, in_flight_tokens: int | None = None
) -> GpuCapacity:
    """Compute the KV that fits on `gpus` GPUs in addition to the weights.

    Args:
        kv: the sizes of the model's KV.
        memory_bytes: memory of one GPU.
        gpus: number of GPUs.
        weight_bytes: weights of one copy of the model.
        in_flight_tokens: tokens of all current steps; the default is `in_flight_by_default`.

    Raises:
        ConfigError: the ranks do not divide the GPUs, or the weights leave no room.
    """
    ranks = kv.tp * kv.pp
    if gpus < 1 or gpus % ranks:
        raise ConfigError(f"gpu: {gpus} GPUs are not a multiple of tp x pp = {ranks}")
    usable = memory_bytes * GPU_MEMORY_SHARE - GPU_OTHER_BYTES
    left = tuple(usable - weight_bytes * len(stage) / len(kv.model.layers) / kv.tp for stage in kv.stages)
    if min(left) <= 0:
        raise ConfigError(
            f"gpu: a GPU of {decimal(memory_bytes)} has {decimal(max(usable, 0))} for weights and KV, and its share of "
            f"the weights is {decimal(usable - min(left))}; more or larger GPUs, or smaller weights, are needed"
        )
    return GpuCapacity(
        kv=kv,
        gpus=gpus,
        replicas=gpus // ranks,
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        rank_bytes=left,
        in_flight_tokens=in_flight_by_default(memory_bytes, kv.pp) if in_flight_tokens is None else in_flight_tokens,
    )
