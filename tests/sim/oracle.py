"""Computes which prefix is restorable, token by token and without the core's arithmetic."""

from collections.abc import Callable, Sequence

from kvtier.layout import GroupLayout, History, Window
from kvtier.types import Prefix


def boundaries(prefix: Prefix, tokens_max: int | None = None) -> range:
    """Return every token count up to `tokens_max` at which the engine may resume."""
    size = prefix.chunk_tokens
    return range(size, min(prefix.tokens, prefix.tokens if tokens_max is None else tokens_max) + 1, size)


def is_needed(group: GroupLayout, first: int, end: int, tokens: int) -> bool:
    """Whether a chunk that covers tokens [first, end) is needed to resume at `tokens`."""
    rule = group.validity
    if isinstance(rule, History):
        return True
    if isinstance(rule, Window):
        return any(token >= tokens - rule.tokens for token in range(first, end))
    return end == tokens


def needed(groups: Sequence[GroupLayout], prefix: Prefix, tokens: int) -> list[tuple[int, int]]:
    """Return (group, chunk) of everything that resuming at `tokens` needs."""
    size = prefix.chunk_tokens
    return [
        (index, chunk)
        for index, group in enumerate(groups)
        for chunk in range(tokens // size)
        if is_needed(group, chunk * size, (chunk + 1) * size, tokens)
    ]


def longest(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Callable[[int, int], bool], tokens_max: int | None = None
) -> int:
    """Return the largest boundary up to `tokens_max` at which everything needed is present. 0 if there is none."""
    ends = boundaries(prefix, tokens_max)
    return max((end for end in ends if all(present(*item) for item in needed(groups, prefix, end))), default=0)
