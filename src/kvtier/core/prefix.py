"""Arithmetic over the chunks and groups of a prefix: how many leading tokens can be restored, and from which sources.

A source is host memory or a lower tier. A boundary is a token count at which the engine may resume: a multiple of the
chunk size at which every group is valid. A history group requires all chunks before the boundary. A window group
requires the chunks that cover its tokens before the boundary. A state group requires the chunk that ends there.
"""

from collections.abc import Callable, Mapping, Sequence

from kvtier.core.host_residency import HOST
from kvtier.layout import GroupLayout, History, Window
from kvtier.types import Prefix

Present = Callable[[int, int], bool]
"""Takes (group, chunk) and returns whether that object is available."""

Sources = tuple[tuple[str, int], ...]
"""Pairs of (source, number of tokens from it), host memory first. Sources without tokens are left out."""


def needed_chunks(group: GroupLayout, prefix: Prefix, tokens: int) -> range:
    """Return the chunks of `group` that a load of the leading `tokens` requires.

    Raises:
        ValueError: `tokens` is not a multiple of the chunk size, or exceeds the prefix.
    """
    full, rest = divmod(tokens, prefix.chunk_tokens)
    if rest or full > len(prefix.keys):
        size = prefix.chunk_tokens
        raise ValueError(f"{tokens} tokens are not a boundary; allowed: multiples of {size} up to {prefix.tokens}")
    if isinstance(group.validity, History):
        return range(full)
    if isinstance(group.validity, Window):
        return range(max(0, tokens - group.validity.tokens) // prefix.chunk_tokens, full)
    return range(max(0, full - 1), full)


def history_run(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Present, runs: Sequence[int] | None = None
) -> int:
    """Return how many leading chunks are present in every history group; all chunks if there is no such group.

    Args:
        groups: the KV groups.
        prefix: the prompt.
        present: returns whether an object is available.
        runs: number of leading chunks of each group that are known to be present. `present` is not called for them.
    """
    run = len(prefix.keys)
    for index, group in enumerate(groups):
        if isinstance(group.validity, History):
            first = runs[index] if runs is not None else 0
            run = next((chunk for chunk in range(first, run) if not present(index, chunk)), run)
    return run


def longest_boundary(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Present, runs: Sequence[int] | None = None
) -> int:
    """Return the largest token count at which every group is valid, or 0. The arguments are those of `history_run`."""
    run = history_run(groups, prefix, present, runs)
    others = [index for index, group in enumerate(groups) if not isinstance(group.validity, History)]

    def is_valid(tokens: int) -> bool:
        return all(
            all(present(index, chunk) for chunk in reversed(needed_chunks(groups[index], prefix, tokens)))
            for index in others
        )

    size = prefix.chunk_tokens
    return next((tokens for tokens in range(run * size, 0, -size) if is_valid(tokens)), 0)


def lookup_sources(
    groups: Sequence[GroupLayout],
    prefix: Prefix,
    tokens: int,
    source_of: Callable[[int, int], str],
    order: Sequence[str],
) -> Sources:
    """Return how many of the leading `tokens` a load gets from each source.

    `source_of` takes (group, chunk) and returns the source of that object. `order` lists the sources, fastest first.
    """
    items = [(index, chunk) for index, group in enumerate(groups) for chunk in needed_chunks(group, prefix, tokens)]
    return load_sources(prefix, tokens, {item: source_of(*item) for item in items}, order)


def load_sources(
    prefix: Prefix,
    tokens: int,
    sources: Mapping[tuple[int, int], str],
    order: Sequence[str],
    resident_tokens: int = 0,
) -> Sources:
    """Return how many of the tokens from `resident_tokens` up to `tokens` come from each source.

    `sources` maps (group, chunk) to the source of that object. A chunk counts towards the slowest source among its
    groups. A chunk that no group loads (before a sliding window) counts like the next chunk that is loaded.
    """
    slowness = {source: number for number, source in enumerate(order)}
    by_chunk: dict[int, str] = {}
    for (_, chunk), source in sources.items():
        known = by_chunk.get(chunk)
        if known is None or slowness[source] > slowness[known]:
            by_chunk[chunk] = source
    total = dict.fromkeys(order, 0)
    end, source = tokens, HOST
    while end > resident_tokens:
        chunk = (end - 1) // prefix.chunk_tokens
        start = max(resident_tokens, chunk * prefix.chunk_tokens)
        source = by_chunk.get(chunk, source)
        total[source] += end - start
        end = start
    return tuple((name, count) for name, count in total.items() if count)
