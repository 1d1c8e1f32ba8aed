"""What earlier calls of the demo left in a directory: namespaces, and which prefixes each holds.

It lets a later call restore what an earlier one stored, and count independently how much that should be. A missing,
damaged or foreign file means that nothing is known of an earlier call, no more.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier.tier.marker import MARKER_NAME

FILE_NAME = "demo.json"
VERSION = 1
ENTRIES_MAX = 8
"""Older entries are forgotten here; their chunks stay until the store needs the room."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One call's namespace."""

    namespace: str
    identity: str
    """Model, tokenizer and store: only a call with the same can use this one's KV."""
    chunk_tokens: int
    digests: tuple[str, ...]
    """The stored prefixes, as `StoredPrefixes` knows them."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The calls that are known, latest last."""

    entries: tuple[Entry, ...] = ()

    def latest(self, identity: str) -> Entry | None:
        """The latest call with that identity."""
        return next((entry for entry in reversed(self.entries) if entry.identity == identity), None)

    def with_entry(self, entry: Entry) -> "Ledger":
        """This ledger and `entry`, which takes the place of one with the same namespace."""
        others = [it for it in self.entries if it.namespace != entry.namespace]
        return Ledger(tuple([*others, entry][-ENTRIES_MAX:]))

    def write(self, directory: Path) -> None:
        """Write the ledger into `directory`, whole or not at all."""
        draft = directory / f".{FILE_NAME}.{os.getpid()}"
        draft.write_text(json.dumps({"version": VERSION, **asdict(self)}), encoding="utf-8")
        draft.chmod(0o600)
        draft.replace(directory / FILE_NAME)


def read_ledger(directory: Path) -> Ledger:
    """The ledger in `directory`; an empty one when there is none that can be read."""
    try:
        plain: Any = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
        if plain["version"] != VERSION:
            return Ledger()
        entries: list[dict[str, Any]] = plain["entries"]
        for entry in entries:
            entry["digests"] = tuple(entry["digests"])
        return Ledger(tuple(Entry(**entry) for entry in entries))
    except (OSError, ValueError, KeyError, TypeError):
        return Ledger()


def forget_without_store(directory: Path) -> None:
    """Remove the ledger of a store that is gone: `kvtier inspect purge` leaves files that are not the store's."""
    ledger = directory / FILE_NAME
    if ledger.is_file() and not (directory / MARKER_NAME).exists() and read_ledger(directory).entries:
        ledger.unlink()
