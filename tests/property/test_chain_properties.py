"""Key chains: stable under growth in any steps, changed from an extra's own chunk on, and equal to a slow oracle."""

import hashlib
import struct
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvtier.keys.chain import TOKEN_MAX, Chain, Extra, chunk_keys

ROOT = bytes(range(32))
token_lists = st.lists(st.integers(0, TOKEN_MAX), max_size=60)
chunk_sizes = st.integers(1, 9)
extra_lists = st.lists(
    st.builds(Extra, st.sampled_from(["adapter", "image", "salt", "é"]), st.binary(max_size=4), st.integers(0, 70)),
    max_size=6,
)


def slow_key(tokens: list[int], chunk_tokens: int, extras: list[Extra], end: int) -> bytes:
    """FORMAT.md read aloud: the key of the chunk that ends at `end`."""
    if end == 0:
        return ROOT
    start = (end - 1) // chunk_tokens * chunk_tokens
    encoded = b""
    for token in tokens[start:end]:
        encoded += struct.pack("<I", token)
    mine = sorted((e.offset - start, e.kind.encode(), e.value) for e in extras if start <= e.offset < end)
    encoded += struct.pack("<I", len(mine))
    for position, kind, value in mine:
        encoded += struct.pack("<II", position, len(kind)) + kind + struct.pack("<I", len(value)) + value
    parent = slow_key(tokens, chunk_tokens, extras, start)
    return hashlib.sha256(parent + struct.pack("<I", end - start) + encoded).digest()


@given(token_lists, chunk_sizes, extra_lists)
def test_keys_equal_the_slow_oracle(tokens, chunk_tokens, extras):
    ends = range(chunk_tokens, len(tokens) + 1, chunk_tokens)
    wanted = tuple(slow_key(tokens, chunk_tokens, extras, end) for end in ends)
    assert chunk_keys(ROOT, tokens, chunk_tokens, extras) == wanted


@given(token_lists, chunk_sizes, extra_lists, st.lists(st.integers(0, 60), max_size=5))
def test_growing_in_any_steps_gives_the_same_chain(tokens, chunk_tokens, extras, cuts):
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    chain = Chain(ROOT, chunk_tokens, extras)
    for start, stop in pairwise(bounds):
        chain.extend(tokens[start:stop])
        assert chain.tokens == stop
        assert chain.keys == chunk_keys(ROOT, tokens[:stop], chunk_tokens, extras)


@given(token_lists, token_lists, chunk_sizes, extra_lists)
def test_more_tokens_never_change_an_earlier_key(tokens, more, chunk_tokens, extras):
    keys = chunk_keys(ROOT, tokens, chunk_tokens, extras)
    assert chunk_keys(ROOT, tokens + more, chunk_tokens, extras)[: len(keys)] == keys


@given(st.lists(st.integers(0, TOKEN_MAX), min_size=1, max_size=60), chunk_sizes, extra_lists, st.data())
def test_an_extra_changes_the_keys_from_its_chunk_on_and_no_other(tokens, chunk_tokens, extras, data):
    added = Extra("image", b"another", data.draw(st.integers(0, len(tokens) + 5)))
    before = chunk_keys(ROOT, tokens, chunk_tokens, extras)
    after = chunk_keys(ROOT, tokens, chunk_tokens, [*extras, added])
    first = added.offset // chunk_tokens
    assert [one != other for one, other in zip(before, after, strict=True)] == [
        at >= first for at in range(len(before))
    ]


@given(token_lists, chunk_sizes, st.permutations(range(6)), extra_lists)
def test_the_order_of_extras_does_not_matter(tokens, chunk_tokens, order, extras):
    turned = [extras[index] for index in order if index < len(extras)]
    assert chunk_keys(ROOT, tokens, chunk_tokens, turned) == chunk_keys(ROOT, tokens, chunk_tokens, extras)


@given(token_lists, token_lists, chunk_sizes)
def test_equal_keys_mean_equal_prefixes(one, other, chunk_tokens):
    keys, others = chunk_keys(ROOT, one, chunk_tokens), chunk_keys(ROOT, other, chunk_tokens)
    for chunk, (key, another) in enumerate(zip(keys, others, strict=False)):
        end = (chunk + 1) * chunk_tokens
        assert (key == another) == (one[:end] == other[:end])
