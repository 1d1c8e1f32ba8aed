"""Computes how many leading tokens of a prompt can be restored. Pure arithmetic over chunks and groups.

A boundary is a token count at which the engine may resume: a multiple of the chunk at which every group is valid.
History needs all chunks before it, a window the chunks over its last tokens, a state the chunk that ends there.
"""

from collections.abc import Callable, Sequence

from kvtier.layout import GroupLayout, History, Window
from kvtier.types import Prefix

Present = Callable[[int, int], bool]
"""(group, chunk) -> whether that object is available."""


def needed_chunks(group: GroupLayout, prefix: Prefix, tokens: int) -> range:
    """The chunks of `group` that a load of the leading `tokens` needs.

    Raises:
        ValueError: `tokens` is not a multiple of the chunk within the prefix.
    """
    full, rest = divmod(tokens, prefix.chunk_tokens)
    if rest or full > len(prefix.keys):
        size = prefix.chunk_tokens
        raise ValueError(f"{tokens} tokens is not a boundary: allowed are multiples of {size} up to {prefix.tokens}")
    if isinstance(group.validity, History):
        return range(full)
    if isinstance(group.validity, Window):
        return range(max(0, tokens - group.validity.tokens) // prefix.chunk_tokens, full)
    return range(max(0, full - 1), full)


def history_run(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Present, runs: Sequence[int] | None = None
) -> int:
    """Leading chunks that are present in every history group; all chunks when there is no such group.

    Args:
        groups: the KV groups.
        prefix: the prompt.
        present: whether an object is available.
        runs: leading chunks of each group that are known to be present; `present` is not called for them.
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
    """The largest token count at which every group is valid, or 0. The arguments are those of `history_run`."""
    run = history_run(groups, prefix, present, runs)
    others = [index for index, group in enumerate(groups) if not isinstance(group.validity, History)]

    def is_valid(tokens: int) -> bool:
        return all(
            all(present(index, chunk) for chunk in reversed(needed_chunks(groups[index], prefix, tokens)))
            for index in others
        )

    size = prefix.chunk_tokens
    return next((tokens for tokens in range(run * size, 0, -size) if is_valid(tokens)), 0)
