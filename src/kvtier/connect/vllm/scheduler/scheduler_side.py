"""Opens the scheduler side at the start of the scheduler's process, and closes it at the end."""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from kvtier.config.sections import Config
from kvtier.connect.engine_metrics import StatsReader
from kvtier.connect.vllm import support
from kvtier.connect.vllm.engine_hooks import WorkerCall, decoder
from kvtier.connect.vllm.engine_setup import EngineSetup
from kvtier.connect.vllm.geometry import Geometry, TableLayout
from kvtier.connect.vllm.requests.keys import KeyMaker
from kvtier.connect.vllm.requests.kv_events import STORAGE, Events, Extras, Source
from kvtier.connect.vllm.requests.miss_reasons import RequestHistory
from kvtier.connect.vllm.requests.request_events import RequestEvents
from kvtier.connect.vllm.requests.transfer_params import Announces, TransferParams
from kvtier.connect.vllm.scheduler.engine_cache import EngineCache
from kvtier.connect.vllm.scheduler.lookups import UNKNOWN_PLACE, hit_sources
from kvtier.connect.vllm.scheduler.scheduler import Scheduler
from kvtier.connect.vllm.scheduler.weight_calls import WeightCalls
from kvtier.connect.vllm.vllm_types import Request, VllmScheduler
from kvtier.core.planner import Planner
from kvtier.layout import History, KvLayout, engine_bytes, of_all_ranks
from kvtier.runtime.control_handlers import Control, EngineCalls
from kvtier.runtime.control_socket import ControlError, ControlSocket
from kvtier.runtime.observers.guards import Feature, unless_unusable
from kvtier.runtime.open import open_core
from kvtier.runtime.rank_server import connect
from kvtier.tier.registry import kind_of

logger = logging.getLogger(__name__)


class SchedulerSide:
    """kvtier's core and `Scheduler`, in the process of vLLM's scheduler. It connects to the workers, which are up.

    Args:
        setup: settings and identity of the engine.
        handshakes: the workers' handshakes.
        layouts: each worker's layout for totals of the engine (`Rank.counted`).
        engine: vLLM's scheduler.
        guarded: wraps a callback, so that it cannot raise into vLLM's block pool.
        failure: returns the internal error that has switched the connector off; empty if there was none.
        extras_of, hash_of: functions as in `Events`.
        wake: makes an idle engine take a step. Any thread may call it.
        ask: calls a method of `WorkerSide` in all workers (`WeightCalls`).
        is_alone: whether no other connector passes KV between engines (`EngineCache`, `TransferParams`).

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
        self.engine_cache = EngineCache(
            engine,
            is_alone=is_alone,
            has_prefix_caching=vllm_config.cache_config.enable_prefix_caching,
            protects_prefixes=config.vllm.prefix_protection,
            guarded=guarded,
        )
        has_shared = any(kind_of(it).is_shared(it) for it in config.tiers)
        for warning in support.transfer_warnings(vllm_config.kv_transfer_config, setup.role, has_shared=has_shared):
            logger.warning("%s", warning)
        if setup.identity.is_private:
            logger.warning("KV is kept in host memory only: %s", setup.identity.detail)
        if config.store.token_shares and not geometry.shares:
            logger.warning("store.token_shares has no effect: only a model with MLA in all layers has token shares")
        self._close_deadline_s = config.limits.close_deadline_s
        ranks = connect(handshakes)
        self._ranks = ranks.executor
        self.events_table, events = _events(setup, extras_of, hash_of)
        is_producer = setup.role == "kv_producer"
        announces = Announces.ALWAYS if is_producer else Announces.IF_ASKED
        if not has_shared or config.store.write_policy != "through" or setup.role == "kv_consumer":
            announces = Announces.NEVER
        opened = open_core(
            *(config, layouts[0], setup.identity.fingerprint.digest, ranks),
            observer=events,
            publishes=is_producer,
            texts=events,
            layouts=layouts,
        )
        self._session = opened.session
        with ExitStack() as undo:
            undo.callback(opened.session.close, self._close_deadline_s)
            self._keys = KeyMaker(
                *(opened.root, geometry.chunk_tokens, vllm_config),
                lambda name: self.scheduler.invalidation.weights_change(f"adapter {name!r}"),
                lambda identifier: self.scheduler.invalidation.item_doubted(identifier),  # noqa: PLW0108 - it is made below
                loss=config.store.loss,
            )
            history = RequestHistory(opened.session, geometry, lambda: self._keys.refusal, decoder(engine))
            self.stats = opened.session.guards.around(Feature.EXPORT, StatsReader(opened.metrics), hurry=False)
            self.scheduler = Scheduler(
                session=opened.session,
                ranks=self._ranks,
                geometry=geometry,
                keys=self._keys,
                planner=Planner(
                    step_tokens=vllm_config.scheduler_config.max_num_batched_tokens, is_on=config.planner.enabled
                ),
                engine_cache=self.engine_cache,
                params=TransferParams(
                    *(opened.session, announces),
                    is_alone=is_alone,
                    allows_high_priority=config.vllm.allow_high_priority,
                    loss=config.store.loss,
                ),
                log=RequestEvents(
                    *(opened, of_all_ranks(layouts, engine_bytes), events),
                    history=None if config.control.socket is None else history,
                ),
                stores=setup.role != "kv_consumer",
                drafted_tokens=support.drafted_tokens(vllm_config),
            )
            undo.callback(self.scheduler.close)
            self.calls = WeightCalls(
                ask,
                self.scheduler,
                self._keys,
                can_keep=bool(getattr(vllm_config.model_config, "sleep_preserve_parameter_names", ()))
                and vllm_config.lora_config is None,
                lends_host=self._session if config.vllm.sleep_frees_host else None,
            )
            invalidation = self.scheduler.invalidation
            self.engine_cache.watch_resets(
                guarded(invalidation.own_reset_begins), guarded(invalidation.own_reset_ended)
            )
            self._session.watch(
                None if events is None else events.watched, lambda: wake() if self.scheduler.has_news else None
            )
            self._control = self._open_control(config, geometry, history, failure)
            undo.pop_all()
        # vLLM ends its workers before its scheduler, so a worker that is about to end starts the close.
        self._ranks.when_leaving(lambda: threading.Thread(target=self.close, name="kvtier close", daemon=True).start())
        logger.info(
            "kvtier is ready: chunks of %d tokens, %d KV groups, %d ranks, %s",
            *(geometry.chunk_tokens, len(geometry.groups), setup.ranks),
            ", ".join(f"{it.name} {getattr(it, kind_of(it).where)}" for it in config.tiers) or "host memory only",
        )

    @property
    def has_news(self) -> bool:
        """Whether an idle engine should take a step for metrics, events or pinned blocks."""
        return self.stats.hurry() or self.scheduler.has_news

    def hit_sources(self, request: Request, tokens: int) -> dict[str, int]:
        """Return how many of a load's `tokens` require each kind of place, by vLLM's name of the kind."""
        return self._session.guards.run(
            Feature.METRICS,
            lambda: hit_sources(self.scheduler.requests[request.request_id], tokens, self._hit_sources),
            otherwise={UNKNOWN_PLACE: tokens},
        )

    noted = ("add_lora", "reset_encoder_cache")
    """Harmless methods of vLLM's workers whose calls `around` also receives."""

    @contextmanager
    def around(self, call: WorkerCall) -> Generator[None]:
        """Do what a call of vLLM to its workers requires before and after it (`engine_hooks.watch_calls`)."""
        if call.method == "add_lora" and call.args:
            self._keys.loaded(call.args[0])
            yield
        elif call.method == "reset_encoder_cache":
            yield
            if call.is_plain:
                self.calls.encoder_was_reset()
        else:
            with self.calls.around(call):
                yield

    def reset(self) -> bool:
        """Make everything cached before now unreachable for this engine."""
        self._keys.new_epoch()
        if not self.scheduler.invalidation.reset():
            return False
        if self.calls.was_reset():
            return True
        logger.info(
            "the cache was reset: this engine no longer finds the KV stored before. After a restart, it finds that KV "
            "again, but not the KV stored since the reset. To delete KV for good, run `kvtier inspect purge`"
        )
        return True

    def _open_control(
        self, config: Config, geometry: Geometry, history: RequestHistory, failure: Callable[[], str]
    ) -> ControlSocket | None:
        if config.control.socket is None:
            return None
        engine = EngineCalls(
            chain=self._keys.chain_of,
            hit_tokens=geometry.hit_tokens,
            clear=self._clear,
            problem=lambda: (
                f"an internal error has switched kvtier off: {failure()}"
                if failure()
                else self._ranks.lost or self.scheduler.invalidation.problem
            ),
            why=history.why,
            note="vLLM's own prefix cache is kept: POST /reset_prefix_cache empties it",
        )
        return unless_unusable(
            partial(ControlSocket, config.control.socket, Control(self._session, engine, config.limits.retain_s).answer)
        )

    def _clear(self, salt: str | None) -> None:
        """Make unreachable what is cached: everything if `salt` is None, else the KV of requests with this salt."""
        if salt is None:
            self._keys.new_epoch()
        elif not self._keys.clear_salt(salt):
            raise ControlError("too many salts were cleared one by one; clear the whole cache instead (all = true)")
        self.scheduler.invalidation.clear(salt)
        logger.info("the cache was cleared%s by a control call", "" if salt is None else " for one salt")

    def close(self) -> None:
        """Write stored chunks to lower tiers within `limits.close_deadline_s`. Idempotent. Any thread may call it."""
        if self._control is not None:
            self._control.close()
        self._session.close(self._close_deadline_s)
        self.scheduler.close()


def _events(
    setup: EngineSetup,
    extras_of: Callable[[Request, int, int], Extras],
    hash_of: Callable[[Any, tuple[int, ...], Extras], Any],
) -> tuple[TableLayout | None, Events | None]:
    """Return the vLLM group whose KV events are published, the first with full attention, and its events.

    Return (None, None) if vLLM's configuration disables KV events, or there is no such group.
    """
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
