"""Key chains equal a slow oracle, and are stable under growth in any steps."""

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
