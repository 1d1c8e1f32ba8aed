"""An example of a tier from another package, in one file. Copy it to start your own."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from kvtier.config.schema import needed, other_default, setting
from kvtier.config.value_types import Location, Size, Switch
from kvtier.errors import TierError
from kvtier.tier.base import About, Figures, OneByOneTier
from kvtier.tier.registry import Problem, TierContext, TierKind, TierSettings
from kvtier.types import ObjectName


class Shelf(OneByOneTier):
    """A tier with a file per object, which evicts the oldest objects first."""

    def __init__(self, root: Path, capacity_bytes: int, name: str = "shelf") -> None:
        super().__init__(name)
        self._root, self._capacity_bytes = root, capacity_bytes
        self._lock = threading.Lock()
        self._is_closed = False
        self._evictions = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = sorted(root.glob("*.kv"), key=lambda path: path.stat().st_mtime_ns)
        self._sizes = {ObjectName(bytes.fromhex(path.stem)): path.stat().st_size for path in found}

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """Return whether the tier has each name, in order."""
        with self._lock:
            self._check_open()
            return [name in self._sizes for name in names]

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """Read one frame from `offset` into `into`. Return None if it is absent."""
        with self._lock:
            self._check_open()
            if name not in self._sizes:
                return None
            part = self._path(name).read_bytes()[offset : offset + into.nbytes]
        into.cast("B")[: len(part)] = part
        return len(part)

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:  # noqa: ARG002 - of the interface
        """Write one whole frame. Evict the oldest objects until it fits."""
        with self._lock:
            self._check_open()
            if name in self._sizes:
                return True
            if frame.nbytes > self._capacity_bytes:
                return False
            while sum(self._sizes.values()) + frame.nbytes > self._capacity_bytes:
                self._forget(next(iter(self._sizes)))
                self._evictions += 1
            draft = self._path(name).with_suffix(".draft")
            draft.write_bytes(frame)
            draft.rename(self._path(name))
            self._sizes[name] = frame.nbytes
            return True

    def delete(self, name: ObjectName) -> None:
        """Delete `name` if it exists."""
        with self._lock:
            self._check_open()
            if name in self._sizes:
                self._forget(name)

    def scan(self) -> Iterator[tuple[ObjectName, int]]:
        """Return every name with the size of its frame in bytes."""
        with self._lock:
            self._check_open()
            return iter(list(self._sizes.items()))

    def figures(self) -> Figures:
        """Return bytes used, capacity and evictions."""
        return Figures(sum(self._sizes.values()), self._capacity_bytes, self._evictions)

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierError(self.name, "is closed")

    def _forget(self, name: ObjectName) -> None:
        self._path(name).unlink(missing_ok=True)
        del self._sizes[name]

    def _path(self, name: ObjectName) -> Path:
        return self._root / f"{name.hex()}.kv"


# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfSettings(TierSettings):
    """Settings of a shelf."""

    kind: ClassVar[str] = "shelf"

    path: Path = needed(Location(is_needed=True), "Directory of the files.")
    capacity_bytes: int = setting(1 << 30, Size(4096), "Maximum bytes of all files.")
    public: bool = setting(default=False, kind=Switch(), help="Other nodes use it, too.")
    read_threads: int = other_default(TierSettings, "read_threads", 2)


def _open(settings: ShelfSettings, context: TierContext) -> Shelf:
    if settings.public and context.key_id is None:
        raise AssertionError("a shared tier is opened without a key id")
    return Shelf(settings.path / f"rank-{context.rank}", settings.capacity_bytes, settings.name)


def _check(settings: ShelfSettings) -> Iterator[Problem]:
    if settings.path.is_file():
        yield Problem("error", "path", "is a file")
    if not os.access(settings.path.parent, os.W_OK):
        yield Problem("warning", "path", "its parent directory is not writable")


KIND = TierKind(
    name="shelf",
    help="A file per object, the oldest evicted first.",
    settings=ShelfSettings,
    where="path",
    open=_open,
    is_shared=lambda settings: settings.public,
    check=_check,
    folder=lambda settings: settings.path,
    secret_path=lambda settings: None if settings.public else settings.path / "secret",
    open_trial=lambda settings, place, capacity_bytes, _object_bytes: Shelf(place, capacity_bytes, settings.name),
)
