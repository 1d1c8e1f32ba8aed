"""What is restorable, said in the most direct way: token by token, without the core's arithmetic."""

from collections.abc import Callable, Sequence

from kvtier.layout import GroupLayout, History, Window
from kvtier.types import Prefix


def boundaries(prefix: Prefix) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Every (tokens, cover) at which the engine may resume; cover is (chunk, first token, token after the last)."""
    size, count = prefix.chunk_tokens, len(prefix.keys)
    full = [(chunk, chunk * size, (chunk + 1) * size) for chunk in range(count)]
    found = [(chunks * size, full[:chunks]) for chunks in range(1, count + 1)]
    for number, mark in enumerate(prefix.marks):
        before = mark.end // size
        if before <= count and mark.end % size:
            found.append((mark.end, [*full[:before], (count + number, before * size, mark.end)]))
    return sorted(found, key=lambda boundary: boundary[0])


def is_needed(group: GroupLayout, first: int, end: int, tokens: int) -> bool:
    """Whether a chunk that covers tokens [first, end) is needed to resume at `tokens`."""
    rule = group.validity
    if isinstance(rule, History):
        return True
    if isinstance(rule, Window):
        return any(token >= tokens - rule.tokens for token in range(first, end))
    return end == tokens


def needed(groups: Sequence[GroupLayout], prefix: Prefix, tokens: int) -> list[tuple[int, int]]:
    """(group, chunk) of everything that resuming at `tokens` needs."""
    return [
        (index, chunk)
        for boundary, cover in boundaries(prefix)
        if boundary == tokens
        for index, group in enumerate(groups)
        for chunk, first, end in cover
        if is_needed(group, first, end, tokens)
    ]


def longest(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Callable[[int, int], bool], tokens_max: int | None = None
) -> int:
    """The largest boundary, up to `tokens_max`, at which everything needed is present; 0 when there is none."""
    best = 0
    for tokens, cover in boundaries(prefix):
        if (tokens_max is None or tokens <= tokens_max) and all(
            present(index, chunk)
            for index, group in enumerate(groups)
            for chunk, first, end in cover
            if is_needed(group, first, end, tokens)
        ):
            best = tokens
    return best
