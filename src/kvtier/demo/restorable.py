"""Prefixes that earlier requests have stored: counted from tokens alone, without kvtier, and kept between calls.

The count says how many tokens a perfect cache would restore. A request stores the whole chunks of its prompt and
answer, without the answer's last token: no forward pass reads that token, so it has no KV.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.report.output import write_file
from kvtier.tier.directory_marker import MARKER_NAME

HISTORY_NAME = "demo.json"
VERSION = 1
RUNS_MAX = 8
"""Older runs are dropped from the history; their chunks stay in the store until it evicts them."""


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


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Contents that one call of the demo left in a store."""

    namespace: str
    identity: str
    """Model, tokenizer and store: only a call with equal ones can use its KV."""
    chunk_tokens: int
    digests: tuple[str, ...]
    """Digests of `StoredPrefixes`."""


def read_history(directory: Path) -> list[EarlierRun]:
    """The earlier runs in `directory`, latest last; none if the file is missing, damaged or of another version."""
    try:
        history: Any = json.loads((directory / HISTORY_NAME).read_text(encoding="utf-8"))
        if history["version"] != VERSION:
            return []
        return [
            EarlierRun(it["namespace"], it["identity"], it["chunk_tokens"], tuple(it["digests"]))
            for it in history["entries"]
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def add_to_history(directory: Path, run: EarlierRun) -> None:
    """Add a run to the file in `directory`, in the place of one with the same namespace."""
    others = [it for it in read_history(directory) if it.namespace != run.namespace]
    entries = [asdict(it) for it in [*others, run][-RUNS_MAX:]]
    write_file("--dir", directory / HISTORY_NAME, json.dumps({"version": VERSION, "entries": entries}))
    (directory / HISTORY_NAME).chmod(0o600)


def drop_stale_history(directory: Path) -> None:
    """Remove the history of a purged store: `kvtier inspect purge` removes only the store's own files."""
    if not (directory / MARKER_NAME).exists() and read_history(directory):
        (directory / HISTORY_NAME).unlink()


def _prefix_digests(tokens: Sequence[int], chunk_tokens: int) -> list[str]:
    running = hashlib.sha256()
    digests: list[str] = []
    for end in range(chunk_tokens, len(tokens) + 1, chunk_tokens):
        running.update(array("q", tokens[end - chunk_tokens : end]).tobytes())
        digests.append(running.hexdigest()[:32])
    return digests
