"""The token-hash chain: one key per chunk, which names the whole prefix that ends with it.

    key[i] = SHA-256( key[i - 1] | u32 number of tokens | the chunk's tokens as u32 | extras that start in it )

key[-1] is the keyed root (`kvtier.keys.fingerprint.root_key`), and all numbers are little-endian. A partial chunk has
no key. FORMAT.md specifies the bytes. Equal keys mean equal tokens, extras, fingerprint and secret, from the first
token on.

The KV of a draft layer (EAGLE, MTP) at a position also depends on the next token. In a chain that looks
ahead, each key also covers the token after its chunk, as an extra `NEXT`, and the extras that start at that token.
"""

import hashlib
import operator
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from kvtier.types import ChunkKey, Prefix

TOKEN_BYTES = 4
NEXT = "next"
"""Kind of the extra that holds the token after a chunk, as u32."""

TOKEN_MAX = (1 << 32) - 1
"""Largest token id. A token id has four bytes."""

_U32 = struct.Struct("<I")
_ARRAY_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


@dataclass(frozen=True, slots=True, order=True)
class Extra:
    """A value other than tokens that changes the KV of a request.

    Args:
        kind: kind of the extra, such as ``adapter``, ``image`` or ``salt``; not empty.
        value: identity of the extra, such as an adapter's name and digest, or a digest of an image's pixels.
        offset: its first token position in the prompt. The key of the chunk with this position covers the extra, and
            later chunks inherit it through the chain.

    Raises:
        ValueError: an empty kind, a value that is not bytes, or an offset outside 0 .. 2**32 - 1.
    """

    kind: str
    value: bytes
    offset: int = 0

    def __post_init__(self) -> None:
        if not self.kind:
            raise ValueError("an extra needs a kind, but its kind is empty")
        if not isinstance(self.value, bytes):  # pyright: ignore[reportUnnecessaryIsInstance] (callers may be untyped)
            kind = type(self.value).__name__
            raise ValueError(f"extra {self.kind!r}: value must be bytes, got {kind}")  # noqa: TRY004
        if not 0 <= self.offset <= TOKEN_MAX:
            raise ValueError(f"extra {self.kind!r}: offset must be in 0..{TOKEN_MAX}, got {self.offset}")


class Chain:
    """The keys of one growing request. Each token is hashed once.

    A chain belongs to one request and is not thread-safe.

    Args:
        root: 32-byte keyed root (`kvtier.keys.fingerprint.root_key`).
        chunk_tokens: tokens in a full chunk, as in the root.
        extras: the extras, in any order; an offset may lie beyond the tokens.
        looks_ahead: whether each key also covers the token after its chunk. Then a full chunk has no key until that
            token is known.
    """

    def __init__(
        self, root: bytes, chunk_tokens: int, extras: Iterable[Extra] = (), *, looks_ahead: bool = False
    ) -> None:
        self._root = root
        self._chunk_tokens = chunk_tokens
        self.looks_ahead = looks_ahead
        self._keys: list[ChunkKey] = []
        self._tail = b""
        self._extras: dict[int, list[Extra]] = {}
        """The extras of each chunk."""
        for extra in extras:
            chunk, position = divmod(extra.offset, chunk_tokens)
            self._extras.setdefault(chunk, []).append(extra)
            if looks_ahead and not position:
                self._extras.setdefault(chunk - 1, []).append(extra)

    @property
    def keys(self) -> tuple[ChunkKey, ...]:
        """The keys so far, one for each full chunk. In a chain that looks ahead, the next token must be known, too."""
        return tuple(self._keys)

    @property
    def extras(self) -> frozenset[tuple[int, bytes]]:
        """Position and digest of each extra of the chain, even if no key covers it yet."""
        return frozenset(
            (it.offset, hashlib.sha256(self._root + canonical_extras([it], it.offset)).digest())
            for it in chain.from_iterable(self._extras.values())
        )

    @property
    def tokens(self) -> int:
        """Number of tokens in the chain."""
        return len(self._keys) * self._chunk_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`. The cost depends only on the new tokens.

        Args:
            tokens: a list or tuple of integers in 0 .. 2**32 - 1.

        Raises:
            ValueError: a token is out of range (the message names it and its position). The chain is unchanged.
        """
        self._append(token_words(tokens))

    def prefix(self, tokens: int | None = None) -> Prefix:
        """Return the keys of the full chunks within the first `tokens` tokens, or within all tokens by default.

        A full chunk that has no key yet is left out.

        Raises:
            ValueError: the chain has fewer tokens.
        """
        limit = self.tokens if tokens is None else tokens
        if not 0 <= limit <= self.tokens:
            raise ValueError(f"tokens must be in 0..{self.tokens}, got {limit}")
        return Prefix(tuple(self._keys[: limit // self._chunk_tokens]), self._chunk_tokens)

    def _append(self, words: memoryview) -> None:
        """Append `words` to the pending tokens and hash each complete chunk. After an error, the chain is unchanged."""
        data = memoryview(self._tail + bytes(words)) if self._tail else words
        width = self._chunk_tokens * TOKEN_BYTES
        count = _U32.pack(self._chunk_tokens)
        parent: bytes = self._keys[-1] if self._keys else self._root
        whole = max(0, len(data) - TOKEN_BYTES * self.looks_ahead) // width * width
        keys: list[ChunkKey] = []
        for chunk, (start, stop) in enumerate(pairwise(range(0, whole + 1, width)), len(self._keys)):
            of_chunk = self._extras.get(chunk, [])
            if self.looks_ahead:
                after = Extra(NEXT, bytes(data[stop : stop + TOKEN_BYTES]), (chunk + 1) * self._chunk_tokens)
                of_chunk = [*of_chunk, after]
            extras = canonical_extras(of_chunk, chunk * self._chunk_tokens) if of_chunk else _NO_EXTRAS
            key = ChunkKey(hashlib.sha256(b"".join((parent, count, data[start:stop], extras))).digest())
            keys.append(key)
            parent = key
        tail = bytes(data[whole:])
        self._keys += keys
        self._tail = tail


def chunk_keys(
    root: bytes, tokens: Sequence[int], chunk_tokens: int, extras: Iterable[Extra] = ()
) -> tuple[ChunkKey, ...]:
    """Return the keys of all full chunks of `tokens`.

    More tokens, or extras that start later, never change an earlier key. No key covers extras past the last full chunk.

    Args:
        root: 32-byte keyed root.
        tokens: integers in 0 .. 2**32 - 1.
        chunk_tokens: tokens in a full chunk.
        extras: the extras, in any order.

    Raises:
        ValueError: as in `Chain.extend`.
    """
    chain = Chain(root, chunk_tokens, extras)
    chain.extend(tokens)
    return chain.keys


def canonical_extras(extras: Sequence[Extra], start: int) -> bytes:
    """Return the extras of a chunk that starts at token `start`, as bytes. Their order does not matter."""
    fields = sorted((extra.offset - start, extra.kind.encode(), extra.value) for extra in extras)
    parts = [_U32.pack(len(fields))]
    for position, kind, value in fields:
        parts += [_U32.pack(position), _U32.pack(len(kind)), kind, _U32.pack(len(value)), value]
    return b"".join(parts)


_NO_EXTRAS = canonical_extras((), 0)


def token_words(tokens: Sequence[int]) -> memoryview:
    """Return the tokens as little-endian u32 bytes.

    Raises:
        ValueError: as in `Chain.extend`.
    """
    if not isinstance(tokens, list | tuple):
        # Strings and bytes are also sequences, but their elements are not token ids.
        raise ValueError(f"tokens must be a list or tuple of integers, got {type(tokens).__name__}")  # noqa: TRY004
    try:
        words = array(_ARRAY_CODE, tokens)
    except (OverflowError, TypeError):
        position, token = next((at, token) for at, token in enumerate(tokens) if not _is_token(token))
        raise ValueError(f"tokens[{position}] must be an integer in 0..{TOKEN_MAX}, got {token!r}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")


def _is_token(token: object) -> bool:
    try:
        return 0 <= operator.index(token) <= TOKEN_MAX  # pyright: ignore[reportArgumentType] (any object may come)
    except TypeError:
        return False
