"""The token-hash chain: what enters a key, what does not, and which tokens are refused."""

import hashlib
from array import array

import numpy as np
import pytest

from kvtier.keys import chain as chain_module
from kvtier.keys.chain import TOKEN_MAX, Chain, Extra, canonical_extras, chunk_keys
from kvtier.types import Prefix

ROOT = bytes(range(32))


def test_only_full_chunks_have_keys():
    assert [len(chunk_keys(ROOT, list(range(count)), 4)) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_key_depends_on_every_token_before_it():
    tokens = list(range(12))
    keys = chunk_keys(ROOT, tokens, 4)
    for position in range(12):
        changed = [*tokens]
        changed[position] += 1
        differs = [one != other for one, other in zip(keys, chunk_keys(ROOT, changed, 4), strict=True)]
        assert differs == [chunk >= position // 4 for chunk in range(3)]


def test_the_root_enters_every_key():
    assert not set(chunk_keys(ROOT, range_list := list(range(8)), 4)) & set(chunk_keys(bytes(32), range_list, 4))


def test_the_same_tokens_cut_differently_share_no_key():
    tokens = [0] * 16
    assert not set(chunk_keys(ROOT, tokens, 4)) & set(chunk_keys(ROOT, tokens, 8))


@pytest.mark.parametrize(
    ("extra", "other"),
    [
        (Extra("adapter", b"a"), Extra("adapter", b"b")),
        (Extra("adapter", b"a"), Extra("salt", b"a")),
        (Extra("adapter", b"a"), Extra("adapte", b"ra")),
        (Extra("image", b"a", 1), Extra("image", b"a", 2)),
        (Extra("image", b""), Extra("image", b"\0")),
    ],
)
def test_kind_value_and_place_of_an_extra_enter_the_key(extra, other):
    tokens = list(range(8))
    plain = chunk_keys(ROOT, tokens, 4)
    one, two = chunk_keys(ROOT, tokens, 4, [extra]), chunk_keys(ROOT, tokens, 4, [other])
    assert all(len({keys[chunk] for keys in (plain, one, two)}) == 3 for chunk in range(2))


def test_extras_count_with_their_number_and_not_with_their_order():
    tokens = list(range(8))
    extras = [Extra("image", b"a", 1), Extra("image", b"b", 1), Extra("adapter", b"z")]
    assert chunk_keys(ROOT, tokens, 4, extras) == chunk_keys(ROOT, tokens, 4, extras[::-1])
    assert chunk_keys(ROOT, tokens, 4, extras) != chunk_keys(ROOT, tokens, 4, [*extras, extras[0]])


def test_an_extra_that_no_full_chunk_reaches_enters_no_key():
    tokens = list(range(6))
    for offset in (4, 5, 6, 1000):
        assert chunk_keys(ROOT, tokens, 4, [Extra("image", b"a", offset)]) == chunk_keys(ROOT, tokens, 4)


def test_canonical_extras_are_as_the_document_says():
    assert canonical_extras((), 0) == bytes(4)
    encoded = canonical_extras([Extra("b", b"", 9), Extra("a", b"xy", 8)], 8)
    assert encoded == bytes.fromhex("02000000 00000000 01000000 61 02000000 7879 01000000 01000000 62 00000000")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", b""), "needs a kind"),
        (("image", "text"), "'image': value must be bytes, got str"),
        (("image", b"", -1), "'image': offset must be in 0..4294967295, got -1"),
        (("image", b"", 1 << 32), "got 4294967296"),
    ],
)
def test_an_impossible_extra_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Extra(*arguments)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, -3], r"tokens\[2\] must be an integer in 0..4294967295, got -3"),
        ([1, 1 << 32], r"tokens\[1\] .* got 4294967296"),
        ((1, 2.0), r"tokens\[1\] .* got 2.0"),
        ([1, None], r"tokens\[1\] .* got None"),
        ([[1]], r"tokens\[0\] .* got \[1\]"),
        (np.array([1]), "got ndarray"),
        (array("I", [1]), "got array"),
        ("abcd", "got str"),
        (b"abcd", "got bytes"),
        (iter([1]), "got list_iterator"),
    ],
)
def test_what_is_no_token_is_refused_with_value_and_position(tokens, message):
    chain = Chain(ROOT, 2)
    chain.extend([5, 6, 7])
    before = chain.prefix(), chain.tokens
    with pytest.raises(ValueError, match=message):
        chain.extend(tokens)
    assert (chain.prefix(), chain.tokens) == before


@pytest.mark.parametrize("empty", [[], ()])
def test_no_tokens_are_fine(empty):
    assert chunk_keys(ROOT, empty, 4) == ()


def test_the_largest_token_and_integers_of_numpy_in_a_list_are_fine():
    assert chunk_keys(ROOT, [np.int64(1), np.uint32(TOKEN_MAX)], 2) == chunk_keys(ROOT, [1, TOKEN_MAX], 2)


def test_a_prefix_holds_the_full_chunks():
    chain = Chain(ROOT, 4)
    chain.extend(range_of(0, 11))
    assert chain.tokens == 11
    assert chain.prefix() == Prefix(chain.keys, 4)
    assert chain.prefix(7) == Prefix(chain.keys[:1], 4)
    for tokens in (12, -1):
        with pytest.raises(ValueError, match=f"got {tokens}"):
            chain.prefix(tokens)


def range_of(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


# ---- keys that cover the next token ------------------------------------------------------------------------------


def ahead(tokens: list[int], *extras: Extra) -> Chain:
    chain = Chain(ROOT, 4, extras, looks_ahead=True)
    chain.extend(tokens)
    return chain


def test_a_chain_that_looks_ahead_has_the_bytes_of_the_document():
    chunk = b"".join(token.to_bytes(4, "little") for token in (4, 0, 1, 2, 3))
    after = bytes.fromhex("01000000 04000000 04000000 6e657874 04000000 04000000")
    assert ahead(range_of(0, 5)).keys == (hashlib.sha256(ROOT + chunk + after).digest(),)


def test_a_full_chunk_has_no_key_before_the_next_token_is_known():
    assert [len(ahead(range_of(0, count)).keys) for count in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    assert len(ahead(range_of(0, 9)).prefix(8).keys) == 2


def test_a_key_that_looks_ahead_depends_on_one_more_token():
    tokens = list(range(13))
    keys = ahead(tokens).keys
    for position in range(13):
        changed = [*tokens]
        changed[position] += 1
        differs = [one != other for one, other in zip(keys, ahead(changed).keys, strict=True)]
        assert differs == [chunk >= (position - 1) // 4 for chunk in range(3)]
    assert not set(keys) & set(chunk_keys(ROOT, tokens, 4))


def test_an_item_that_starts_after_a_chunk_enters_its_key():
    plain = ahead(range_of(0, 13)).keys
    for offset, first in ((0, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        keys = ahead(range_of(0, 13), Extra("i", b"a", offset)).keys
        differs = [one != other for one, other in zip(plain, keys, strict=True)]
        assert differs == [chunk >= first for chunk in range(3)], offset


def test_a_chain_that_looks_ahead_grows_in_any_steps():
    extras = [Extra("i", b"a", 4), Extra("i", b"b", 7)]
    whole = ahead(range_of(0, 14), *extras)
    for cut in range(15):
        chain = ahead(range_of(0, cut), *extras)
        chain.extend(range_of(cut, 14))
        assert (chain.keys, chain.tokens) == (whole.keys, 14)


def test_a_chain_without_memory_for_its_keys_is_unchanged(monkeypatch):
    tokens = list(range(20))
    chain, whole = (Chain(ROOT, 4, [], looks_ahead=True) for _ in range(2))
    whole.extend(tokens)
    chain.extend(tokens[:6])
    real, left = chain_module.canonical_extras, [1]

    def short(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return real(*arguments)

    monkeypatch.setattr(chain_module, "canonical_extras", short)
    with pytest.raises(MemoryError):
        chain.extend(tokens[6:])
    monkeypatch.undo()
    assert chain.tokens == 6
    chain.extend(tokens[6:])
    assert chain.prefix() == whole.prefix()
