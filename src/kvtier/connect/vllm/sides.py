"""The scheduler side and the worker side of the connector: what each process opens at start and closes at the end."""

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from kvtier.config.loader import flat, load, override
from kvtier.config.sections import Config
from kvtier.connect.local_files import note_fingerprint, private
from kvtier.connect.vllm import installed, support, weights
from kvtier.connect.vllm.block_pool import BlockPins
from kvtier.connect.vllm.events import STORAGE, Events, Extras, Source
from kvtier.connect.vllm.files_read import AdaptersRead, doubt
from kvtier.connect.vllm.geometry import DcpShards, Geometry, TableLayout
from kvtier.connect.vllm.held_parts import held_parts, stage_ranks, token_share
from kvtier.connect.vllm.identity import EngineIdentity, identify
from kvtier.connect.vllm.log import follow_engine
from kvtier.connect.vllm.own_cache import OwnCache
from kvtier.connect.vllm.request_history import RequestHistory
from kvtier.connect.vllm.request_keys import KeyMaker
from kvtier.connect.vllm.scheduler import Scheduler
from kvtier.connect.vllm.stats import UNKNOWN_PLACE, StatsReader
from kvtier.connect.vllm.vllm_types import (
    BlockTables,
    KvCacheConfig,
    KvCacheManager,
    Request,
    VllmConfig,
    VllmScheduler,
)
from kvtier.connect.vllm.weight_calls import WeightCalls
from kvtier.connect.vllm.weights import WorkerCall
from kvtier.connect.vllm.worker import FENCE_WAIT_S, Worker, no_look
from kvtier.core.planner import Planner
from kvtier.errors import ConfigError, UnsupportedModelError
from kvtier.layout import History, KvLayout, engine_bytes, of_all_ranks
from kvtier.runtime.control import Control, EngineCalls
from kvtier.runtime.control_socket import ControlError, ControlSocket
from kvtier.runtime.guards import Feature, unless_unusable
from kvtier.runtime.open import open_core
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.runtime.shared_memory import Exchange, share
from kvtier.tier.registry import kind_of

logger = logging.getLogger(__name__)

LEAVE_S = 4.0
"""How long a worker that shuts down waits for its pending writes. It has 5 s in all from vLLM
(`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`)."""


def settings_of(extra: Mapping[str, object], base: Config) -> Config:
    """The engine's settings: `base`, overridden by `kv_connector_extra_config`, by section or flat.

    ``{"tiers": [...]}`` replaces the list of tiers, and ``{"tiers.NAME.key": …}`` sets one value of a tier.

    Raises:
        ConfigError: an unknown setting, one in both forms, or an invalid value; the message names it and its origin.
    """
    origin = "kv_connector_extra_config"
    return override(base, flat(extra, origin), origin)


def check_start(vllm_config: VllmConfig) -> tuple[Config, str]:
    """Check everything that does not depend on the KV cache; returns the settings and vLLM's version.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    config = settings_of(vllm_config.kv_transfer_config.kv_connector_extra_config or {}, load().config)
    support.check_role(vllm_config.kv_transfer_config.kv_role, config.store.write_policy)
    support.check_settings(config, is_start=True)
    version = installed.check_engine()
    support.check_engine(vllm_config)
    return config, version


class WorkerFacts(NamedTuple):
    """What a worker tells the others at start, before any of them allocates host memory."""

    fingerprint: bytes
    """Digest of the engine's identity, as this worker sees it."""
    doubt: str
    """Why it may have read other files than it has identified; empty if it has not."""
    shape: str
    """What must be equal on all workers (`Geometry.shape`)."""
    layers: tuple[int, ...]
    """Layers of each KV group on this rank."""
    token_share: tuple[int, int] = (0, 1)
    """Number of the share, and number of shares, according to vLLM's groups of ranks (`held_parts.token_share`)."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings and identity of an engine; equal in all its processes."""

    vllm_config: VllmConfig
    kv_cache_config: KvCacheConfig
    config: Config
    geometry: Geometry
    identity: EngineIdentity
    role: str
    """`kv_role`: ``kv_both``, ``kv_producer`` for a prefill engine, or ``kv_consumer`` for a decode engine."""
    workers: tuple[WorkerFacts, ...] = ()
    """By rank; known in the workers only."""

    @staticmethod
    def of(vllm_config: VllmConfig, kv_cache_config: KvCacheConfig) -> "EngineSetup":
        """Check and identify an engine, as this process sees it: `identified_as` follows.

        Raises:
            ConfigError: a setting is wrong, or this release of vLLM is not supported.
            UnsupportedModelError: the engine cannot be served correctly.
        """
        config, version = check_start(vllm_config)
        follow_engine(config.log.level)
        shards = DcpShards.of(vllm_config, config.store.token_shares)
        geometry = Geometry.of(kv_cache_config, config.store.chunk_tokens, shards)
        identified = identify(vllm_config, version, geometry.shares)
        role = vllm_config.kv_transfer_config.kv_role
        return EngineSetup(vllm_config, kv_cache_config, config, geometry, identified, role)

    def identified_as(self, identified: EngineIdentity) -> "EngineSetup":
        """The same engine with the identity that all of its workers agree on."""
        config = private(self.config) if identified.is_private else self.config
        return replace(self, config=config, identity=identified)

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return int(self.vllm_config.parallel_config.pipeline_parallel_size) * self.stage_ranks

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self.vllm_config.parallel_config.rank % self.ranks

    @property
    def stage_ranks(self) -> int:
        """Workers of a pipeline stage."""
        return stage_ranks(self.vllm_config.parallel_config)

    @property
    def first_layers(self) -> list[int]:
        """Layers of each KV group in the pipeline stages before this worker's."""
        before = [it.layers for it in self.workers[: self.rank - self.rank % self.stage_ranks : self.stage_ranks]]
        return [sum(counts) for counts in zip([0] * len(self.geometry.groups), *before, strict=True)]

    def facts(self, token_share: tuple[int, int] = (0, 1)) -> WorkerFacts:
        """What this worker tells the others."""
        own, geometry = self.identity, self.geometry
        detail = own.detail or doubt(self.vllm_config, own.versions)
        return WorkerFacts(own.fingerprint.digest, detail, geometry.shape, geometry.layer_counts, token_share)

    def agreed(self, workers: Sequence[WorkerFacts | None]) -> "EngineSetup":
        """The same engine, as all of its workers see it. It is private if one may have read other files.

        Args:
            workers: of all ranks, by rank; None: it has failed.

        Raises:
            ConfigError: a worker has failed.
            UnsupportedModelError: workers divide the KV in different ways; the message has both shapes.
        """
        known = [it for it in workers if it is not None]
        if len(known) < len(workers):
            raise ConfigError(f"rank {workers.index(None)} has failed to start; its own message says why")
        return self._agreed(known)

    def _agreed(self, workers: Sequence[WorkerFacts]) -> "EngineSetup":
        for rank, it in enumerate(workers):
            like = rank - rank % self.stage_ranks if it.shape == workers[0].shape else 0
            other = workers[like]
            if (it.shape, it.layers) != (other.shape, other.layers):
                raise UnsupportedModelError(
                    f"rank {rank} has {it.layers} layers of the KV groups, in {it.shape}; rank {like} has "
                    f"{other.layers}, in {other.shape}. Serve the model without kvtier"
                )
            share = token_share(self.vllm_config.parallel_config, rank)
            if it.token_share != share:
                raise UnsupportedModelError(
                    f"rank {rank} holds token share {it.token_share[0]} of {it.token_share[1]} according to vLLM's "
                    f"groups of ranks, but {share[0]} of {share[1]} according to its configuration. Serve the model "
                    "without kvtier"
                )
        detail = next((it.doubt for it in workers if it.doubt), "")
        if len({it.fingerprint for it in workers}) > 1 and not detail:
            detail = "its workers have identified different weights"
        own = self.identity
        identity = own.made_private(self.vllm_config, detail) if detail else own
        return replace(self.identified_as(identity), workers=tuple(workers))


class SchedulerSide:
    """The core and the scheduler, in the scheduler's process. It connects to the workers, which are up.

    Args:
        setup: settings and identity of the engine.
        handshakes: of the workers.
        layouts: each worker's layout, for figures (`Rank.counted`).
        engine: vLLM's scheduler.
        guarded: wraps a callback so that it cannot raise into vLLM's block pool.
        failure: the internal error that has switched the connector off; empty without one.
        extras_of, hash_of: see `Events`.
        wake: lets an idle engine take a step. Any thread.
        ask: makes a call of `WorkerSide` in all workers; see `WeightCalls`.
        is_alone: no other connector passes KV between engines; see `Scheduler`.

    Raises:
        ProtocolError: a worker cannot be reached.
        ConfigError: the store's secret cannot be read, the control socket cannot be used, or vLLM's scheduler is of an
            unknown kind.
    """

    def __init__(
        self,
        setup: EngineSetup,
        handshakes: Sequence[Mapping[str, Any]],
        layouts: Sequence[KvLayout],
        engine: VllmScheduler,
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
        failure: Callable[[], str],
        *,
        extras_of: Callable[[Request, int, int], Extras],
        hash_of: Callable[[Any, tuple[int, ...], Extras], Any],
        wake: Callable[[], None],
        ask: Callable[..., Sequence[Any]],
        is_alone: bool = True,
    ) -> None:
        vllm_config, geometry, config = setup.vllm_config, setup.geometry, setup.config
        self.ask = ask
        self._hit_sources = {it.name: UNKNOWN_PLACE if kind_of(it).is_remote else "disk" for it in config.tiers}
        self.own_cache = own_cache = OwnCache(engine, is_alone=is_alone)
        manager = engine.kv_cache_manager
        has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
        for warning in support.warnings(vllm_config.kv_transfer_config, setup.role, has_shared=has_shared):
            logger.warning("%s", warning)
        if setup.identity.is_private:
            logger.warning("KV is kept in host memory only: %s", setup.identity.detail)
        if config.store.token_shares and not geometry.shares:
            logger.warning("store.token_shares has no effect: only a model whose KV is all latents (MLA) has shares")
        self._close_deadline_s = config.limits.close_deadline_s
        ranks = connect(handshakes)
        self.events_table, events = _events(setup, extras_of, hash_of)
        digest = setup.identity.fingerprint.digest
        is_producer = setup.role == "kv_producer"
        opened = open_core(
            *(config, layouts[0], digest, ranks),
            observer=events,
            publishes=is_producer,
            texts=events,
            layouts=layouts,
        )
        self._session = opened.session
        self._keys = KeyMaker(
            *(opened.root, geometry.chunk_tokens, vllm_config),
            lambda name: self.scheduler.weights_change(f"adapter {name!r}"),
            lambda identifier: self.scheduler.item_doubted(identifier),  # noqa: PLW0108 - it is made below
        )
        history = RequestHistory(opened.session, geometry, lambda: self._keys.refusal)
        self.stats = opened.session.guards.around(Feature.EXPORT, StatsReader(opened.metrics), hurry=False)
        self.scheduler = Scheduler(
            session=opened.session,
            ranks=ranks.executor,
            geometry=geometry,
            begin_keys=self._keys.begin,
            planner=Planner(
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens, is_on=config.planner.enabled
            ),
            tables=manager.get_block_ids,
            resident=partial(_resident, manager) if config.vllm.prefix_protection else None,
            open_pins=lambda on_reuse: BlockPins(manager.block_pool, on_reuse, guarded),
            object_bytes=of_all_ranks(layouts, engine_bytes),
            has_prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            stores=setup.role != "kv_consumer",
            announces=is_producer if has_shared and config.store.write_policy == "through" else None,
            events=events,
            recorder=opened.recorder,
            journal=opened.journal,
            history=None if config.control.socket is None else history,
            drafted_tokens=support.drafted_tokens(vllm_config),
            is_alone=is_alone,
            restart=own_cache.restart,
            adapters=self._keys.adapters,
            allows_high_priority=config.vllm.allow_high_priority,
            unknown_change=lambda: self.calls.unknown_change(),  # noqa: PLW0108 - it is made below
        )
        self.calls = WeightCalls(
            ask,
            self.scheduler,
            self._keys,
            can_keep=_keeps_weights(vllm_config),
            lends_host=self._session if config.vllm.sleep_frees_host else None,
        )
        own_cache.watch_resets(guarded(self.scheduler.own_reset_begins), guarded(self.scheduler.own_reset_ended))
        self._session.watch(
            None if events is None else events.watched, lambda: wake() if self.scheduler.has_news else None
        )
        self._control: ControlSocket | None = None
        try:
            self._control = self._open_control(config, geometry, history, failure)
        except BaseException:
            self.close()
            raise
        ranks.executor.when_leaving(self._leave)
        logger.info(
            "kvtier is ready: chunks of %d tokens, %d KV groups, %d ranks, %s",
            *(geometry.chunk_tokens, len(geometry.groups), setup.ranks),
            ", ".join(f"{it.name} {getattr(it, kind_of(it).where)}" for it in config.tiers) or "host memory only",
        )

    @property
    def has_news(self) -> bool:
        """Whether an idle engine should take a step, for metrics, events or pinned blocks."""
        return self.stats.hurry() or self.scheduler.has_news

    def hit_sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Count the `tokens` of a load by the kind of place that they need, under vLLM's names."""
        return self._session.guards.run(
            *(Feature.METRICS, self.scheduler.hit_sources, request, tokens, self._hit_sources),
            otherwise={UNKNOWN_PLACE: tokens},
        )

    @contextmanager
    def around(self, call: WorkerCall) -> Generator[None]:
        """Surround a call of vLLM to its workers; see `weights.watch_calls`."""
        if call.method == "add_lora" and call.args:
            self._keys.loaded(call.args[0])
            yield
        elif call.method == "reset_encoder_cache" and call.is_plain:
            yield
            self.calls.encoder_was_reset()
        else:
            with self.calls.around(call):
                yield

    def reset(self) -> bool:
        """Make everything cached before now unreachable for this engine."""
        self._keys.new_epoch()
        if not self.scheduler.reset():
            return False
        if self.calls.was_reset():
            return True
        logger.info(
            "the cache was reset: this engine does not find KV stored before. After a restart it finds that KV again, "
            "and not the KV stored since the reset. To delete KV for good, run `kvtier inspect purge`"
        )
        return True

    def _open_control(
        self, config: Config, geometry: Geometry, history: RequestHistory, failure: Callable[[], str]
    ) -> ControlSocket | None:
        if config.control.socket is None:
            return None
        off = "an internal error has switched kvtier off: "
        engine = EngineCalls(
            chain=self._keys.chain_of,
            hit_tokens=geometry.hit_tokens,
            clear=self._clear,
            problem=lambda: off + failure() if failure() else self.scheduler.problem,
            why=history.why,
            note="vLLM's own prefix cache is kept: POST /reset_prefix_cache empties it",
        )
        answer = Control(self._session, engine, config.limits.retain_s).answer
        return unless_unusable(partial(ControlSocket, config.control.socket, answer))

    def _clear(self, salt: str | None) -> None:
        """Make what is cached now unreachable: of requests with this salt (``""``: without one), or everything."""
        if salt is None:
            self._keys.new_epoch()
        elif not self._keys.clear_salt(salt):
            raise ControlError("too many salts were cleared one by one; clear all")
        self.scheduler.clear(salt)
        logger.info("the cache was cleared%s by a control call", "" if salt is None else " for one salt")

    def close(self) -> None:
        """Write stored chunks to the lower tiers, within `limits.close_deadline_s`. Idempotent; any thread."""
        if self._control is not None:
            self._control.close()
        self._session.close(self._close_deadline_s)
        self.scheduler.close()

    def _leave(self) -> None:
        """Close when a worker's process is about to end: vLLM ends its workers before its scheduler."""
        threading.Thread(target=self.close, name="kvtier close", daemon=True).start()


def _keeps_weights(config: VllmConfig) -> bool:
    """Whether sleep of level 2 may keep all weights. It does not keep those of adapters."""
    return bool(getattr(config.model_config, "sleep_preserve_parameter_names", ())) and config.lora_config is None


def _resident(manager: KvCacheManager, request: Request) -> BlockTables:
    """The block ids in vLLM's own cache that match a request."""
    return manager.get_computed_blocks(request)[0].get_block_ids()


def _events(
    setup: EngineSetup,
    extras_of: Callable[[Request, int, int], Extras],
    hash_of: Callable[[Any, tuple[int, ...], Extras], Any],
) -> tuple[TableLayout | None, Events | None]:
    """KV events of the first history group and its vLLM group, if vLLM's configuration enables them."""
    wanted, config = setup.vllm_config.kv_events_config, setup.config
    if wanted is None or not wanted.enable_kv_cache_events:
        return None, None
    media = {it.name: config.events.shared_medium if kind_of(it).is_shared(it) else STORAGE for it in config.tiers}
    tiers = {it.name: Source(media[it.name], kind_of(it).is_remote) for it in config.tiers if media[it.name]}
    for number, group in enumerate(setup.geometry.groups):
        if isinstance(group.validity, History):
            table, hash_tokens = group.tables[0], setup.kv_cache_config.hash_block_size
            return table, Events(
                *(number, table.block_tokens, hash_tokens),
                tiers=tiers,
                extras_of=extras_of,
                hash_of=hash_of,
                repeat_s=config.events.repeat_s,
            )
    return None, None


class WorkerSide:
    """A rank and its worker, in a worker's process, on vLLM's KV memory.

    Args:
        setup: settings and identity of the engine.
        kv_caches: the tensors that vLLM registers, by layer.
        exchange: with all workers of the engine.

    Raises:
        UnsupportedModelError: the KV memory does not match its configuration.
        ConfigError: a setting is wrong, a tier's path cannot be used, or another worker has failed.
    """

    def __init__(self, setup: EngineSetup, kv_caches: Mapping[str, Any], exchange: Exchange) -> None:
        from kvtier.connect.vllm.copier import open_copier  # noqa: PLC0415 - imports torch, for the worker only
        from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415

        config = setup.config
        self._close_deadline_s = config.limits.close_deadline_s
        layers = setup.vllm_config.compilation_config.static_forward_context
        try:
            copier = open_copier(setup.geometry, setup.kv_cache_config, kv_caches, layers)
            held = held_parts(setup.vllm_config, setup.kv_cache_config, setup.geometry, setup.rank, setup.first_layers)
            layout = copier.pages.layout.with_parts(held)
        except BaseException:
            exchange(None)  # the others wait for this worker
            raise
        self._copier = copier
        self._kv = {it.untyped_storage().data_ptr() for it in _tensors(kv_caches.values())}
        self._note_step = copier.note_step if support.looks_ahead(setup.vllm_config) else None
        memory = share(layout, config.host.capacity_bytes, exchange)
        self._rank = open_rank(
            config,
            layout,
            setup.identity.fingerprint.digest,
            copier,
            rank=setup.rank,
            ranks=setup.ranks,
            engine_chunk_bytes=memory.chunk_bytes,
            shared=memory.regions,
            page_lock=cuda_page_lock(config.host.page_lock) if copier.pages.device.type == "cuda" else None,
        )
        if setup.rank == 0:
            note_fingerprint(config, setup.identity.fingerprint)
        has_lora = setup.vllm_config.lora_config is not None
        models, look = look_at_weights(has_moving_experts=setup.vllm_config.parallel_config.enable_eplb)
        self._models = models if config.vllm.weights_names == "digest" else []
        self.worker = Worker(
            copier.revoke,
            look,
            AdaptersRead(weights.on_stack("lora_manager")) if has_lora else None,
        )
        self.layout = self._rank.counted
        self.server = RankServer(self._rank, self.worker.receive)

    def launched(self) -> None:
        """A step and its draft model have been launched. On a GPU its output may return before the draft model ends."""
        if self._note_step is not None:
            self._note_step()

    # ---- calls of all workers by the scheduler side, between two steps -----------------------------------------------

    def sleep(self) -> None:
        """Keep copies and looks off the memory of KV and weights: vLLM is about to take it away.

        Raises:
            TimeoutError: a copy does not end. The memory must stay.
        """
        self.worker.is_asleep = True
        if not self._copier.close(FENCE_WAIT_S):
            raise TimeoutError(f"a KV copy has not ended within {FENCE_WAIT_S:g} s; the device hangs")

    def wake_up(self) -> None:
        """Allow copies and looks again."""
        self._copier.open()
        self.worker.is_asleep = False

    def digest_weights(self) -> bytes | None:
        """A digest of the weights, with which they are compared from now on; None without one.

        They may not be readable, or have random names (`vllm.weights_names`).
        """
        self.worker.look_anew()
        try:
            return weights.digest_of(self._models, self._kv) if self._models else None
        except Exception as error:  # noqa: BLE001 - vLLM's models are many
            logger.warning("the weights cannot be digested: %r", error)
            return None

    def digest_unchanged(self) -> bytes | None:
        """A digest of the weights, if they are those of the start."""
        return None if self.worker.look_now() else self.digest_weights()

    def free_host(self) -> tuple[int, int]:
        """Give host memory back; the bytes that stay, see `Arena.free`. No object may be in it."""
        return self._rank.arena.free()

    def take_host(self) -> None:
        """Take the memory that `free_host` has given back."""
        self._rank.arena.take()

    def close(self) -> None:
        """Close the rank once the core no longer needs it."""
        is_here = self.server.is_here
        self.server.leave(self._close_deadline_s if is_here else min(self._close_deadline_s, LEAVE_S))
        self._rank.close(1.0)
        self.server.close(1.0)


def _tensors(caches: Iterable[Any]) -> Iterator[Any]:
    """The tensors of what vLLM registers for its layers: one, or several."""
    for it in caches:
        yield from (it if isinstance(it, (list, tuple)) else (it,))


def look_at_weights(*, has_moving_experts: bool) -> tuple[list[Any], Callable[..., str]]:
    """The model of the worker whose method is running, its draft model, and `WeightSample.look` at them."""
    try:
        model, draft = weights.on_stack("get_model")(), weights.on_stack("get_draft_model")()
        models = [model] if draft is None else [model, draft]
        return models, weights.WeightSample(*models, has_moving_experts=has_moving_experts).look
    except Exception as error:  # noqa: BLE001 - vLLM's models are many, and the engine must start
        logger.warning(
            "kvtier cannot look at the model's weights (%r): it notices only changes that vLLM is called for", error
        )
    return [], no_look
