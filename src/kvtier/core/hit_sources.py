"""Attributes the tokens of a load to places, for reports and metrics."""

from collections.abc import Callable, Mapping, Sequence

from kvtier.core.boundary import needed_chunks
from kvtier.core.records import HOST
from kvtier.layout import GroupLayout
from kvtier.types import Prefix

Sources = tuple[tuple[str, int], ...]
"""(place, tokens), host first; places without tokens are left out."""


def lookup_sources(
    groups: Sequence[GroupLayout],
    prefix: Prefix,
    tokens: int,
    place_of: Callable[[int, int], str],
    order: Sequence[str],
) -> Sources:
    """Sources of a load of the leading `tokens`; `place_of` takes (group, chunk)."""
    items = [(index, chunk) for index, group in enumerate(groups) for chunk in needed_chunks(group, prefix, tokens)]
    return load_sources(prefix, tokens, {item: place_of(*item) for item in items}, order)


def load_sources(
    prefix: Prefix,
    tokens: int,
    places: Mapping[tuple[int, int], str],
    order: Sequence[str],
    resident_tokens: int = 0,
) -> Sources:
    """Split the leading `tokens` past `resident_tokens` by place; `places` maps (group, chunk) to its place.

    A chunk counts for the slowest place among its groups. A chunk that no group moves (before a sliding window) counts
    like the next chunk that is moved.
    """
    slowness = {place: number for number, place in enumerate(order)}
    by_chunk: dict[int, str] = {}
    for (_, chunk), place in places.items():
        known = by_chunk.get(chunk)
        if known is None or slowness[place] > slowness[known]:
            by_chunk[chunk] = place
    total = dict.fromkeys(order, 0)
    end, place = tokens, HOST
    while end > resident_tokens:
        chunk = (end - 1) // prefix.chunk_tokens
        start = max(resident_tokens, chunk * prefix.chunk_tokens)
        place = by_chunk.get(chunk, place)
        total[place] += end - start
        end = start
    return tuple((name, count) for name, count in total.items() if count)
