"""Finds what a request has left behind: its tokens and names, in each form for a file, an answer or a log."""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from kvtier.runtime.observers.journal import NAME_BYTES

RUN = 5
"""Number of tokens in one form. Random prompts from a vocabulary of a thousand share no five in a row."""
RUNS = 3
"""Number of forms of each kind for a prompt, spread over it."""


def forms_of_tokens(tokens: Sequence[int]) -> dict[str, list[bytes]]:
    """Return by kind runs of tokens as numbers of 4 and 8 bytes, in JSON, and separated by spaces."""
    starts = range(0, len(tokens) - RUN, max(1, len(tokens) // RUNS))
    runs = [list(tokens[start : start + RUN]) for start in starts]
    return {
        "int32": [array("i", run).tobytes() for run in runs],
        "int64": [array("q", run).tobytes() for run in runs],
        "JSON": [json.dumps(run).strip("[]").encode() for run in runs],
        "compact JSON": [json.dumps(run, separators=(",", ":")).strip("[]").encode() for run in runs],
        "words": [" ".join(map(str, run)).encode() for run in runs],
    }


def forms_of_digests(kind: str, digests: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Return digests as bytes and in hexadecimal."""
    given = list(digests)
    return {kind: given, f"{kind}, hex": [it.hex().encode() for it in given]}


def journal_names(keys: Iterable[bytes], root: bytes) -> list[bytes]:
    """Return a journal's names for the chunks of the first KV group."""
    return [blake2b(it, key=root, digest_size=NAME_BYTES, salt=bytes(8)).hexdigest().encode() for it in keys]


def contents(folder: Path, *but: Path) -> bytes:
    """Return names and bytes of all files below a folder, except those below `but`."""
    paths = [path for path in sorted(folder.rglob("*")) if not any(path.is_relative_to(it) for it in but)]
    return b"\n".join(str(path).encode() + b"\n" + (path.read_bytes() if path.is_file() else b"") for path in paths)


def left(forms: Mapping[str, Iterable[bytes]], places: Mapping[str, bytes]) -> dict[str, set[str]]:
    """Return for each place the kinds of forms found there. A place without any is left out."""
    found = {
        place: {kind for kind, each in forms.items() if any(form in content for form in each)}
        for place, content in places.items()
    }
    return {place: kinds for place, kinds in found.items() if kinds}
