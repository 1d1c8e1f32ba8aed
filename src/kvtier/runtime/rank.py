"""Opens one rank: its tiers, its arena and its mover."""

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvtier.config.sections import Config
from kvtier.device.copier import Copier
from kvtier.errors import (
    ConfigError,
    DamagedStoreError,
    KvError,
    TierError,
    UnusablePathError,
    check_interface,
    described,
)
from kvtier.keys.key_source import KeySource
from kvtier.keys.secret import Secret, key_id, model_id
from kvtier.layout import KvLayout
from kvtier.runtime.arena import Arena, Bytes, PageLock, chunk_bytes, slots_for
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.deferred_tier import DeferredTier
from kvtier.runtime.mover import Mover, Threads
from kvtier.runtime.observers.guards import ends_by_itself
from kvtier.runtime.rank_group import in_threads
from kvtier.runtime.store_secret import found_secret
from kvtier.runtime.tier_encoding import closing_keys, forms_of, in_class, open_key_source
from kvtier.tier.base import Tier
from kvtier.tier.registry import TierContext, TierSettings, is_sealed, kind_of

logger = logging.getLogger(__name__)

FIRST_CONTACT_S = 0.2
"""Nodes that start together open a shared store at random times within this period."""

COPY_THREADS = 2
"""Default number of threads for gather and scatter."""

TIERS_DEADLINE_S_MIN = 1.0
"""Minimum time for closing tiers to write their index, even if the flush has used up the deadline."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The objects that one rank owns. The session may be in this process or in another."""

    number: int
    ranks: int
    slots: tuple[int, ...]
    """Number of slots of each group, equal on every rank."""
    mover: Mover
    tiers: tuple[str, ...]
    """Names of the tiers. Only the mover's threads call the tiers themselves."""
    remote: tuple[str, ...]
    """Names of tiers that one rank probes for all ranks (`RankGroup`)."""
    down: tuple[str, ...]
    """Names of tiers that are not open yet."""
    close_tiers: Callable[[float], None]
    """Closes each tier in its own thread, and waits up to the given seconds."""
    arena: Arena
    layout: KvLayout
    """The layout, with this rank's part of each KV group."""
    keys: KeySource | None = None
    """The keys of seals."""
    found: tuple[Secret | None, str] = (None, "")
    """The result of `found_secret`."""

    @property
    def counted(self) -> KvLayout:
        """The layout for figures of the whole engine, in which a copy with its own slots counts like the original."""
        held = enumerate(self.layout.groups)
        return self.layout.with_parts(
            (it.part, it.copy if number in self.arena.filled_elsewhere else 0) for number, it in held
        )

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
    engine_chunk_bytes: int = 0,
    shared: Mapping[int, Bytes] = MappingProxyType({}),
    page_lock: PageLock | None = None,
    copy_threads: int = COPY_THREADS,
) -> Rank:
    """Allocate host memory, open the tiers of `config` and start the mover's threads.

    Args:
        config: the settings, the same on every rank; `host.capacity_bytes` is divided among the ranks.
        layout: this rank's KV groups, of the class `store.loss` or of none.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`, the same on every rank.
        copier: copies between this rank's blocks and host slots.
        rank: number of this rank, from 0.
        ranks: number of ranks.
        engine_chunk_bytes: total host bytes of one chunk on all ranks, the same on every rank; 0 if every rank has
            as many as this one.
        shared: memory that this rank shares with others, by KV group (`shared_memory`).
        page_lock: page-locks host memory for a device.
        copy_threads: threads for gather and scatter.

    Raises:
        ConfigError: a setting is wrong, or the copier is for another release of kvtier. Nothing stays open.
        TierError: a required tier cannot be opened. Other tiers may open later.
        RuntimeError: the system cannot start a thread.
    """
    check_interface(copier, Copier, f"the engine's copier {type(copier).__module__}.{type(copier).__qualname__}")
    layout, fingerprint_digest = in_class(config, layout.on_rank(rank, ranks), fingerprint_digest)
    slots = slots_for(layout, config.host.capacity_bytes, engine_chunk_bytes or chunk_bytes(layout) * ranks)
    arena = Arena(layout, slots, populate=config.host.populate, page_lock=page_lock, shared=shared)
    tiers: dict[str, Tier] = {}
    keys = None
    try:
        secret, flaw = found_secret(config)
        keys = open_key_source(config, secret)
        forms = forms_of(config, keys)
        tiers |= open_tiers(config, layout, fingerprint_digest, secret, flaw, arena.memory, rank=rank, ranks=ranks)
        mover = Mover(
            CommandRunner(
                layout=layout,
                model=model_id(secret, fingerprint_digest),
                arena=arena,
                copier=copier,
                tiers=tiers,
                common=common_tiers(config),
                forms=forms,
                writes_all=config.store.write_policy == "through",
            ),
            threads=Threads(device=copy_threads),
            tier_threads=threads_of_tiers(config),
        )
    except BaseException:
        closing_keys(partial(close_tiers, tiers), keys)(5.0)
        arena.close()
        raise
    close = closing_keys(partial(close_tiers, tiers), keys)
    down = tiers_down(tiers)
    remote = tuple(it.name for it in config.tiers if kind_of(it).is_remote or kind_of(it).is_shared(it))
    return Rank(rank, ranks, slots, mover, tuple(tiers), remote, down, close, arena, layout, keys, (secret, flaw))


def open_tiers(
    config: Config,
    layout: KvLayout,
    fingerprint_digest: bytes,
    secret: Secret | None,
    flaw: str,
    memory: tuple[memoryview, ...],
    *,
    rank: int,
    ranks: int,
) -> dict[str, Tier]:
    """Open the tiers of one rank. Return them by name, in the order of the settings.

    A tier that fails or hangs may open later. `secret` and `flaw` come from `found_secret`. If there is a flaw, no tier
    opens. Most objects are read into `memory` and written from it.

    Raises:
        ConfigError: a setting is wrong. Nothing stays open.
        TierError: a required tier cannot be opened.
    """
    context = TierContext(
        layout=layout,
        rank=rank,
        ranks=ranks,
        model=model_id(secret, fingerprint_digest),
        key_id=None if secret is None else key_id(secret),
        memory=memory,
    )
    tiers: dict[str, Tier] = {}
    try:
        # All tiers open at the same time, so that a tier that hangs does not delay the others.
        opening = [(it, _deferred(it, replace(context, is_sealed=is_sealed(it)), flaw)) for it in config.tiers]
        tiers |= {tier.name: deferred for tier, deferred in opening}
        began_s, deadline_s = time.monotonic(), config.limits.open_deadline_s
        for tier, deferred in opening:
            waited_s = time.monotonic() - began_s
            tiers[tier.name] = deferred.opened(
                deadline_s, is_required=tier.required, waited_s=waited_s, is_final=bool(flaw)
            )
    except BaseException:
        close_tiers(tiers, 5.0)
        raise
    return tiers


def tiers_down(tiers: Mapping[str, Tier]) -> tuple[str, ...]:
    """Return the names of the tiers that are not yet open."""
    return tuple(name for name, tier in tiers.items() if isinstance(tier, DeferredTier) and not tier.is_open)


def common_tiers(config: Config) -> set[str]:
    """Return the names of tiers in which all ranks of the engine use one store."""
    return {it.name for it in config.tiers if kind_of(it).is_common(it) or kind_of(it).is_shared(it)}


def tiers_of_one_cap(config: Config) -> set[str]:
    """Return the names of tiers for which every rank reports the fill level of the whole store."""
    return {it.name for it in config.tiers if kind_of(it).has_one_cap or kind_of(it).is_shared(it)}


def threads_of_tiers(config: Config) -> dict[str, Threads]:
    """Return the number of threads of each queue, by tier."""
    return {it.name: Threads(read=it.read_threads, write=it.write_threads) for it in config.tiers}


def close_tiers(tiers: dict[str, Tier], deadline_s: float) -> None:
    """Close each tier in its own thread, and wait up to `deadline_s` seconds."""

    def close(name: str, tier: Tier) -> None:
        try:
            tier.close()
        except (KvError, OSError) as error:
            logger.warning("tier %s: closing failed: %s", name, error)

    in_threads({f"kvtier-close-{name}": partial(close, name, tier) for name, tier in tiers.items()}, deadline_s)


def _deferred(tier: TierSettings, context: TierContext, flaw: str) -> DeferredTier:
    """Return a tier that opens in its own thread. It never opens if the secret has a `flaw`."""
    kind = kind_of(tier)

    def make() -> Tier:
        if flaw:
            raise DamagedStoreError(tier.name, flaw)
        if kind.is_shared(tier):
            time.sleep(random.uniform(0, FIRST_CONTACT_S))  # noqa: S311 - jitter
        try:
            return kind.open(tier, context)
        except UnusablePathError as error:
            raise DamagedStoreError(tier.name, str(error).removeprefix(f"tier {tier.name!r}: ")) from error
        except BaseException as error:  # a tier of another package must not end the engine
            if isinstance(error, ConfigError | TierError) or (
                isinstance(error, RuntimeError) and ends_by_itself(error)
            ):
                raise
            raise TierError(tier.name, f"cannot be opened: {described(error)}") from error

    return DeferredTier(tier.name, make, tier.retry_s)
