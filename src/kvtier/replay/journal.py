"""Outcomes of replays in a file of JSON lines, so that a run that was broken off goes on where it stood."""

import json
import os
from collections.abc import Callable, Hashable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import xxhash

from kvtier import __version__
from kvtier.errors import ConfigError
from kvtier.trace.arrays import TraceArrays

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OutcomeT = TypeVar("OutcomeT", bound="DataclassInstance")
FILE_BYTES_MAX = 1 << 28
_HASH_STEP = 1 << 22


class Journal(Generic[OutcomeT]):
    """What is done of the replays of one trace.

    Args:
        path: the file; made when the first outcome is there.
        packed: the trace; outcomes of others in the same file are left alone, as are those of other versions of kvtier.
        read: an outcome from what `asdict` made of it.

    Raises:
        ConfigError: the file cannot be read or is no journal.
    """

    def __init__(self, path: Path, packed: TraceArrays, read: Callable[[dict[str, Any]], OutcomeT]) -> None:
        self._path = path
        self._trace = _digest(packed)
        self._done: dict[str, OutcomeT] = {}
        try:
            if path.exists() and path.stat().st_size > FILE_BYTES_MAX:
                raise ConfigError(f"--keep {str(path)!r} is longer than {FILE_BYTES_MAX} bytes; allowed: at most that")
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--keep {str(path)!r} cannot be read: {error}") from error
        lines = text.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            if not line.endswith("\n") and number == len(lines):
                break  # cut short when the run was broken off: that replay is done again
            try:
                entry: dict[str, Any] = json.loads(line)
                if entry["trace"] == self._trace:
                    self._done[entry["task"]] = read(_checked(entry))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(
                    f"--keep {str(path)!r}, line {number}: not made by `kvtier replay`: {error}"
                ) from error
        self._whole_bytes = len("".join(it for it in lines if it.endswith("\n")).encode())
        self._is_cut = bool(lines) and not lines[-1].endswith("\n")

    def find(self, task: Hashable) -> OutcomeT | None:
        """The outcome of `task`, a plain value whose text says all that it depends on."""
        return self._done.get(repr(task))

    def add(self, task: Hashable, outcome: OutcomeT) -> None:
        """Keep one.

        Raises:
            ConfigError: the file cannot be written.
        """
        told = asdict(outcome)
        checksum = _checksum(repr(task), told)
        line = json.dumps({"trace": self._trace, "task": repr(task), "checksum": checksum, "outcome": told})
        try:
            if self._is_cut:
                os.truncate(self._path, self._whole_bytes)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(f"{line}\n")
        except OSError as error:
            raise ConfigError(f"--keep {str(self._path)!r} cannot be written: {error.strerror or error}") from error
        self._is_cut = False


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """The outcome that `entry` holds.

    Raises:
        ValueError: its bytes are not those that were written.
    """
    if entry["checksum"] != _checksum(entry["task"], entry["outcome"]):
        raise ValueError("its checksum is another")
    return entry["outcome"]


def _checksum(task: str, outcome: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps([task, outcome]).encode())


def _digest(packed: TraceArrays) -> str:
    hasher = xxhash.xxh3_128(repr((packed.block_tokens, __version__)).encode())
    for column in (packed.ids, packed.starts, packed.time_s, packed.input_tokens, packed.session):
        for start in range(0, len(column), _HASH_STEP):
            hasher.update(column[start : start + _HASH_STEP].tobytes())
    return hasher.hexdigest()
