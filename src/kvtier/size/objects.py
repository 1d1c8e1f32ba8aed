"""What one rank stores for one chunk: an object for each KV group, laid out and framed as kvtier does it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.codec.frame import frame_bytes
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, State, Validity, Window
from kvtier.size.dtype import Format
from kvtier.size.kinds import Cache


@dataclass(frozen=True, slots=True)
class ObjectSize:
    """One object of one KV group on one rank."""

    rule: str
    """When it is valid: ``history``, ``window 128``, or ``state``."""
    layers: int
    """Pieces in it: a layer's cache each."""
    bytes: int
    """What the layers take, without padding."""
    padded_bytes: int
    """With every layer at a multiple of `kvtier.layout.ALIGNMENT`."""
    frame_bytes: int
    """As stored: header, section table and padded layers."""

    @property
    def overhead(self) -> float:
        """Share of the stored bytes above the plain ones: 0.01 is one per cent."""
        return self.frame_bytes / self.bytes - 1


def pipeline_stages(layer_count: int, pp: int) -> tuple[range, ...]:
    """Which layers each of `pp` stages has: equal shares, the rest to the later stages but not to the last.

    As vLLM 0.32 does it (`get_pp_indices`).
    """
    shares = [layer_count // pp] * pp
    for place in range(2, layer_count % pp + 2):
        shares[-place] += 1
    starts = [sum(shares[:stage]) for stage in range(pp)]
    return tuple(range(start, start + share) for start, share in zip(starts, shares, strict=True))


def rank_objects(
    layers: Sequence[tuple[Cache, ...]], form: Format, tp: int, chunk_tokens: int
) -> tuple[ObjectSize, ...]:
    """The objects that one rank with `layers` stores for one chunk.

    Raises:
        ConfigError: a chunk of so many tokens does not fit a frame.
    """
    groups: dict[Validity, list[int]] = {}
    for cache in (cache for layer in layers for cache in layer):
        if cache.has_tokens:
            rule: Validity = History() if cache.window is None else Window(cache.window)
            groups.setdefault(rule, []).append(math.ceil(cache.rank_token_bytes(form, tp) * chunk_tokens))
        if cache.state:
            groups.setdefault(State(), []).append(math.ceil(cache.rank_state_bytes(tp)))
    try:
        return tuple(_object(rule, GroupLayout(rule, tuple(sizes), "")) for rule, sizes in groups.items())
    except ValueError as error:
        raise ConfigError(f"chunk-tokens: {chunk_tokens} tokens make too large a chunk: {error}") from error


def _object(rule: Validity, group: GroupLayout) -> ObjectSize:
    told = f"window {rule.tokens}" if isinstance(rule, Window) else type(rule).__name__.lower()
    size = sum(group.layer_bytes)
    return ObjectSize(told, len(group.layer_bytes), size, group.payload_bytes, frame_bytes(group))
