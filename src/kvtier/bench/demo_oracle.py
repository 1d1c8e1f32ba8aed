"""What a perfect cache could restore, worked out from the tokens alone; nothing here asks kvtier.

A chunk is known by all the tokens up to its end. An earlier request has stored the whole chunks of its prompt and
answer, without the answer's last token: no forward pass ever read that one, so it has no KV.
"""

import hashlib
from array import array
from collections.abc import Iterable, Sequence


class StoredPrefixes:
    """The chunk-long steps of every token sequence seen so far."""

    def __init__(self, chunk_tokens: int, digests: Iterable[str] = ()) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self._digests = set(digests)

    @property
    def digests(self) -> list[str]:
        """What to hand to another `StoredPrefixes` to go on from here; in a fixed order."""
        return sorted(self._digests)

    def store(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Note that a request with this prompt and this answer has ended."""
        self._digests.update(_prefix_digests([*prompt, *answer[:-1]], self.chunk_tokens))

    def restorable_tokens(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of `prompt` need not be computed.

        At least the last token is always computed, to have something to choose the next one from. So of a prompt that
        ends on a chunk boundary the last chunk counts less one token.
        """
        found = 0
        for digest in _prefix_digests(prompt, self.chunk_tokens):
            if digest not in self._digests:
                break
            found += 1
        return min(found * self.chunk_tokens, max(len(prompt) - 1, 0))


def _prefix_digests(tokens: Sequence[int], chunk_tokens: int) -> list[str]:
    running = hashlib.sha256()
    digests: list[str] = []
    for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
        running.update(array("q", tokens[end - chunk_tokens : end]).tobytes())
        digests.append(running.hexdigest()[:32])
    return digests
