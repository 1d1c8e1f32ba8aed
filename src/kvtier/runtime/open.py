"""Put a session together from settings: the ranks below, the secret, the core. It knows all the parts."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, get_args

from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, WritePolicy
from kvtier.device.base import Copier
from kvtier.errors import ConfigError, KvError, TierError
from kvtier.keys.fingerprint import root_key
from kvtier.keys.secret import SECRET_BYTES, Secret, load_or_create
from kvtier.layout import KvLayout
from kvtier.observe import table
from kvtier.observe.metrics import Metrics
from kvtier.policy.registry import make_evictor
from kvtier.runtime.arena import PageLock
from kvtier.runtime.counters import CommandCounters, Gauges
from kvtier.runtime.jobs import Observer
from kvtier.runtime.link_priors import link_priors
from kvtier.runtime.rank import COPY_THREADS, open_rank
from kvtier.runtime.rank_group import OpenRanks
from kvtier.runtime.recorder import Recorder
from kvtier.runtime.session import LocalSession
from kvtier.runtime.session_thread import SessionThread
from kvtier.tier.store_root import MISTAKES
from kvtier.types import Way

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

CHUNK_TOKENS_MIN = 256
"""Smallest automatic chunk: below it objects get too small for a drive's bandwidth."""

RECORDER_DEADLINE_S = 2.0
"""How long a recording may take to be written to its end when a session closes."""

SECRET_GRACE_S = 0.5
"""How long to wait for a secret whose tier did not open. A tier that hangs has cost its deadline before. Where another
process holds the tier, or its index is large, the secret can be read at once."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session and what an engine adapter needs beside it."""

    session: SessionThread
    root: bytes
    """32-byte keyed root of every key chain of this model in this store. Secret."""
    metrics: Metrics
    slots: tuple[int, ...]
    recorder: Recorder | None = None
    """Where an adapter notes each request that has ended; None when nobody wants a trace."""


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
) -> OpenedSession:
    """Open every part that `config` names, in this process, and start the threads.

    Args:
        config: the settings.
        layout: the model's KV groups.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        copier: moves bytes between the engine's blocks and host slots.
        page_lock: page-locks host memory, where a device wants it.
        copy_threads: threads that gather and scatter.

    Raises:
        ConfigError: a setting is wrong or a place cannot be used. Nothing stays open.
        TierError: a tier that is required cannot be opened.
        RuntimeError: the system gives no more threads.
    """
    rank = open_rank(config, layout, fingerprint_digest, copier, page_lock=page_lock, copy_threads=copy_threads)
    try:
        ranks = OpenRanks(rank.mover, rank.slots, rank.tiers, frozenset(rank.down), rank.mover.views)
        return open_core(config, layout, fingerprint_digest, ranks, on_close=rank.close)
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
) -> OpenedSession:
    """Open a session over ranks that are open already, here or in other processes, and start its thread.

    Args:
        config: the settings that the ranks were opened with.
        layout: of one rank; a chunk has the same number of bytes on each.
        fingerprint_digest: 32 bytes, `Fingerprint.digest`.
        ranks: the ranks.
        on_close: called once when the session has ended, with the seconds that are left.
        observer: told of every command and every answer, in the session's thread, after they were counted.

    Raises:
        ConfigError: a setting is wrong, the store's secret cannot be used, there is no such probe, or requests cannot
            be recorded where they shall be.
        TierError: the secret of a tier that is required did not come in time.
    """
    metrics = Metrics()
    for name in ranks.tiers:
        for way in get_args(Way):
            metrics.set(table.TIER_UP, float(name not in ranks.down), tier=name, way=way)
    # After the tiers were opened: the secret lies in the directory that one of them may just have made.
    root = root_key(_secret(config, ranks.down), fingerprint_digest, layout.chunk_tokens)
    cache = Cache(
        layout=layout,
        slots=ranks.slots,
        tiers=ranks.tiers,
        evictor=lambda: make_evictor(config.host.evictor),
        limits=_limits(config),
        down=ranks.down,
        link_priors=link_priors(config, max(group.payload_bytes for group in layout.groups)),
    )
    recorder = None
    if config.trace.path is not None:
        recorder = Recorder(config.trace.path, config.trace.capacity_bytes, layout.chunk_tokens, metrics)
    session = LocalSession(
        cache,
        ranks.executor,
        on_close=on_close if recorder is None else _both(recorder, on_close),
        on_second=Gauges(metrics, cache, layout, ranks.views),
        metrics=metrics,
        observer=CommandCounters(metrics, observer),
    )
    return OpenedSession(SessionThread(session), root, metrics, ranks.slots, recorder)


def _both(recorder: Recorder, on_close: Callable[[float], None]) -> Callable[[float], None]:
    def close(deadline_s: float) -> None:
        until_s = time.monotonic() + deadline_s
        recorder.close(min(deadline_s, RECORDER_DEADLINE_S))
        on_close(max(0.0, until_s - time.monotonic()))

    return close


def _secret(config: Config, down: Collection[str]) -> Secret:
    deadline_s, file = config.limits.open_deadline_s, config.store.secret_file
    if config.store.secret is not None:
        return config.store.secret
    if file is not None:
        try:
            return within(deadline_s, partial(load_or_create, file), "kvtier secret")
        except TimeoutError:
            raise ConfigError(f"store.secret_file = {str(file)!r} could not be read within {deadline_s:g} s") from None
    for tier in (config.directory, config.disk):
        if tier.path is None:
            continue
        wait_s = min(deadline_s, SECRET_GRACE_S) if tier.section in down else deadline_s
        try:
            try:
                return within(wait_s, partial(load_or_create, tier.path / "secret", is_inside=True), "kvtier secret")
            except TimeoutError:
                detail = f"the secret in it could not be read within {wait_s:g} s"
                raise TierError(tier.section, detail) from None
        except (KvError, OSError) as error:
            if tier.required or not _may_pass(error):
                raise
            logger.warning(
                "%s; names of this process are its own: what it stores is found by no other, nor after its end", error
            )
            break
    return Secret(secrets.token_bytes(SECRET_BYTES))  # nothing outlives the process, so neither need the names


def within(deadline_s: float, act: Callable[[], Answer], thread: str) -> Answer:
    """What `act` returns or raises, in a thread of its own (named `thread`) because a place may hang.

    Raises:
        TimeoutError: it takes longer than `deadline_s` seconds.
    """
    told: Future[Answer] = Future()

    def run() -> None:
        try:
            told.set_result(act())
        except Exception as error:  # noqa: BLE001 - the caller raises it
            told.set_exception(error)

    threading.Thread(target=run, name=thread, daemon=True).start()
    return told.result(deadline_s)


def _may_pass(error: Exception) -> bool:
    """Whether a secret could not be had because its place fails, and not because something is wrong with it."""
    cause = error.__cause__ if isinstance(error, ConfigError) else error
    return isinstance(cause, TierError) or (isinstance(cause, OSError) and cause.errno not in MISTAKES)


def _limits(config: Config) -> Limits:
    limits = config.limits
    return Limits(
        gathers=limits.stores_in_flight,
        scatters=limits.scatters_in_flight,
        promotes=limits.loads_in_flight,
        demotes=limits.demotes_in_flight,
        small_bytes=limits.small_bytes_in_flight,
        waiting_chunks=limits.waiting_chunks,
        requests=limits.requests,
        probe_deadline_s=limits.probe_deadline_s,
        load_deadline_s=limits.load_deadline_s,
        transfer_deadline_s=limits.transfer_deadline_s,
        store_deadline_s=limits.store_deadline_s,
        tier_failures=limits.tier_failures,
        tier_retry_s=limits.tier_retry_s,
        write_policy=WritePolicy(config.store.write_policy),
        selective_uses=config.store.selective_uses,
    )
