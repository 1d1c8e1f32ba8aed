"""Which leading tokens of a prompt are restorable, given what is present. Pure arithmetic over chunks and groups.

A boundary is a token count at which the engine may resume. Every group must be valid there (rules of DESIGN section 6):
history needs all chunks before it, a window the chunks over its last tokens, a state the object at the boundary itself.
"""

from collections.abc import Callable, Sequence

from kvtier.layout import GroupLayout, History, Window
from kvtier.types import Prefix

Present = Callable[[int, int], bool]
"""(group, chunk) -> whether that object can be had. Chunks are counted as in `Prefix`: marks follow the full chunks."""


def chunk_start(prefix: Prefix, chunk: int) -> int:
    """First token that chunk `chunk` of the prefix covers."""
    count = len(prefix.keys)
    if chunk < count:
        return chunk * prefix.chunk_tokens
    end = prefix.marks[chunk - count].end
    return end - end % prefix.chunk_tokens


def chunk_end(prefix: Prefix, chunk: int) -> int:
    """Token after the last one that chunk `chunk` of the prefix covers."""
    count = len(prefix.keys)
    return (chunk + 1) * prefix.chunk_tokens if chunk < count else prefix.marks[chunk - count].end


def needed_chunks(group: GroupLayout, prefix: Prefix, tokens: int) -> list[int]:
    """The chunks of `group` that a load of the leading `tokens` must bring, in prefix order.

    Raises:
        ValueError: `tokens` is neither a multiple of the chunk within the keys nor one of the prefix's marks.
    """
    full, rest = divmod(tokens, prefix.chunk_tokens)
    tail: list[int] = []
    if rest:
        ends = [mark.end for mark in prefix.marks]
        if tokens not in ends:
            raise ValueError(
                f"{tokens} tokens is no boundary: allowed are multiples of {prefix.chunk_tokens} and {ends}"
            )
        tail = [len(prefix.keys) + ends.index(tokens)]
    if full > len(prefix.keys):
        raise ValueError(f"{tokens} tokens is beyond the {len(prefix.keys)} chunks of the prefix")
    validity = group.validity
    if isinstance(validity, History):
        return [*range(full), *tail]
    if isinstance(validity, Window):
        first = max(0, tokens - validity.tokens) // prefix.chunk_tokens
        return [*range(first, full), *tail]
    return tail or ([full - 1] if full else [])


def history_run(
    groups: Sequence[GroupLayout], prefix: Prefix, present: Present, runs: Sequence[int] | None = None
) -> int:
    """Leading chunks that every history group has; all of the prefix where there is no such group.

    `runs` are as in `longest_boundary`.
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
    """The largest token count at which every group is valid; 0 when there is none.

    `runs` are the leading chunks of each group that the caller knows to be present already, so as not to ask again.
    """
    count = len(prefix.keys)
    run = history_run(groups, prefix, present, runs)
    others = [index for index, group in enumerate(groups) if not isinstance(group.validity, History)]

    def is_valid(tokens: int) -> bool:
        return all(
            all(present(index, chunk) for chunk in reversed(needed_chunks(groups[index], prefix, tokens)))
            for index in others
        )

    best = next((full for full in range(run, 0, -1) if is_valid(full * prefix.chunk_tokens)), 0) * prefix.chunk_tokens
    histories = [index for index in range(len(groups)) if index not in others]
    for number, mark in enumerate(prefix.marks):
        reaches = mark.end // prefix.chunk_tokens <= run and mark.end > best
        if reaches and all(present(index, count + number) for index in histories) and is_valid(mark.end):
            best = mark.end
    return best
