"""The kind `directory`: its settings and checks, and how it opens."""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import ChoiceKind, Location, Size, Switch
from kvtier.policy.registry import DEFAULT_EVICTOR, evictor_names, make_evictor
from kvtier.tier.base import Tier
from kvtier.tier.files.directory_marker import STORE_VERSION, find_marker, layout_of, repair_marker
from kvtier.tier.files.path_checks import FileTierSettings, store_problems
from kvtier.tier.files.raw_client import RawFiles
from kvtier.tier.files.store_root import mend_secret
from kvtier.tier.registry import Problem, TierContext, TierKind
from kvtier.tier.store_view import StoreView

TRIAL_LOCK_DEADLINE_S = 60.0
"""Longest wait for a lock. An engine waits less; a measurement on a busy machine should be slow, not impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectorySettings(FileTierSettings):
    """The directory tier: a file per object, on a local disk or a shared file system."""

    kind: ClassVar[str] = "directory"

    path: Path = needed(Location(is_needed=True), "Directory of the store.")
    capacity_bytes: int = setting(64 * 2**30, Size(2**20), "Maximum bytes on disk, shared by all processes.")
    direct_io: Literal["auto", "on", "off"] = setting(
        "auto", ChoiceKind(("auto", "on", "off")), "Bypass the page cache; auto: if the file system allows it."
    )
    evictor: str = setting(DEFAULT_EVICTOR, ChoiceKind(evictor_names), "Eviction policy of the directory.")
    shared: bool = setting(
        default=True,
        kind=Switch(),
        help="Other processes write here, too; false: trust this process's index, so that misses cost no I/O.",
    )


def _open(settings: DirectorySettings, context: TierContext) -> Tier:
    from kvtier.tier.directory.tier import DirectoryTier

    return DirectoryTier(
        settings.path,
        name=settings.name,
        capacity_bytes=settings.capacity_bytes,
        direct_io=settings.direct_io,
        shared=settings.shared,
        evictor=make_evictor(settings.evictor),
        is_sealed=context.is_sealed,
        any_owner=settings.any_owner,
    )


def _open_trial(settings: DirectorySettings, place: Path, capacity_bytes: int, _object_bytes: int) -> Tier:
    from kvtier.tier.directory.tier import DirectoryTier

    return DirectoryTier(
        place,
        name=settings.name,
        capacity_bytes=capacity_bytes,
        direct_io=settings.direct_io,
        shared=False,
        lock_deadline_s=TRIAL_LOCK_DEADLINE_S,
    )


def _check(settings: DirectorySettings) -> Iterator[Problem]:
    return store_problems(
        settings.path,
        settings.capacity_bytes,
        lambda path: find_marker(path, STORE_VERSION) is not None,
        any_owner=settings.any_owner,
    )


def _view(settings: DirectorySettings) -> Sequence[StoreView]:
    from kvtier.tier.directory.view import DirectoryView

    return [DirectoryView(settings.path)]


def _view_at(root: Path) -> StoreView | None:
    from kvtier.tier.directory.view import view_at

    return view_at(root)


def _repaired(root: Path) -> list[str] | None:
    if layout_of(root) != STORE_VERSION:
        return None
    return repair_marker(root, STORE_VERSION) + mend_secret(root / "secret")


KIND = TierKind(
    name="directory",
    help="A file per object in a directory that several processes may share.",
    settings=DirectorySettings,
    where="path",
    open=_open,
    keeps_memory=False,
    is_common=lambda settings: settings.shared,  # otherwise each process trusts its own index
    has_one_cap=True,
    check=_check,
    folder=lambda settings: settings.path,
    secret_path=lambda settings: settings.path / "secret",
    open_trial=_open_trial,
    raw=lambda settings, _context: RawFiles(settings.path, direct=settings.direct_io != "off"),
    inspect=_view,
    view_at=_view_at,
    repair=lambda settings: _repaired(settings.path),
)
