"""Which boundary is restorable: the core's arithmetic against a definition that goes token by token."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.sim import oracle

from kvtier.core.prefix import longest_boundary, needed_chunks
from kvtier.layout import GroupLayout, History, State, Validity, Window
from kvtier.types import ChunkKey, Prefix

VALIDITIES = st.one_of(st.just(History()), st.just(State()), st.builds(Window, st.integers(1, 20)))


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    count = draw(st.integers(0, 5))
    return Prefix(tuple(ChunkKey(b"%d" % number) for number in range(count)), draw(st.integers(1, 6)))


def groups_of(kinds: Sequence[Validity]) -> tuple[GroupLayout, ...]:
    return tuple(GroupLayout(kind, (1,), "test") for kind in kinds)


def is_restorable(group: GroupLayout, prefix: Prefix, tokens: int, present: set[int]) -> bool:
    """Whether a group is valid at `tokens`, checked token by token."""
    size = prefix.chunk_tokens
    usable = [chunk for chunk in present if (chunk + 1) * size <= tokens]
    covered = {token for chunk in usable for token in range(chunk * size, (chunk + 1) * size)}
    rule = group.validity
    if isinstance(rule, History):
        return set(range(tokens)) <= covered
    if isinstance(rule, Window):
        return set(range(max(0, tokens - rule.tokens), tokens)) <= covered
    return any((chunk + 1) * size == tokens for chunk in usable)


@given(prefixes(), st.lists(VALIDITIES, min_size=1, max_size=3), st.data())
def test_the_longest_boundary_follows_the_definition(
    prefix: Prefix, kinds: list[Validity], data: st.DataObject
) -> None:
    groups = groups_of(kinds)
    chunks = list(range(len(prefix.keys)))
    present = [set(data.draw(st.sets(st.sampled_from(chunks)))) if chunks else set() for _ in groups]
    best = max(
        (
            tokens
            for tokens in oracle.boundaries(prefix)
            if all(is_restorable(group, prefix, tokens, have) for group, have in zip(groups, present, strict=True))
        ),
        default=0,
    )
    assert longest_boundary(groups, prefix, lambda group, chunk: chunk in present[group]) == best
    assert oracle.longest(groups, prefix, lambda group, chunk: chunk in present[group]) == best

    runs = []
    for have in present:
        run = next((chunk for chunk in chunks if chunk not in have), len(chunks))
        runs.append(data.draw(st.integers(0, run)))
    looked_at: list[tuple[int, int]] = []

    def counted(group: int, chunk: int) -> bool:
        looked_at.append((group, chunk))
        return chunk in present[group]

    assert longest_boundary(groups, prefix, counted, runs) == best
    histories = [index for index, group in enumerate(groups) if isinstance(group.validity, History)]
    assert not [1 for group, chunk in looked_at if group in histories and chunk < runs[group]]


@given(prefixes(), VALIDITIES)
def test_what_is_needed_is_enough_and_nothing_of_it_is_too_much(prefix: Prefix, kind: Validity) -> None:
    (group,) = groups_of([kind])
    for tokens in oracle.boundaries(prefix):
        needed = list(needed_chunks(group, prefix, tokens))
        assert needed == [chunk for _, chunk in oracle.needed([group], prefix, tokens)]
        assert is_restorable(group, prefix, tokens, set(needed))
        for chunk in needed:
            assert not is_restorable(group, prefix, tokens, set(needed) - {chunk})


@given(prefixes(), VALIDITIES, st.integers(0, 60))
def test_anything_else_is_no_boundary(prefix: Prefix, kind: Validity, tokens: int) -> None:
    (group,) = groups_of([kind])
    if tokens in (0, *oracle.boundaries(prefix)):
        needed_chunks(group, prefix, tokens)
    else:
        with pytest.raises(ValueError, match="not a boundary"):
            needed_chunks(group, prefix, tokens)
