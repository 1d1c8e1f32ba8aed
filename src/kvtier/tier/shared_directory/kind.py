"""The kind `shared_directory`: its settings and checks, and how it opens."""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import ChoiceKind, Location, Size
from kvtier.errors import ConfigError
from kvtier.tier.base import Tier
from kvtier.tier.files.directory_marker import SHARED_VERSION, find_marker, layout_of, read_marker, repair_marker
from kvtier.tier.files.path_checks import FileTierSettings, nearest_existing, store_problems
from kvtier.tier.files.raw_client import RawFiles
from kvtier.tier.registry import Problem, TierContext, TierKind
from kvtier.tier.store_view import ScannedTier, StoreView

_TRIAL_ID = bytes(16)
TRIAL_WAIT_S = 60.0
"""Longest wait for room. An engine waits less; a measurement on a busy machine should be slow, not impossible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDirectorySettings(FileTierSettings):
    """The shared directory tier: a file per object, on a network file system that several nodes mount."""

    kind: ClassVar[str] = "shared_directory"

    path: Path = needed(Location(is_needed=True), "Directory of the store, the same for all nodes.")
    capacity_bytes: int = setting(2**40, Size(2**20), "Maximum bytes of the store, of all nodes and models together.")
    direct_io: Literal["auto", "on", "off"] = setting(
        "off",
        ChoiceKind(("auto", "on", "off")),
        "Bypass the page cache; auto: if the file system allows it. Writes through ceph-fuse are slower with it.",
    )


def _open(settings: SharedDirectorySettings, context: TierContext) -> Tier:
    from kvtier.tier.shared_directory.tier import SharedDirectoryTier

    return SharedDirectoryTier(
        settings.path,
        key_id=context.shared_key_id(settings.name),
        model=context.model,
        name=settings.name,
        capacity_bytes=settings.capacity_bytes,
        direct_io=settings.direct_io,
        any_owner=settings.any_owner,
    )


def _open_trial(settings: SharedDirectorySettings, place: Path, capacity_bytes: int, _object_bytes: int) -> Tier:
    from kvtier.tier.shared_directory.tier import SharedDirectoryTier

    return SharedDirectoryTier(
        place,
        key_id=_TRIAL_ID,
        model=_TRIAL_ID,
        name=settings.name,
        # Sweeps leave part of the cap free.
        capacity_bytes=2 * capacity_bytes,
        direct_io=settings.direct_io,
        wait_s=TRIAL_WAIT_S,
    )


def _check(settings: SharedDirectorySettings) -> Iterator[Problem]:
    from kvtier.tier.shared_directory.tier import is_on_drive

    problems = list(
        store_problems(
            settings.path,
            settings.capacity_bytes,
            lambda path: find_marker(path, SHARED_VERSION) is not None,
            any_owner=settings.any_owner,
        )
    )
    nearest = nearest_existing(settings.path)
    if not any(problem.level == "error" for problem in problems) and is_on_drive(nearest):
        yield Problem("warning", "path", f"{nearest} is on a drive of this machine: is the file system mounted?")
    yield from problems


def _inspect(settings: SharedDirectorySettings) -> Sequence[StoreView]:
    """Return a view for each secret and model in the store. Opening these tiers writes nothing."""
    from kvtier.tier.shared_directory.sweep import stored_roots
    from kvtier.tier.shared_directory.tier import SharedDirectoryTier

    if read_marker(settings.path, SHARED_VERSION) is None:
        raise ConfigError(f"{settings.path} is not the root of a {settings.kind} store")
    return [
        ScannedTier(
            SharedDirectoryTier(
                settings.path,
                key_id=bytes.fromhex(key_id),
                model=bytes.fromhex(model),
                name=settings.name,
                capacity_bytes=settings.capacity_bytes,
                direct_io="off",
                any_owner=True,  # an operator inspects the store of an engine that another user runs
            ),
            f"{settings.path}/{key_id}/{model}",
            model,
        )
        for key_id, model in stored_roots(str(settings.path))
    ]


KIND = TierKind(
    name="shared_directory",
    help="A file per object in a directory that several nodes share.",
    settings=SharedDirectorySettings,
    where="path",
    open=_open,
    keeps_memory=False,
    is_remote=True,
    is_shared=lambda _settings: True,
    check=_check,
    folder=lambda settings: settings.path,
    inspect=_inspect,
    repair=lambda it: repair_marker(it.path, SHARED_VERSION) if layout_of(it.path) == SHARED_VERSION else None,
    open_trial=_open_trial,
    raw=lambda settings, _context: RawFiles(settings.path, direct=settings.direct_io == "on", syncs=True),
)
