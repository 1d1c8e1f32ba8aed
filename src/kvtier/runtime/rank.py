"""One rank: its tiers, its arena and its mover."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvtier.codec.frame import frame_bytes
from kvtier.codec.registry import by_name
from kvtier.config.sections import Config, DirectoryConfig, DiskConfig
from kvtier.device.copier import Copier
from kvtier.errors import ConfigError, KvError
from kvtier.layout import KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import Arena, PageLock, slots_for
from kvtier.runtime.deferred_tier import DeferredAheadTier, DeferredTier
from kvtier.runtime.mover import Mover, Threads
from kvtier.tier.base import Tier
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.disk import DiskTier
from kvtier.tier.disk_marker import ALLOWED_RANKS, refuse_foreign_ranks
from kvtier.tier.safe_open import check_private, make_root
from kvtier.tier.store_root import opening

logger = logging.getLogger(__name__)

COPY_THREADS = 2
"""Default number of threads for gather and scatter."""

TIERS_DEADLINE_S_MIN = 1.0
"""Closing leaves tiers at least this long to write their index, even if the flush used up the deadline."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank owns. Its session is in this or another process."""

    number: int
    ranks: int
    slots: tuple[int, ...]
    """Slots of each group, the same on every rank."""
    mover: Mover
    tiers: tuple[str, ...]
    """Names of the tiers. Only the mover's threads call the tiers."""
    down: tuple[str, ...]
    """Names of tiers that are not open yet."""
    close_tiers: Callable[[float], None]
    """Closes the tiers in threads of their own; waits up to the given seconds."""
    arena: Arena

    def close(self, deadline_s: float) -> None:
        """End the threads, close the tiers and release the memory, in about `deadline_s` seconds. Idempotent."""
        until_s = time.monotonic() + deadline_s
        self.mover.close(deadline_s)
        self.close_tiers(max(TIERS_DEADLINE_S_MIN, until_s - time.monotonic()))
        self.arena.close()


def open_rank(
    config: Config,
    layout: KvLayout,
    fingerprint_digest: bytes,
    copier: Copier,
    *,
    rank: int = 0,
    ranks: int = 1,
    page_lock: PageLock | None = None,
    copy_threads: int = COPY_THREADS,
) -> Rank:
    """Open the tiers of `config`, allocate host memory and start the mover's threads.

    Args:
        config: the settings, the same on every rank; `host.capacity_bytes` is divided among the ranks.
        layout: this rank's KV groups.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`, the same on every rank.
        copier: copies between this rank's blocks and host slots.
        rank: number of this rank, from 0.
        ranks: number of ranks.
        page_lock: page-locks host memory for a device.
        copy_threads: threads for gather and scatter.

    Raises:
        ConfigError: a setting is wrong, or a path cannot be used. Nothing stays open.
        TierError: a required tier cannot be opened. Other tiers may open later.
        RuntimeError: the system cannot start a thread.
    """
    slots = slots_for(layout, config.host.capacity_bytes, ranks)
    codec = by_name(config.store.codec)
    deadline_s, retry_s = config.limits.open_deadline_s, config.limits.tier_retry_s
    tiers: dict[str, Tier] = {}
    try:
        if config.directory.path is not None:
            directory = DeferredTier("directory", partial(_directory, config.directory), retry_s)
            tiers["directory"] = directory.opened(deadline_s, is_required=config.directory.required)
        if config.disk.path is not None:
            disk = DeferredAheadTier("disk", partial(_disk, config.disk, layout, rank, ranks), retry_s)
            tiers["disk"] = disk.opened(deadline_s, is_required=config.disk.required)
        arena = Arena(layout, slots, populate=config.host.populate, page_lock=page_lock)
        mover = Mover(
            layout=layout.on_rank(rank, ranks),
            fingerprint=fingerprint_digest,
            arena=arena,
            copier=copier,
            tiers=tiers,
            common={"directory"} if config.directory.shared else (),
            codec=codec,
            threads=_threads(config, copy_threads),
        )
    except BaseException:
        close_tiers(tiers, 5.0)
        raise
    down = tuple(name for name, tier in tiers.items() if isinstance(tier, DeferredTier) and not tier.is_open)
    return Rank(rank, ranks, slots, mover, tuple(tiers), down, partial(close_tiers, tiers), arena)


def close_tiers(tiers: dict[str, Tier], deadline_s: float) -> None:
    """Close all tiers, each in a thread of its own, and wait up to `deadline_s` seconds."""

    def close(name: str, tier: Tier) -> None:
        try:
            tier.close()
        except (KvError, OSError) as error:
            logger.warning("tier %s: closing failed: %s", name, error)

    closers = [
        threading.Thread(target=close, args=item, name=f"kvtier-close-{item[0]}", daemon=True) for item in tiers.items()
    ]
    for closer in closers:
        closer.start()
    until_s = time.monotonic() + deadline_s
    for closer in closers:
        closer.join(max(0.0, until_s - time.monotonic()))


def _directory(config: DirectoryConfig) -> DirectoryTier:
    assert config.path is not None
    return DirectoryTier(
        config.path,
        capacity_bytes=config.capacity_bytes,
        direct_io=config.direct_io,
        shared=config.shared,
        evictor=make_evictor(config.evictor),
    )


def _disk(config: DiskConfig, layout: KvLayout, rank: int, ranks: int) -> DiskTier:
    """This rank's disk tier. Each rank has a store of its own, so that ranks share no lock."""
    assert config.path is not None
    with opening("disk", config.path, ALLOWED_RANKS):
        refuse_foreign_ranks(config.path)
        make_root(config.path)
        check_private("disk", config.path)
    tier = DiskTier(
        config.path / f"rank-{rank}",
        capacity_bytes=config.capacity_bytes // ranks,
        direct_io=config.direct_io,
        reserve_bytes=config.reserve_bytes,
        sync_interval_s=config.sync_interval_s,
        write_bytes_per_day=config.write_bytes_per_day,
    )
    largest = max(frame_bytes(group) for group in layout.groups)
    if largest > tier.frame_bytes_max:
        tier.close()
        raise ConfigError(
            f"disk.capacity_bytes = {config.capacity_bytes} is too small: a chunk of {layout.chunk_tokens} tokens of "
            f"this model takes {largest} bytes, and a segment for each of {ranks} ranks has {tier.frame_bytes_max}"
        )
    return tier


def _threads(config: Config, copy_threads: int) -> Threads:
    """Threads of each tier's queues: the largest setting of all tiers."""
    wanted = [tier for tier in (config.directory, config.disk) if tier.path is not None] or [config.directory]
    return Threads(
        device=copy_threads,
        read=max(tier.read_threads for tier in wanted),
        write=max(tier.write_threads for tier in wanted),
    )
