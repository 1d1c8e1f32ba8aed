"""Opens a session from settings: ranks, secret, core, recorder.

An engine that keeps host memory itself has no session; it uses `kvtier.runtime.open_objects`.
"""

import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from kvtier.codec.head import EXTRAS_BYTES_MAX
from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules, WritePolicy
from kvtier.core.recalls import Recalls
from kvtier.device.copier import Copier
from kvtier.errors import ConfigError
from kvtier.keys.fingerprint import root_key
from kvtier.keys.key_source import KeySource
from kvtier.keys.secret import Secret
from kvtier.layout import KvLayout, largest
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import PageLock
from kvtier.runtime.counters import CommandCounters, Gauges, start_at_zero
from kvtier.runtime.executor import ChunkTexts, Observer
from kvtier.runtime.guards import Feature, Guards
from kvtier.runtime.journal import Journal
from kvtier.runtime.rank import COPY_THREADS, open_rank, tiers_of_one_cap
from kvtier.runtime.rank_group import OpenRanks
from kvtier.runtime.secret import found_secret, store_secret
from kvtier.runtime.session import Session
from kvtier.runtime.stored_forms import closing_keys, locked_by, open_key_source
from kvtier.runtime.trace_recorder import Recorder
from kvtier.tier.registry import TierSettings, is_sealed, kind_of
from kvtier.types import Transfer, Way

logger = logging.getLogger(__name__)

CHUNK_TOKENS_MIN = 256
"""Smallest automatic chunk. Smaller objects do not use a drive's bandwidth."""

RETRY_JITTER = 0.25
"""Share by which a node's pause before a trial of a shared tier differs at random."""

TEXT_TOKENS_MAX = 4096
"""Most tokens of a chunk whose ids are written. They travel with each write to every rank."""

LINES_DEADLINE_S = 2.0
"""How long closing a session waits for its recording, and for its journal."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session, and the objects that an engine adapter uses with it."""

    session: Session
    root: bytes
    """32-byte root of all key chains of this model in this store. Secret."""
    metrics: Metrics
    recorder: Recorder | None = None
    """Records each request that has ended; None without `trace.path`."""
    journal: Journal | None = None
    """Gets a line for each request that has ended; None without `journal.path`."""


def choose_chunk_tokens(wanted: int, alignment: int) -> int:
    """Tokens of a chunk: `wanted`, or when it is 0 the smallest multiple of `alignment` that is at least 256.

    Args:
        wanted: the setting `store.chunk_tokens`.
        alignment: tokens to which the engine's hits are aligned, such as its block size.

    Raises:
        ConfigError: `wanted` is not a multiple of `alignment`.
    """
    if wanted == 0:
        return -(-CHUNK_TOKENS_MIN // alignment) * alignment
    if wanted % alignment:
        raise ConfigError(
            f"store.chunk_tokens = {wanted} does not fit the engine; allowed: multiples of its {alignment} tokens"
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
    """Open a session with one rank, in this process, and start its threads.

    Args:
        config: the settings.
        layout: the model's KV groups.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        copier: copies between the engine's blocks and host slots.
        page_lock: page-locks host memory for a device.
        copy_threads: threads for gather and scatter.
        texts: as of `open_core`.

    Raises:
        ConfigError: a setting is wrong. Nothing stays open.
        TierError: a required tier cannot be opened.
        RuntimeError: the system cannot start a thread.
    """
    rank = open_rank(config, layout, fingerprint_digest, copier, page_lock=page_lock, copy_threads=copy_threads)
    try:
        ranks = OpenRanks(rank.mover, rank.slots, rank.tiers, frozenset(rank.down), [rank.mover.views])
        return open_core(
            *(config, layout, fingerprint_digest, ranks),
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
        config: the settings; the ranks were opened with the same.
        layout: of one rank.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        ranks: the ranks.
        on_close: called once when the session has ended, with the remaining seconds.
        observer: receives every command and every completion, under the session's lock.
        publishes: other engines wait for what this one stores, see `Limits.publishes`.
        keys: of a rank in this process; None: they are read here, too, if a tier seals.
        found: the answer of `found_secret` to a rank in this process; None: it is asked here.
        texts: with the setting `events.token_ids` it gives the tokens of chunks for sealed objects. It gets the chunks
            that tiers which seal hold: once after each tier has opened, and after each `Session.recall`.
        layouts: of each rank, where ranks hold different layers.

    Raises:
        ConfigError: a setting is wrong.
        TierError: the secret of a required tier could not be read.
    """
    layouts = layouts or (layout,) * ranks.rank_count
    layout = largest(layouts)
    metrics, guards = Metrics(), Guards()
    start_at_zero(metrics, ranks.tiers)
    for name in ranks.tiers:
        for way in get_args(Way):
            metrics.set(table.TIER_UP, float(name not in ranks.down), tier=name, way=way)
    secret, flaw = found or found_secret(config)
    # After the tiers are open, because the secret is in a directory that one of them creates.
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
    others = [] if observer is None else [guards.around(Feature.EVENTS, observer)]
    counters = CommandCounters(metrics, *([] if journal is None else [journal]), *others)
    own = open_key_source(config, secret) if keys is None and config.tiers else None
    sealing = {tier.name for tier in config.tiers if is_sealed(tier)}
    known = texts if config.events.token_ids and sealing else None
    session = Session(
        cache,
        ranks.executor,
        on_close=closing_lines(closing_keys(on_close, own), *(it for it in (recorder, journal) if it is not None)),
        on_second=Gauges(metrics, cache, layouts, ranks.views, counters, tiers_of_one_cap(config)),
        metrics=metrics,
        observer=counters,
        locked_by=lambda: (
            locked_by(config, keys or own) or (flaw if flaw and any(map(cache.is_up, cache.tier_names)) else "")
        ),
        annotate=None if known is None else partial(_with_text, known, sealing, 4 * layout.chunk_tokens),
        recalls=None if known is None else Recalls(sealing, known.text_group),
        recalled=_ignore if known is None else known.recalled,
        guards=guards,
    )
    return OpenedSession(session, root, metrics, recorder, journal)


def _with_text(texts: ChunkTexts, sealing: Collection[str], ids_bytes: int, demote: Transfer) -> Transfer:
    """`demote` with the text of its chunk, if that is known, fits into a head and goes to a tier that seals."""
    if demote.group != texts.text_group or demote.tier not in sealing or ids_bytes > 4 * TEXT_TOKENS_MAX:
        return demote
    text = texts.text_of(demote.key)
    return demote._replace(text=text) if 0 <= len(text) - ids_bytes <= EXTRAS_BYTES_MAX else demote


def _ignore(_records: object, _tier: str) -> None:
    """Take no records."""


def open_journal(
    config: Config, layouts: Sequence[KvLayout], root: bytes, metrics: Metrics, guards: Guards
) -> Journal | None:
    """The journal, guarded; None without `journal.path`, or where it cannot be used."""
    if config.journal.path is None:
        return None
    counted = guards.around(Feature.METRICS, metrics)
    make = partial(Journal, config.journal.path, config.journal.capacity_bytes, layouts, root, counted)
    return guards.opened(Feature.JOURNAL, make)


def closing_lines(on_close: Callable[[float], None], *files: Recorder | Journal) -> Callable[[float], None]:
    """`on_close`, after the files are written."""

    def close(deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        for each in files:
            each.close(min(max(0.0, until_s - time.monotonic()), LINES_DEADLINE_S))
        on_close(max(0.0, until_s - time.monotonic()))

    return close if files else on_close


def _limits(config: Config, *, publishes: bool) -> Limits:
    limits = config.limits
    return Limits(
        gathers=limits.stores_in_flight,
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
    """The core's limits of each tier.

    Raises:
        ConfigError: `names` are not those of the settings.
    """
    configured = tuple(tier.name for tier in config.tiers)
    if tuple(names) != configured:
        raise ConfigError(f"the ranks were opened with the tiers {names}, and the settings name {configured}")
    return [_rule(tier) for tier in config.tiers]


def _rule(tier: TierSettings) -> TierRules:
    kind = kind_of(tier)
    # Nodes that have lost a shared store at once do not try it again at once.
    jitter = random.uniform(1 - RETRY_JITTER, 1 + RETRY_JITTER) if kind.is_shared(tier) else 1.0  # noqa: S311
    return TierRules(
        name=tier.name,
        persists=kind.persists,
        is_remote=kind.is_remote,
        promotes=tier.loads_in_flight,
        demotes=tier.writes_in_flight,
        small_bytes=tier.small_bytes_in_flight,
        probe_deadline_s=tier.probe_deadline_s,
        transfer_deadline_s=tier.transfer_deadline_s,
        failures=tier.failures,
        retry_s=tier.retry_s * jitter,
    )
