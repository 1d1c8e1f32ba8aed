"""How large the KV of a model is: a token, a session, a rank, a chunk.

Two answers are given wherever they differ. *Minimum* is what the model can ever read again: a window's last tokens, one
copy. *Stored* is what an engine or a store holds that keeps every layer for every token, with the copies that tensor
parallelism makes.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.size.dtype import Format, parse_dtype
from kvtier.size.kinds import Part
from kvtier.size.model import LayerRun, Model, model
from kvtier.size.objects import ObjectSize, pipeline_stages, rank_objects

CHUNK_TOKENS = 256
CHUNK_TOKENS_MAX = 1 << 20
TOKENS_MAX = 10**12
USERS_MAX = 10**12
TP_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """Equal caches of several layers: all of them together, one sequence, one copy, in bytes."""

    kind: str
    count: int
    kv_heads: int | None
    head_dim: int | None
    window: int | None
    bytes_per_token: float
    """Whether or not a window forgets it; 0 for a state."""
    bytes_per_session: float
    """What is held whatever the length: a full window, a state; 0 for a cache that grows."""
    expression: str
    """Elements of one layer, in the config's words."""
    formula: str
    """The same for all layers, in numbers and bytes."""
    source: str
    """Where the formula comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """So many sessions of so many tokens, in bytes."""

    tokens: int
    """Of one session."""
    users: int
    """Sessions."""
    bytes: float
    """Stored: every layer for every token, on all ranks."""
    bytes_minimum: float
    """Needed: windows forget, one copy."""


@dataclass(frozen=True, kw_only=True)
class KvSize:
    """The sizes of one model in one format on one arrangement of ranks, in bytes. Made by `of`."""

    model: Model
    form: Format
    tp: int
    pp: int
    chunk_tokens: int

    @property
    def dtype(self) -> str:
        """Name of the format of the KV."""
        return self.form.name

    @cached_property
    def layers(self) -> tuple[LayerSize, ...]:
        """Each run of equal caches, with its formula."""
        return tuple(_layer(run, self.form) for run in self.model.runs)

    @cached_property
    def bytes_per_token(self) -> float:
        """Every layer that has a token axis, all heads, one copy."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @cached_property
    def bytes_per_token_growing(self) -> float:
        """Only the layers that keep every token: what one more token costs in a long context."""
        return sum(layer.bytes_per_token for layer in self.layers if layer.window is None)

    @cached_property
    def bytes_per_session_constant(self) -> float:
        """Full windows and states: what a session holds however long it gets."""
        return sum(layer.bytes_per_session for layer in self.layers)

    @cached_property
    def state_bytes(self) -> int:
        """The states alone: one snapshot, good at the boundary it was taken at and nowhere else."""
        return sum(run.count * run.cache.state_bytes for run in self.model.runs)

    @cached_property
    def bytes_per_token_stored(self) -> float:
        """All ranks together, copies included, every layer kept."""
        return self.tp * sum(run.count * run.cache.rank_token_bytes(self.form, self.tp) for run in self.model.runs)

    @cached_property
    def state_bytes_stored(self) -> float:
        """A snapshot on all ranks together, copies included."""
        return self.tp * sum(run.count * run.cache.rank_state_bytes(self.tp) for run in self.model.runs)

    @property
    def duplication(self) -> float:
        """Bytes a token on all ranks over bytes needed; 1 without copies."""
        return self.bytes_per_token_stored / self.bytes_per_token if self.bytes_per_token else 1.0

    @property
    def chunk_bytes_per_rank(self) -> int:
        """Plain bytes of a chunk on the fullest rank, all KV groups with a token axis; no padding, no states."""
        return sum(each.bytes for each in self.objects if each.rule != "state")

    @cached_property
    def objects(self) -> tuple[ObjectSize, ...]:
        """What the fullest rank stores for a chunk: one object for each KV group."""
        stages = pipeline_stages(self.model.layer_count, self.pp)
        of_each = (
            rank_objects([self.model.layers[layer] for layer in stage], self.form, self.tp, self.chunk_tokens)
            for stage in stages
        )
        return max(of_each, key=lambda objects: sum(each.bytes for each in objects))

    def session_bytes(self, tokens: int) -> float:
        """The minimum for one session of `tokens`: windows hold their last tokens only, states once, one copy."""
        held = sum(
            layer.bytes_per_token * (tokens if layer.window is None else min(tokens, layer.window))
            for layer in self.layers
        )
        return held + self.state_bytes

    def session_bytes_stored(self, tokens: int) -> float:
        """For one session of `tokens` when every layer keeps every token: all ranks, and one snapshot of the states."""
        return self.bytes_per_token_stored * tokens + self.state_bytes_stored

    def total(self, tokens: int, users: int) -> Total:
        """`users` sessions of `tokens` each.

        Raises:
            ConfigError: a number is not positive, or absurd.
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
        what: a model, or what `model` takes.
        dtype: format of the KV, as `parse_dtype` takes it.
        index_dtype: format of the keys of indexers, where it is another.
        tp: tensor-parallel ranks. Each has whole heads; beyond the KV heads, ranks hold copies, and of a latent every
            rank holds all.
        pp: pipeline stages.
        chunk_tokens: tokens of a stored chunk.

    Raises:
        ConfigError: the model or format is unknown, the ranks cannot share the model, or a chunk is too large.
    """
    found = what if isinstance(what, Model) else model(what)
    form = parse_dtype(dtype)
    has_latents = any(part.role in {"latent", "compressed"} for run in found.runs for part in run.cache.parts)
    if form.is_packed_for_latents and not has_latents:
        raise ConfigError(f"dtype: {dtype} packs MLA latents, and {found.name} has none")
    if index_dtype is not None:
        if all(run.kind != "indexer" for run in found.runs):
            raise ConfigError(f"index-dtype: {index_dtype} is for the keys of indexers, and {found.name} has none")
        form = form.with_index(parse_dtype(index_dtype, "index-dtype"))
    _check_ranks(found, tp, pp)
    if not 1 <= chunk_tokens <= CHUNK_TOKENS_MAX:
        raise ConfigError(f"chunk-tokens: {chunk_tokens} is not allowed; it must be from 1 to {CHUNK_TOKENS_MAX}")
    kv = KvSize(model=found, form=form, tp=tp, pp=pp, chunk_tokens=chunk_tokens)
    _ = kv.objects  # a chunk that fits no frame is refused here, not where a page has been half printed
    return kv


def _check_ranks(found: Model, tp: int, pp: int) -> None:
    if not 1 <= tp <= TP_MAX:
        raise ConfigError(f"tp: {tp} is not allowed; it must be from 1 to {TP_MAX}")
    if not 1 <= pp <= found.layer_count:
        raise ConfigError(f"pp: {pp} is not allowed; {found.name} has {found.layer_count} layers, so from 1 to that")
    heads = found.attention_heads
    if heads is not None and heads % tp:
        raise ConfigError(
            f"tp: {tp} ranks cannot share the {heads} attention heads of {found.name}; it must divide them"
        )
    for run in found.runs:
        if not run.cache.can_be_cut(tp):
            pieces = run.kv_heads or min(part.heads for part in run.cache.state)
            raise ConfigError(
                f"tp: {tp} ranks cannot share the {pieces} heads of {found.name}'s {run.kind} layers evenly"
            )


def _layer(run: LayerRun, form: Format) -> LayerSize:
    cache = run.cache
    token = run.count * cache.token_bytes(form)
    return LayerSize(
        kind=cache.kind,
        count=run.count,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        window=cache.window,
        bytes_per_token=token,
        bytes_per_session=token * (cache.window or 0) + run.count * cache.state_bytes,
        expression=cache.expression,
        formula=_formula(run, form),
        source=cache.source,
    )


def _formula(run: LayerRun, form: Format) -> str:
    """The formula with its numbers: ``36 layers x 2 x 8 x 128 x 2 B``."""
    cache = run.cache
    if not cache.parts and not cache.state:
        return f"{run.count} layers x 0 B"
    kept = Counter(_term(part, form) for part in cache.parts)
    terms = [f"{count} x {term}" if count > 1 else term for term, count in kept.items()]
    terms += [f"{part.elements:,} x {part.element_bytes} B" for part in cache.state]
    inner = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    return f"{run.count} layers x {inner}{f' / {cache.every} tokens' if cache.every > 1 else ''}"


def _term(part: Part, form: Format) -> str:
    encoding = form.encoding(part.role)
    heads = f"{part.count} x " if part.count > 1 else ""
    if encoding.group or encoding.padding:
        return f"{heads}{form.vector_bytes(part.role, part.size):g} B"
    return f"{heads}{part.size} x {encoding.bits / 8:g} B"
