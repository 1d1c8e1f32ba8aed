"""The kind `disk`: its settings and checks, and how it opens."""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import ChoiceKind, Location, Seconds, Size
from kvtier.errors import ConfigError, DamagedStoreError
from kvtier.layout import ALIGNMENT
from kvtier.tier.base import Tier
from kvtier.tier.files.path_checks import FileTierSettings, store_problems
from kvtier.tier.files.raw_client import RawSegment
from kvtier.tier.files.safe_open import check_private, make_root
from kvtier.tier.files.store_root import RANK, command, mend_secret, opening
from kvtier.tier.registry import Problem, TierContext, TierKind
from kvtier.tier.store_view import StoreView

TRIAL_LOCK_DEADLINE_S = 60.0
"""Longest wait for a lock. An engine waits less; a measurement on a busy machine should be slow, not impossible."""

TRIAL_SEGMENTS = 3
"""Segments that a trial has beyond its capacity, so that no object is evicted: one is kept empty, and eviction frees
whole segments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSettings(FileTierSettings):
    """The disk tier: preallocated segments on a local drive, for one engine."""

    kind: ClassVar[str] = "disk"

    path: Path = needed(Location(is_needed=True), "Directory of the segments, on a local drive.")
    capacity_bytes: int = setting(64 * 2**30, Size(2**20), "Maximum bytes on the drive, shared by all ranks.")
    direct_io: Literal["auto", "on", "off"] = setting(
        "auto", ChoiceKind(("auto", "on", "off")), "Bypass the page cache; auto: if the file system allows it."
    )
    reserve_bytes: int = setting(2**30, Size(0), "Free space of the file system that kvtier does not use.")
    sync_interval_s: float = setting(
        1.0, Seconds(1e-2, 3600), "Interval between syncs; a crash loses the writes since the last."
    )
    write_bytes_per_day: int = setting(
        0, Size(0), "Write budget per rank and day, from the drive's endurance; 0: no limit."
    )


def _open(settings: DiskSettings, context: TierContext) -> Tier:
    """Open the rank's disk tier. Each rank has its own store, so that ranks share no lock."""
    from kvtier.codec.frame import frame_bytes
    from kvtier.tier.disk.format import SEGMENT_BYTES_MIN, segment_bytes_for
    from kvtier.tier.disk.marker import ALLOWED_RANKS, refuse_foreign_ranks
    from kvtier.tier.disk.tier import DiskTier

    name, ranks = settings.name, context.ranks
    with opening(name, settings.path, ALLOWED_RANKS):
        refuse_foreign_ranks(settings.path)
        make_root(settings.path)
        check_private(name, settings.path, any_owner=settings.any_owner)
    tier = DiskTier(
        settings.path / f"rank-{context.rank}",
        name=name,
        capacity_bytes=settings.capacity_bytes // ranks,
        direct_io=settings.direct_io,
        reserve_bytes=settings.reserve_bytes,
        sync_interval_s=settings.sync_interval_s,
        write_bytes_per_day=settings.write_bytes_per_day,
        any_owner=settings.any_owner,
    )
    largest = max(frame_bytes(group) for group in context.layout.groups)
    if largest > tier.frame_bytes_max:
        tier.close()
        if largest <= segment_bytes_for(settings.capacity_bytes // ranks) - (SEGMENT_BYTES_MIN - ALIGNMENT):
            raise DamagedStoreError(
                name,
                f"a chunk takes {largest} bytes, but {tier.root} has segments for a smaller model or cap, with "
                f"room for {tier.frame_bytes_max} bytes; to start with larger ones: {command('purge', tier.root)}",
            )
        raise ConfigError(
            f"is too small: a chunk of {context.layout.chunk_tokens} tokens of this model takes {largest} bytes, but "
            f"with {ranks} ranks, a segment has room for {tier.frame_bytes_max} bytes",
            setting=f"{settings.label}.capacity_bytes",
            value=str(settings.capacity_bytes),
        )
    return tier


def _open_trial(settings: DiskSettings, place: Path, capacity_bytes: int, object_bytes: int) -> Tier:
    from kvtier.tier.disk.format import SEGMENT_BYTES_MIN
    from kvtier.tier.disk.tier import DiskTier

    share = min(64 << 20, capacity_bytes // TRIAL_SEGMENTS)
    segment_bytes = max(share, SEGMENT_BYTES_MIN + 2 * object_bytes) // ALIGNMENT * ALIGNMENT
    return DiskTier(
        place,
        name=settings.name,
        capacity_bytes=capacity_bytes + TRIAL_SEGMENTS * segment_bytes,
        segment_bytes=segment_bytes,
        direct_io=settings.direct_io,
        lock_deadline_s=TRIAL_LOCK_DEADLINE_S,
    )


def _check(settings: DiskSettings) -> Iterator[Problem]:
    def is_store(path: Path) -> bool:
        from kvtier.tier.disk.marker import find_marker, refuse_foreign_ranks

        refuse_foreign_ranks(path)
        found = [find_marker(root) for root in path.glob("rank-*")]  # any of them may be damaged
        return any(found)

    return store_problems(
        settings.path, settings.capacity_bytes, is_store, settings.reserve_bytes, any_owner=settings.any_owner
    )


def _repaired(root: Path) -> list[str] | None:
    """Repair the store at `root`, or all ranks' stores below it; return None if there are none."""
    from kvtier.tier.disk.marker import holds_store, repair_marker

    stores = [it for it in (root, *sorted(root.glob("rank-*"))) if holds_store(it)]
    if not stores:
        return None
    done = [line for store in stores for line in repair_marker(store)]
    return done + mend_secret((root.parent if RANK.fullmatch(root.name) else root) / "secret")


def _views(settings: DiskSettings) -> Sequence[StoreView]:
    roots = sorted(settings.path.glob("rank-*"))
    return [view for view in map(_view_at, roots) if view is not None]


def _view_at(root: Path) -> StoreView | None:
    from kvtier.tier.disk.view import view_at

    return view_at(root)


KIND = TierKind(
    name="disk",
    help="Preallocated segments on a local drive, for one engine.",
    settings=DiskSettings,
    where="path",
    open=_open,
    keeps_memory=False,
    needs_drive=True,
    check=_check,
    folder=lambda settings: settings.path,
    secret_path=lambda settings: settings.path / "secret",
    open_trial=_open_trial,
    raw=lambda settings, _context: RawSegment(settings.path, direct=settings.direct_io != "off"),
    inspect=_views,
    view_at=_view_at,
    repair=lambda settings: _repaired(settings.path),
)
