"""Opening and closing: what the connector holds in the scheduler's process, and what in a worker's."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtier.config.sections import Config
from kvtier.connect.vllm import identity, request_keys, selftest, support, versions
from kvtier.connect.vllm.block_pool import Pins
from kvtier.connect.vllm.events import Events, Movements
from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.identity import note_fingerprint
from kvtier.connect.vllm.log import follow_engine
from kvtier.connect.vllm.scheduler import Scheduler
from kvtier.connect.vllm.settings import settings_of
from kvtier.connect.vllm.stats import Meters, Stats
from kvtier.connect.vllm.vllm_types import BlockTables, KvCacheConfig, Request, VllmConfig
from kvtier.connect.vllm.worker import Worker
from kvtier.core.planner import Planner
from kvtier.layout import History
from kvtier.runtime.open import OpenedSession, open_core
from kvtier.runtime.rank import Rank, open_rank
from kvtier.runtime.rank_server import RankServer, connect

logger = logging.getLogger(__name__)

LEAVE_S = 4.0
"""How long a worker that is to end waits until what was stored has come to its tiers. VLLM gives it 5 s altogether
(`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`)."""


def check_start(vllm_config: VllmConfig) -> tuple[Config, str]:
    """The settings, and vLLM's version, of an engine that is started; all that can be refused without its KV.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
    """
    config = settings_of(vllm_config)
    version = versions.check_engine(config.vllm.unsupported)
    support.check_engine(vllm_config)
    return config, version


@dataclass(frozen=True, slots=True)
class Opening:
    """What both halves are made of; it comes out the same in every process of an engine."""

    vllm_config: VllmConfig
    kv_cache_config: KvCacheConfig
    config: Config
    geometry: Geometry
    identity: identity.Identity
    build: str
    """Of vLLM."""

    @staticmethod
    def of(vllm_config: VllmConfig, kv_cache_config: KvCacheConfig) -> "Opening":
        """Look at an engine.

        Raises:
            ConfigError: a setting is wrong, or this release of vLLM is not supported.
            UnsupportedModelError: the engine cannot be served correctly.
        """
        config, version = check_start(vllm_config)
        follow_engine(config.log.level)
        geometry = Geometry.of(kv_cache_config, config.store.chunk_tokens)
        build = versions.build_of(version)
        identified = identity.identify(vllm_config, build)
        if identified.is_private:
            # Nobody can tell later what these bytes belong to.
            config = replace(
                config, directory=replace(config.directory, path=None), disk=replace(config.disk, path=None)
            )
        return Opening(vllm_config, kv_cache_config, config, geometry, identified, build)

    @property
    def ranks(self) -> int:
        """Workers of the engine."""
        return self.vllm_config.parallel_config.tensor_parallel_size


class SchedulerSide:
    """What lives in the scheduler's process: the core, and what decides over it.

    Args:
        opening: what it is made of.
        tables: the block ids of a request, as vLLM has them now.
        resident: the block ids in vLLM's own cache that a request would be given now.
        open_pins: vLLM's block pool, once it is there.
        open_events: turns movements into vLLM's events, given the tokens of its hashes and a KV group.
    """

    def __init__(
        self,
        opening: Opening,
        tables: Callable[[str], BlockTables],
        resident: Callable[[Request], BlockTables],
        open_pins: Callable[[Callable[[int], None]], Pins],
        open_events: Callable[[Movements, int, int], Events],
    ) -> None:
        self.scheduler: Scheduler | None = None
        """None until all workers are up: before that everything is a miss."""
        self._opening = opening
        self._tables = tables
        self._resident = resident
        self._open_pins = open_pins
        self._open_events = open_events
        self._opened: OpenedSession | None = None
        self._requests: request_keys.Requests | None = None
        self._meters: Meters | None = None
        self._lock = threading.Lock()
        for warning in support.warnings(opening.vllm_config):
            logger.warning("%s", warning)
        if opening.identity.is_private:
            logger.warning("nothing is kept below host memory: %s", opening.identity.detail)

    def connect(self, handshakes: Sequence[Mapping[str, Any]]) -> None:
        """All workers are up.

        Raises:
            ProtocolError: one of them cannot be reached.
            ConfigError: the store's secret cannot be had.
        """
        opening = self._opening
        vllm_config, geometry = opening.vllm_config, opening.geometry
        limits = opening.config.limits
        below = connect(handshakes, limits.transfer_deadline_s)
        movements, events = self._events()
        digest = opening.identity.fingerprint.digest
        opened = open_core(opening.config, geometry.layout, digest, below, observer=movements)
        self._opened = opened
        self._requests = request_keys.Requests(opened.root, geometry.chunk_tokens, vllm_config)
        self._meters = Meters(opened.metrics)
        self.scheduler = Scheduler(
            session=opened.session,
            ranks=below.mover,
            geometry=geometry,
            begin_keys=self._requests.begin,
            planner=Planner(
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens, is_on=opening.config.planner.enabled
            ),
            tables=self._tables,
            resident=self._resident if opening.config.vllm.prefix_protection else None,
            open_pins=self._open_pins,
            bytes_per_token=geometry.layout.bytes_per_token * opening.ranks,
            can_wait=_can_wait(vllm_config),
            has_prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            events=events,
            recorder=opened.recorder,
        )
        below.mover.when_leaving(self._leave)
        logger.info(
            "kvtier is ready: chunks of %d tokens, %d KV groups, %d ranks, %s",
            *(geometry.chunk_tokens, len(geometry.groups), opening.ranks),
            f"directory {opening.config.directory.path}" if below.tiers else "host memory only",
        )

    def _events(self) -> tuple[Movements, Events] | tuple[None, None]:
        """What routers are told, if somebody wants it and there is history to tell of."""
        opening = self._opening
        wanted = opening.vllm_config.kv_events_config
        for number, group in enumerate(opening.geometry.groups):
            if isinstance(group.validity, History) and wanted is not None and wanted.enable_kv_cache_events:
                movements = Movements(number)
                hash_tokens = opening.kv_cache_config.hash_block_size
                return movements, self._open_events(movements, hash_tokens, group.tables[0].number)
        return None, None

    @property
    def has_news(self) -> bool:
        """Whether a step is due although there is nothing to compute, so that something of ours gets to vLLM."""
        has_counts = self._meters is not None and self._meters.hurry()
        return has_counts or (self.scheduler is not None and self.scheduler.has_news)

    def stats(self) -> Stats | None:
        """What has been counted since the last call; None when it is too soon."""
        return None if self._meters is None else self._meters.take()

    def reset(self) -> bool:
        """Nothing that was cached before is found any more."""
        if self.scheduler is None or self._requests is None:
            return False
        self._requests.new_epoch()
        self.scheduler.forget_all()
        logger.info(
            "the cache was reset: until this engine ends nothing from before is found. After its end what was stored "
            "before is found again, and what is stored from now on is not"
        )
        return True

    def close(self) -> None:
        """Bring what was stored to the lower tiers, within the deadline of the settings. Twice is fine."""
        with self._lock:
            opened, self._opened = self._opened, None
            if opened is None:
                return
            opened.session.close(self._opening.config.limits.close_deadline_s)
            if self.scheduler is not None:
                self.scheduler.close()

    def _leave(self) -> None:
        """A worker's process is about to end: vLLM ends its workers before its scheduler."""
        threading.Thread(target=self.close, name="kvtier close", daemon=True).start()


class WorkerSide:
    """What lives in a worker's process: its rank, and its reports to vLLM.

    Args:
        opening: what it is made of.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._worker: Worker | None = None
        self._rank: Rank | None = None
        self._server: RankServer | None = None

    @property
    def worker(self) -> Worker:
        """Reports to vLLM; there is one once KV has been registered."""
        assert self._worker is not None
        return self._worker

    @property
    def handshake(self) -> Mapping[str, Any] | None:
        """What the scheduler's half needs to reach this rank."""
        return None if self._server is None else self._server.handshake

    def open(self, kv_caches: Mapping[str, Any]) -> None:
        """VLLM has allocated its KV.

        Raises:
            UnsupportedModelError: it does not lie as its configuration says.
            ConfigError: a setting is wrong or a place cannot be used.
        """
        from kvtier.connect.vllm.copier import open_copier  # noqa: PLC0415 - torch, which the other half does without
        from kvtier.device.page_lock import cuda_page_lock  # noqa: PLC0415

        opening = self._opening
        config = opening.config
        layers = opening.vllm_config.compilation_config.static_forward_context
        copier, layout, device = open_copier(opening.geometry, opening.kv_cache_config, kv_caches, layers)
        selftest.check(config, opening.build, opening.identity.fingerprint.digest, layout)
        number = opening.vllm_config.parallel_config.rank % opening.ranks
        self._rank = open_rank(
            config,
            layout,
            opening.identity.fingerprint.digest,
            copier,
            rank=number,
            ranks=opening.ranks,
            page_lock=cuda_page_lock(config.host.page_lock) if device.type == "cuda" else None,
        )
        if number == 0:
            note_fingerprint(config, opening.identity.fingerprint)
        self._worker = worker = Worker(copier)
        self._server = RankServer(self._rank, worker.hear)

    def close(self) -> None:
        """End this rank, as soon as the core needs it no more."""
        if self._rank is None or self._server is None:
            return
        deadline_s = self._opening.config.limits.close_deadline_s
        if not self._server.is_here:
            deadline_s = min(deadline_s, LEAVE_S)
        self._server.leave(deadline_s)
        self._rank.close(1.0)
        self._server.close(1.0)


def _can_wait(vllm_config: VllmConfig) -> bool:
    """Whether vLLM takes it well when a load that a step has waited for has failed.

    It takes no report of blocks from steps that overlap. And where prompts are cut short, a request that shares such
    blocks could be computed before the one that is to fill them.
    """
    return vllm_config.max_concurrent_batches == 1 and not vllm_config.scheduler_config.long_prefill_token_threshold
