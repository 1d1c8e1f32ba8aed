"""The scheduler side and the worker side of the connector: what each process opens at start and closes at the end."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtier.config.sections import Config
from kvtier.connect.local_files import note_fingerprint
from kvtier.connect.vllm import identity, installed, support, weights
from kvtier.connect.vllm.block_pool import BlockPins
from kvtier.connect.vllm.events import Events, Movements
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.held_parts import held_parts
from kvtier.connect.vllm.log import follow_engine
from kvtier.connect.vllm.request_keys import KeyMaker
from kvtier.connect.vllm.scheduler import Scheduler
from kvtier.connect.vllm.settings import settings_of
from kvtier.connect.vllm.stats import Stats, StatsReader
from kvtier.connect.vllm.vllm_types import BlockTables, KvCacheConfig, LoraRequest, Request, VllmConfig
from kvtier.connect.vllm.worker import Worker, no_look
from kvtier.core.planner import Planner
from kvtier.layout import History
from kvtier.runtime.open import OpenedSession, open_core
from kvtier.runtime.rank import Rank, open_rank
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.tier.registry import kind_of

logger = logging.getLogger(__name__)

LEAVE_S = 4.0
"""How long a worker that shuts down waits for its pending writes. It has 5 s in all from vLLM
(`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`)."""


def check_start(vllm_config: VllmConfig) -> tuple[Config, str]:
    """Check everything that does not depend on the KV cache; returns the settings and vLLM's version.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    config = settings_of(vllm_config)
    support.check_role(vllm_config.kv_transfer_config.kv_role, config.store.write_policy)
    support.check_settings(config)
    version = installed.check_engine()
    support.check_engine(vllm_config)
    return config, version


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings and identity of an engine; equal in all its processes."""

    vllm_config: VllmConfig
    kv_cache_config: KvCacheConfig
    config: Config
    geometry: Geometry
    identity: identity.EngineIdentity
    role: str
    """`kv_role`: ``kv_both``, ``kv_producer`` for a prefill engine, or ``kv_consumer`` for a decode engine."""

    @staticmethod
    def of(vllm_config: VllmConfig, kv_cache_config: KvCacheConfig) -> "EngineSetup":
        """Check and identify an engine.

        Raises:
            ConfigError: a setting is wrong, or this release of vLLM is not supported.
            UnsupportedModelError: the engine cannot be served correctly.
        """
        config, version = check_start(vllm_config)
        follow_engine(config.log.level)
        geometry = Geometry.of(kv_cache_config, config.store.chunk_tokens)
        identified = identity.identify(vllm_config, version)
        if identified.is_private:
            # No later engine could identify the stored bytes.
            kept = [it for it in config.tiers if not (kind_of(it).persists or kind_of(it).is_shared(it))]
            config = replace(config, tiers=tuple(kept))
        role = vllm_config.kv_transfer_config.kv_role
        return EngineSetup(vllm_config, kv_cache_config, config, geometry, identified, role)

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return self.vllm_config.parallel_config.tensor_parallel_size


class SchedulerSide:
    """The core and the scheduler, in the scheduler's process.

    Args:
        setup: settings and identity of the engine.
        tables: the current block ids of a request.
        resident: the block ids in vLLM's own cache that match a request.
        open_pins: opens vLLM's block pool, once it exists.
        open_events: makes `Events` of the movements, `hash_tokens` and `table`.
    """

    def __init__(
        self,
        setup: EngineSetup,
        tables: Callable[[str], BlockTables],
        resident: Callable[[Request], BlockTables],
        open_pins: Callable[[Callable[[int], None]], BlockPins],
        open_events: Callable[..., Events],
    ) -> None:
        self.scheduler: Scheduler | None = None
        """None until all workers are up; until then every lookup is a miss."""
        self._setup = setup
        self._tables = tables
        self._resident = resident
        self._open_pins = open_pins
        self._open_events = open_events
        self._opened: OpenedSession | None = None
        self._keys: KeyMaker | None = None
        self._stats: StatsReader | None = None
        self._lock = threading.Lock()
        self._has_shared = any(kind_of(it).is_shared(it) for it in setup.config.tiers)
        for warning in support.warnings(setup.vllm_config.kv_transfer_config, setup.role, has_shared=self._has_shared):
            logger.warning("%s", warning)
        if setup.identity.is_private:
            logger.warning("KV is kept in host memory only: %s", setup.identity.detail)

    def connect(self, handshakes: Sequence[Mapping[str, Any]]) -> None:
        """Connect to the workers, and open the core.

        Raises:
            ProtocolError: a worker cannot be reached.
            ConfigError: the store's secret cannot be read.
        """
        setup = self._setup
        vllm_config, geometry, config = setup.vllm_config, setup.geometry, setup.config
        ranks = connect(handshakes)
        movements, events = self._events()
        digest = setup.identity.fingerprint.digest
        is_producer = setup.role == "kv_producer"
        opened = open_core(config, geometry.layout, digest, ranks, observer=movements, publishes=is_producer)
        self._opened = opened
        self._keys = KeyMaker(
            *(opened.root, geometry.chunk_tokens, vllm_config),
            lambda name: scheduler.weights_change(f"adapter {name!r}"),
        )
        self._stats = StatsReader(opened.metrics)
        self.scheduler = scheduler = Scheduler(
            session=opened.session,
            ranks=ranks.executor,
            geometry=geometry,
            begin_keys=self._keys.begin,
            planner=Planner(
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens, is_on=config.planner.enabled
            ),
            tables=self._tables,
            resident=self._resident if config.vllm.prefix_protection else None,
            open_pins=self._open_pins,
            rank_count=setup.ranks,
            has_prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            stores=setup.role != "kv_consumer",
            announces=is_producer if self._has_shared and config.store.write_policy == "through" else None,
            events=events,
            recorder=opened.recorder,
            journal=opened.journal,
        )
        ranks.executor.when_leaving(self._leave)
        logger.info(
            "kvtier is ready: chunks of %d tokens, %d KV groups, %d ranks, %s",
            *(geometry.chunk_tokens, len(geometry.groups), setup.ranks),
            ", ".join(f"{it.name} {getattr(it, kind_of(it).where)}" for it in config.tiers) or "host memory only",
        )

    def _events(self) -> tuple[Movements, Events] | tuple[None, None]:
        """KV events of the first history group, if vLLM's configuration enables them."""
        setup = self._setup
        wanted = setup.vllm_config.kv_events_config
        for number, group in enumerate(setup.geometry.groups):
            if isinstance(group.validity, History) and wanted is not None and wanted.enable_kv_cache_events:
                movements = Movements(number)
                hash_tokens = setup.kv_cache_config.hash_block_size
                return movements, self._open_events(movements, hash_tokens=hash_tokens, table=group.tables[0].number)
        return None, None

    @property
    def has_news(self) -> bool:
        """Whether an idle engine should take a step, for metrics, events or pinned blocks."""
        has_counts = self._stats is not None and self._stats.hurry()
        return has_counts or (self.scheduler is not None and self.scheduler.has_news)

    def stats(self) -> Stats | None:
        """Metrics since the last call; None if there are none, or the interval is not over."""
        return None if self._stats is None else self._stats.take()

    def called(self, method: str, adapter: LoraRequest | None) -> None:
        """Take a call of vLLM to its workers, before it is made; see `weights.watch_calls`."""
        if self.scheduler is None or self._keys is None:
            return
        if adapter is None:
            self.scheduler.weights_change(f"{method}()")
        else:
            self._keys.loaded(adapter)

    def reset(self) -> bool:
        """Make everything cached before now unreachable for this engine."""
        if self.scheduler is None or self._keys is None:
            return False
        self._keys.new_epoch()
        if not self.scheduler.reset():
            return False
        logger.info(
            "the cache was reset: this engine does not find KV stored before. After a restart it finds that KV again, "
            "and not the KV stored since the reset. To delete KV for good, run `kvtier inspect purge`"
        )
        return True

    def close(self) -> None:
        """Write stored chunks to the lower tiers, within `limits.close_deadline_s`. A second call does nothing."""
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is None:
                return
            opened.session.close(self._setup.config.limits.close_deadline_s)
            if self.scheduler is not None:
                self.scheduler.close()

    def _leave(self) -> None:
        """Close when a worker's process is about to end: vLLM ends its workers before its scheduler."""
        threading.Thread(target=self.close, name="kvtier close", daemon=True).start()


class WorkerSide:
    """A rank and its worker, in a worker's process.

    Args:
        setup: settings and identity of the engine.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self._worker: Worker | None = None
        self._rank: Rank | None = None
        self._server: RankServer | None = None

    @property
    def worker(self) -> Worker:
        """Exists once KV memory is registered."""
        assert self._worker is not None
        return self._worker

    @property
    def handshake(self) -> Mapping[str, Any] | None:
        """The address at which the scheduler side reaches this rank."""
        return None if self._server is None else self._server.handshake

    def open(self, kv_caches: Mapping[str, Any]) -> None:
        """Open the rank on vLLM's KV memory.

        Raises:
            UnsupportedModelError: the KV memory does not match its configuration.
            ConfigError: a setting is wrong, or a tier's path cannot be used.
        """
        from kvtier.connect.vllm.copier import open_copier  # noqa: PLC0415 - imports torch, for the worker only
        from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415

        setup = self._setup
        config = setup.config
        layers = setup.vllm_config.compilation_config.static_forward_context
        copier, layout, device = open_copier(setup.geometry, setup.kv_cache_config, kv_caches, layers)
        number = setup.vllm_config.parallel_config.rank % setup.ranks
        held = held_parts(setup.vllm_config, setup.kv_cache_config, setup.geometry, number)
        self._rank = open_rank(
            config,
            layout.with_parts(held),
            setup.identity.fingerprint.digest,
            copier,
            rank=number,
            ranks=setup.ranks,
            page_lock=cuda_page_lock(config.host.page_lock) if device.type == "cuda" else None,
        )
        if number == 0:
            note_fingerprint(config, setup.identity.fingerprint)
        self._worker = worker = Worker(copier, self._look())
        self._server = RankServer(self._rank, worker.receive)

    def _look(self) -> Callable[..., str]:
        config = self._setup.vllm_config
        try:
            model = weights.on_stack("get_model")()
            return weights.WeightSample(model, has_moving_experts=config.parallel_config.enable_eplb).look
        except Exception as error:  # noqa: BLE001 - vLLM's models are many, and the engine must start
            logger.warning(
                "kvtier cannot look at the model's weights (%r): it notices only changes that vLLM is called for", error
            )
        return no_look

    def close(self) -> None:
        """Close the rank once the core no longer needs it."""
        if self._rank is None or self._server is None:
            return
        deadline_s = self._setup.config.limits.close_deadline_s
        if not self._server.is_here:
            deadline_s = min(deadline_s, LEAVE_S)
        self._server.leave(deadline_s)
        self._rank.close(1.0)
        self._server.close(1.0)
