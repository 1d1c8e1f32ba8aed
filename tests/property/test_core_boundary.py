"""Which boundary is restorable: the core's arithmetic against a definition that goes token by token."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.boundary import chunk_end, chunk_start, longest_boundary, needed_chunks
from kvtier.layout import GroupLayout, History, State, Validity, Window
from kvtier.sim import oracle
from kvtier.types import ChunkKey, Mark, Prefix

VALIDITIES = st.one_of(st.just(History()), st.just(State()), st.builds(Window, st.integers(1, 20)))


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    size = draw(st.integers(1, 6))
    count = draw(st.integers(0, 5))
    marks = draw(st.lists(st.integers(0, size * (count + 2)), max_size=3))
    return Prefix(
        tuple(ChunkKey(b"%d" % number) for number in range(count)),
        size,
        tuple(Mark(ChunkKey(b"mark %d" % end), end) for end in marks),
    )


def groups_of(kinds: Sequence[Validity]) -> tuple[GroupLayout, ...]:
    return tuple(GroupLayout(kind, (1,), "test") for kind in kinds)


def tokens_covered(prefix: Prefix, chunk: int) -> range:
    """The tokens of a chunk, from the words of `Prefix` alone."""
    size = prefix.chunk_tokens
    if chunk < len(prefix.keys):
        return range(chunk * size, chunk * size + size)
    end = prefix.marks[chunk - len(prefix.keys)].end
    return range(end - end % size, end)


def is_restorable(group: GroupLayout, prefix: Prefix, tokens: int, present: set[int]) -> bool:
    """Whether a group is valid at `tokens`, said token by token (DESIGN section 6)."""
    size, count = prefix.chunk_tokens, len(prefix.keys)
    usable = [chunk for chunk in present if chunk < min(count, tokens // size)]
    if tokens % size:
        usable += [
            count + number
            for number, mark in enumerate(prefix.marks)
            if mark.end == tokens and count + number in present
        ][:1]
    covered = {token for chunk in usable for token in tokens_covered(prefix, chunk)}
    rule = group.validity
    if isinstance(rule, History):
        return set(range(tokens)) <= covered
    if isinstance(rule, Window):
        return set(range(max(0, tokens - rule.tokens), tokens)) <= covered
    return any(tokens_covered(prefix, chunk).stop == tokens for chunk in usable)


def candidates(prefix: Prefix) -> list[int]:
    size, count = prefix.chunk_tokens, len(prefix.keys)
    full = [chunks * size for chunks in range(1, count + 1)]
    return full + [mark.end for mark in prefix.marks if mark.end % size and mark.end // size <= count]


def first_of_each(prefix: Prefix) -> Prefix:
    """Two marks at the same boundary: the first one counts, so the second is left out."""
    seen: dict[int, Mark] = {}
    for mark in prefix.marks:
        seen.setdefault(mark.end, mark)
    return Prefix(prefix.keys, prefix.chunk_tokens, tuple(seen.values()))


@given(prefixes().map(first_of_each), st.lists(VALIDITIES, min_size=1, max_size=3), st.data())
def test_the_longest_boundary_is_what_the_definition_says(
    prefix: Prefix, kinds: list[Validity], data: st.DataObject
) -> None:
    groups = groups_of(kinds)
    chunks = list(range(len(prefix.keys) + len(prefix.marks)))
    present = [set(data.draw(st.sets(st.sampled_from(chunks)))) if chunks else set() for _ in groups]
    best = max(
        (
            tokens
            for tokens in candidates(prefix)
            if all(is_restorable(group, prefix, tokens, have) for group, have in zip(groups, present, strict=True))
        ),
        default=0,
    )
    assert longest_boundary(groups, prefix, lambda group, chunk: chunk in present[group]) == best
    assert oracle.longest(groups, prefix, lambda group, chunk: chunk in present[group]) == best

    runs = []
    for have in present:
        run = next((chunk for chunk in range(len(prefix.keys)) if chunk not in have), len(prefix.keys))
        runs.append(data.draw(st.integers(0, run)))
    asked: list[tuple[int, int]] = []

    def counted(group: int, chunk: int) -> bool:
        asked.append((group, chunk))
        return chunk in present[group]

    assert longest_boundary(groups, prefix, counted, runs) == best
    histories = [index for index, group in enumerate(groups) if isinstance(group.validity, History)]
    assert not [1 for group, chunk in asked if group in histories and chunk < runs[group]], (
        "known runs are not asked for"
    )


@given(prefixes().map(first_of_each), VALIDITIES)
def test_what_is_needed_is_enough_and_nothing_of_it_is_too_much(prefix: Prefix, kind: Validity) -> None:
    (group,) = groups_of([kind])
    for tokens in candidates(prefix):
        needed = needed_chunks(group, prefix, tokens)
        assert needed == [chunk for _, chunk in oracle.needed([group], prefix, tokens)]
        assert is_restorable(group, prefix, tokens, set(needed))
        for chunk in needed:
            assert not is_restorable(group, prefix, tokens, set(needed) - {chunk})


@given(prefixes())
def test_chunks_begin_and_end_where_their_tokens_do(prefix: Prefix) -> None:
    for chunk in range(len(prefix.keys) + len(prefix.marks)):
        covered = tokens_covered(prefix, chunk)
        assert (chunk_start(prefix, chunk), chunk_end(prefix, chunk)) == (covered.start, covered.stop)


@given(prefixes(), VALIDITIES, st.integers(0, 60))
def test_anything_else_is_no_boundary(prefix: Prefix, kind: Validity, tokens: int) -> None:
    (group,) = groups_of([kind])
    if tokens not in (0, *candidates(prefix)):
        with pytest.raises(ValueError, match=r"no boundary|beyond"):
            needed_chunks(group, prefix, tokens)
    else:
        needed_chunks(group, prefix, tokens)
