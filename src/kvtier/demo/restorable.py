"""Prefixes that earlier requests have stored: counted from tokens alone, without kvtier.

The count says how many tokens a perfect cache would restore. A request stores the whole chunks of its prompt and
answer, without the answer's last token: no forward pass reads that token, so it has no KV.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence


class StoredPrefixes:
    """The prefixes, in whole chunks, of all stored token sequences; each is known by the digest of all its tokens."""

    def __init__(self, chunk_tokens: int, digests: Iterable[str] = ()) -> None:
        self.chunk_tokens = chunk_tokens
        self.digests = set(digests)

    def store(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add the chunks of a request that has ended."""
        self.digests.update(_prefix_digests([*prompt, *answer[:-1]], self.chunk_tokens))

    def restorable_tokens(self, prompt: Sequence[int]) -> int:
        """Leading tokens of `prompt` that need not be computed.

        The last token is always computed: the next one is chosen from its output. So if the prompt ends on a chunk
        boundary, its last chunk counts one token less.
        """
        chunks = 0
        for digest in _prefix_digests(prompt, self.chunk_tokens):
            if digest not in self.digests:
                break
            chunks += 1
        return min(chunks * self.chunk_tokens, max(len(prompt) - 1, 0))


def _prefix_digests(tokens: Sequence[int], chunk_tokens: int) -> list[str]:
    running = hashlib.sha256()
    digests: list[str] = []
    for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
        running.update(array("q", tokens[end - chunk_tokens : end]).tobytes())
        digests.append(running.hexdigest()[:32])
    return digests
