"""Opens a session from settings, with its ranks, secret, core and recorder.

An engine that manages host memory itself has no session. It uses `kvtier.runtime.open_object_store`.
"""

import logging
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.codec.frame_header import EXTRAS_BYTES_MAX
from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules, WritePolicy
from kvtier.core.recall_schedule import Recalls
from kvtier.device.copier import Copier
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import root_key
from kvtier.keys.key_source import KeySource
from kvtier.keys.secret import Secret
from kvtier.layout import KvLayout, largest
from kvtier.observe.metrics import Metrics
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import PageLock
from kvtier.runtime.executor import ChunkTexts
from kvtier.runtime.observers.guards import Feature, Guards, Observer
from kvtier.runtime.observers.journal import Journal
from kvtier.runtime.observers.trace_recorder import Recorder
from kvtier.runtime.observers.transfer_metrics import CommandCounters, Gauges, start_series
from kvtier.runtime.rank import COPY_THREADS, open_rank, tiers_of_one_cap
from kvtier.runtime.rank_group import OpenRanks
from kvtier.runtime.session import Session
from kvtier.runtime.store_secret import found_secret, store_secret
from kvtier.runtime.tier_encoding import closing_keys, in_class, locked_by, open_key_source
from kvtier.tier.registry import TierSettings, is_sealed, kind_of
from kvtier.types import Transfer

logger = logging.getLogger(__name__)

CHUNK_TOKENS_MIN = 256
"""Smallest automatic chunk size. Smaller objects do not saturate a drive."""

RETRY_JITTER = 0.25
"""Random fraction by which a node's pause before a retry of a shared tier varies."""

TEXT_TOKENS_MAX = 4096
"""Largest chunk, in tokens, whose token ids are written. They are sent with each write to every rank."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session, and the objects that an engine adapter uses with it."""

    session: Session
    root: bytes
    """32-byte root of all key chains of this model in this store. Secret."""
    metrics: Metrics
    recorder: Recorder | None = None
    """Records each ended request; None without `trace.path`."""
    journal: Journal | None = None
    """Records a line for each ended request; None without `journal.path`."""


def choose_chunk_tokens(wanted: int, alignment: int) -> int:
    """Choose the chunk size in tokens: `wanted` or, if it is 0, the smallest multiple of `alignment` from 256 up.

    Args:
        wanted: the setting `store.chunk_tokens`.
        alignment: number of tokens to which the engine's hits are aligned, such as its block size.

    Raises:
        ConfigError: `wanted` is not a multiple of `alignment`.
    """
    if wanted == 0:
        return -(-CHUNK_TOKENS_MIN // alignment) * alignment
    if wanted % alignment:
        raise ConfigError(
            "does not fit the engine's blocks",
            setting="store.chunk_tokens",
            value=str(wanted),
            allowed=f"0, or a multiple of {alignment}",
        )
    return wanted


def open_session(
    config: Config,
    layout: KvLayout,
    fingerprint_digest: bytes,
    copier: Copier,
    *,
    page_lock: PageLock | None = None,
    copy_threads: int = COPY_THREADS,
    texts: ChunkTexts | None = None,
) -> OpenedSession:
    """Open a session with one rank in this process, and start its threads.

    Args:
        config: the settings.
        layout: the model's KV groups.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        copier: copies between the engine's blocks and host slots.
        page_lock: page-locks host memory for a device.
        copy_threads: threads for gather and scatter.
        texts: provides the token ids of chunks, as in `open_core`.

    Raises:
        ConfigError: a setting is wrong. Nothing stays open.
        TierError: a required tier cannot be opened.
        RuntimeError: the system cannot start a thread.
    """
    rank = open_rank(config, layout, fingerprint_digest, copier, page_lock=page_lock, copy_threads=copy_threads)
    try:
        ranks = OpenRanks(rank.mover, rank.slots, rank.tiers, frozenset(rank.down), [rank.mover.views])
        return open_core(
            *(config, rank.layout, fingerprint_digest, ranks),
            on_close=rank.close,
            keys=rank.keys,
            found=rank.found,
            texts=texts,
        )
    except BaseException:
        rank.close(5.0)
        raise


def open_core(
    config: Config,
    layout: KvLayout,
    fingerprint_digest: bytes,
    ranks: OpenRanks,
    *,
    on_close: Callable[[float], None] = lambda _seconds: None,
    observer: Observer | None = None,
    publishes: bool = False,
    keys: KeySource | None = None,
    found: tuple[Secret | None, str] | None = None,
    texts: ChunkTexts | None = None,
    layouts: Sequence[KvLayout] = (),
) -> OpenedSession:
    """Open a session over open ranks, in this or other processes, and start its thread.

    Args:
        config: the settings with which the ranks were opened.
        layout: the layout of one rank, of the class `store.loss`.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        ranks: the ranks.
        on_close: called once when the session has ended, with the remaining seconds.
        observer: receives every command and every completion, under the session's lock.
        publishes: whether other engines wait for objects that this engine stores (`Limits.publishes`).
        keys: the keys of a rank in this process. They are read here if this is None and a tier seals.
        found: the result of `found_secret` in a rank of this process. It is called here if this is None.
        texts: provides the token ids of chunks, which are written to the tiers that seal objects. It receives the
            chunks that each of these tiers holds, once after the tier has opened. Used only with `events.token_ids`.
        layouts: the layout of each rank, if ranks have different layers.

    Raises:
        ConfigError: a setting is wrong.
        TierError: the secret of a required tier could not be read.
    """
    layouts = layouts or (layout,) * ranks.rank_count
    layout = largest(layouts)
    for rank, each in enumerate(layouts):
        if each.loss != config.store.loss:
            raise ConfigError(
                f"differs from {each.loss}, with which rank {rank} was opened",
                setting="store.loss",
                value=config.store.loss,
                allowed="the same value in all processes of an engine",
            )
    layout, fingerprint_digest = in_class(config, layout, fingerprint_digest)
    metrics, guards = Metrics(), Guards()
    start_series(metrics, ranks.tiers, ranks.down)
    secret, flaw = found or found_secret(config)
    # The tiers must be open first, because one of them creates the directory of the secret.
    root = root_key(
        store_secret(config, ranks.down, secret, flaw), fingerprint_digest, layout.chunk_tokens, config.store.tenant
    )
    cache = Cache(
        layout=layout,
        slots=ranks.slots,
        tiers=tier_rules(config, ranks.tiers),
        evictor=lambda: make_evictor(config.host.evictor),
        limits=_limits(config, publishes=publishes),
        down=ranks.down,
    )
    recorder = None
    if config.trace.path is not None:
        counted, capacity_bytes = guards.around(Feature.METRICS, metrics), config.trace.capacity_bytes
        make = partial(Recorder, config.trace.path, capacity_bytes, layout.chunk_tokens, counted)
        recorder = guards.opened(Feature.RECORDER, make)
    journal = open_journal(config, layouts, root, metrics, guards)
    if config.store.loss_notice:
        logger.warning("%s", config.store.loss_notice)
    if observer is not None:
        guards.register(Feature.EVENTS, observer)
    guards.register(Feature.METRICS, CommandCounters(metrics))
    guards.register(Feature.METRICS, Gauges(metrics, cache, layouts, ranks.views, tiers_of_one_cap(config)))
    own = open_key_source(config, secret) if keys is None and config.tiers else None
    sealing = {tier.name for tier in config.tiers if is_sealed(tier)}
    known = texts if config.events.token_ids and sealing else None
    session = Session(
        cache,
        ranks.executor,
        on_close=closing_keys(on_close, own),
        metrics=metrics,
        locked_by=lambda: (
            locked_by(config, keys or own) or (flaw if flaw and any(map(cache.is_up, cache.tier_names)) else "")
        ),
        annotate=None if known is None else partial(_with_text, known, sealing, 4 * layout.chunk_tokens),
        recalls=None if known is None else Recalls(sealing, known.text_group),
        recalled=_ignore if known is None else known.recalled,
        guards=guards,
        loss=config.store.loss,
    )
    return OpenedSession(session, root, metrics, recorder, journal)


def _with_text(texts: ChunkTexts, sealing: Collection[str], ids_bytes: int, demote: Transfer) -> Transfer:
    """Return `demote` with the chunk's text.

    Return it unchanged if its group carries no texts, its tier does not seal objects (encrypt their frames), or the
    text is unknown or too long for a frame's head.
    """
    if demote.group != texts.text_group or demote.tier not in sealing or ids_bytes > 4 * TEXT_TOKENS_MAX:
        return demote
    text = texts.text_of(demote.key)
    return demote._replace(text=text) if 0 <= len(text) - ids_bytes <= EXTRAS_BYTES_MAX else demote


def _ignore(_records: object, _tier: str) -> None:
    """Stand in for `ChunkTexts.recalled` in a session that recalls nothing."""


def open_journal(
    config: Config, layouts: Sequence[KvLayout], root: bytes, metrics: Metrics, guards: Guards
) -> Journal | None:
    """Open the journal with a guard. Return None without `journal.path`, or if that path is unusable."""
    if config.journal.path is None:
        return None
    counted = guards.around(Feature.METRICS, metrics)
    make = partial(Journal, config.journal.path, config.journal.capacity_bytes, layouts, root, counted)
    return guards.opened(Feature.JOURNAL, make)


def _limits(config: Config, *, publishes: bool) -> Limits:
    limits = config.limits
    return Limits(
        stores_in_flight=limits.stores_in_flight,
        scatters=limits.scatters_in_flight,
        load_deadline_s=limits.load_deadline_s,
        store_deadline_s=limits.store_deadline_s,
        announced_wait_s=limits.announced_wait_s,
        retained_share=limits.retained_percent / 100,
        hint_share=limits.hint_percent / 100,
        retain_s=limits.retain_s,
        publishes=publishes,
        write_policy=WritePolicy(config.store.write_policy),
    )


def tier_rules(config: Config, names: Sequence[str]) -> list[TierRules]:
    """Return the core's limits of each tier.

    Raises:
        ConfigError: `names` differ from the names in the settings.
    """
    configured = tuple(tier.name for tier in config.tiers)
    if tuple(names) != configured:
        raise ConfigError(f"the ranks were opened with the tiers {names}, but the settings name {configured}")
    return [_rule(tier) for tier in config.tiers]


def _rule(tier: TierSettings) -> TierRules:
    kind = kind_of(tier)
    # Nodes that lose a shared store at the same time must not all retry at the same time.
    jitter = random.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER) if kind.is_shared(tier) else 1.0  # noqa: S311
    return TierRules(
        name=tier.name,
        persists=kind.persists,
        is_remote=kind.is_remote,
        loads_in_flight=tier.loads_in_flight,
        writes_in_flight=tier.writes_in_flight,
        small_bytes_in_flight=tier.small_bytes_in_flight,
        probe_deadline_s=tier.probe_deadline_s,
        transfer_deadline_s=tier.transfer_deadline_s,
        failures=tier.failures,
        retry_s=tier.retry_s * jitter,
    )
