"""Puts kvtier's tiers below the host memory of vLLM's own tiering manager.

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 34359738368,
        "secondary_tiers": [{"type": "KvtierSecondaryTier", "module_path": "kvtier.connect.vllm.secondary_tier",
                             "tiers": ["disk:/path/to/kv"]}]}

vLLM calls all methods in its scheduler's process. Only `drain_jobs` and `shutdown` wait for a tier, because they end
all transfers. After an internal error every lookup is a miss.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np

from kvtier.connect.engine_metrics import StatsReader
from kvtier.connect.model_files import adapter_versions, note_fingerprint
from kvtier.connect.vllm.checkpoint_reads import doubt_of
from kvtier.connect.vllm.engine_hooks import WorkerCall, check, on_stack, request_on_stack, watch_calls
from kvtier.connect.vllm.requests.hints import NO_HINTS, safe_hints
from kvtier.connect.vllm.requests.keys import EPOCH_BYTES, KeyMaker
from kvtier.connect.vllm.tiering.async_jobs import Calls
from kvtier.connect.vllm.tiering.engine_setup import ASK_WORKERS_S, ORIGIN, page_details, setup_of
from kvtier.connect.vllm.tiering.imports import OffloadingConnectorStats, offload, tiering
from kvtier.connect.vllm.tiering.metrics import add_to, tiering_metrics
from kvtier.connect.vllm.vllm_logging import follow_engine
from kvtier.connect.vllm.vllm_types import LoraRequest, TransferJob
from kvtier.errors import ConfigError
from kvtier.keys.chain import Extra
from kvtier.runtime.observers.guards import Feature, Guards
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectId, ObjectStore, Origin
from kvtier.types import ChunkKey

logger = logging.getLogger(__name__)

DRAIN_S = 2.0
"""Seconds that `drain_jobs` gives transfers to end by themselves, while the engine waits."""

EVENTS_MAX = 1 << 14
"""Maximum number of events kept until vLLM takes them. It does so in each step."""

_KEY_DOMAIN = b"kvtier.vllm.tiering\0"

T = TypeVar("T")


class _Named:
    """What determines the names of a request's objects, in addition to vLLM's keys."""

    def __init__(self, extras: Sequence[Extra], loaded: LoraRequest | None, identifiers: frozenset[str]) -> None:
        self.loaded = loaded
        adapter = b"".join(extra.value for extra in extras if extra.kind == "adapter")
        self._adapter = hashlib.sha256(adapter).digest() if adapter else b""
        self._items = [extra for extra in extras if extra.kind == "item"]
        self.identifiers = identifiers
        """vLLM's identifiers of the request's images and other items."""
        self.is_doubted = False
        """Whether one of the identifiers stands for several contents."""
        self.hints = NO_HINTS
        """The request's hints. Only `opt_out` and `max_load_tokens` 0 have an effect: vLLM manages its host memory."""
        self.ends: dict[tuple[int, int], ChunkKey] = {}
        """Keys of stored or loaded objects, by group and by the number of tokens up to their end."""

    def content(self, end: int) -> bytes:
        """Return 32 bytes that identify the adapter and the items that start before token `end`; empty for none."""
        items = [extra.value for extra in self._items if extra.offset < end]
        if not items:
            return self._adapter
        return hashlib.sha256(b"items\0" + b"\0".join((self._adapter.hex().encode(), *items))).digest()


class KvtierSecondaryTier(tiering.SecondaryTierManager):
    """A secondary tier for vLLM's `TieringOffloadingManager` (vLLM 0.32 and 0.33), which documents each method.

    Args:
        offloading_spec: vLLM's specification, with the division into chunks.
        primary_kv_view: vLLM's host memory, of shape [chunks, bytes of a chunk].
        tier_type: label of this tier in vLLM's metrics.
        backpressure_detector: vLLM's detector.
        locality: ``LOCAL`` or ``REMOTE``, for events and `kv_load_tiers` of requests.
        enable_kv_events: whether to announce stored blocks, if vLLM's KV events are on.
        settings: settings of kvtier, nested by section or with dotted names.

    Raises:
        ConfigError: a setting is wrong, or this release of vLLM is not supported.
        UnsupportedModelError: the engine cannot be served correctly.
        TierError: a required tier cannot be opened.
        RuntimeError: the system cannot start a thread.
    """

    medium = offload.Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # noqa: ANN401
        *,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **settings: object,
    ) -> None:
        tiering.SecondaryTierManager.__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        for name, value, allowed in (
            ("locality", locality, [None, *(it.value for it in offload.Locality)]),
            ("enable_kv_events", enable_kv_events, [False, True]),
        ):
            if value not in allowed:
                raise ConfigError(
                    setting=name, value=repr(value), origin=ORIGIN, allowed=", ".join(map(str, allowed[-2:]))
                )
        self.locality = None if locality is None else offload.Locality(locality)
        self._events: list[Any] = []
        self._drained: list[Any] = []
        """Results of jobs that a reset ended."""
        self._has_events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        check("engine", "core", "tiering")
        # vLLM passes neither its configuration nor its workers.
        vllm_config, workers = on_stack("_vllm_config"), on_stack("model_executor")
        setup = setup_of(
            settings,
            offloading_spec,
            vllm_config,
            on_stack("_kv_cache_config"),
            self.block_size_bytes,
            workers.collective_rpc(page_details, timeout=ASK_WORKERS_S),
        )
        doubts: list[str] = workers.collective_rpc(doubt_of, timeout=ASK_WORKERS_S, args=(setup.identity.versions,))
        private = setup.identity.detail or max(doubts)
        self._config = setup.config
        follow_engine(self._config.log.level)
        self._prefix_groups = setup.prefix_groups
        self._keys = KeyMaker(
            *(b"", setup.layout.chunk_tokens, vllm_config),
            lambda name: self._weights_change(f"adapter {name!r}"),
            self._item_doubted,
        )
        self._named: dict[str, _Named] = {}
        """Open requests that can be cached, by id."""
        self._epoch = b""
        """Empty before the first reset, then random bytes. They are part of every later name."""
        self._is_off = bool(private)
        self._pages = np.asarray(primary_kv_view)
        self._store: ObjectStore | None = None
        if self._is_off:
            logger.warning("kvtier stores and finds nothing in this engine: %s", private)
        else:
            replica = int(vllm_config.parallel_config.data_parallel_index)
            self._store = open_object_store(
                self._config,
                setup.layout,
                setup.identity.fingerprint.digest,
                rank=replica,
                ranks=max(int(vllm_config.parallel_config.data_parallel_size), replica + 1),
            )
            note_fingerprint(self._config, setup.identity.fingerprint)
            logger.info(
                "kvtier is ready: chunks of %d tokens and %d bytes, %s",
                *(setup.layout.chunk_tokens, self.block_size_bytes),
                ", ".join(tier.label for tier in self._config.tiers),
            )
        probe_s = sum(tier.probe_deadline_s for tier in self._config.tiers)
        self._guards = Guards() if self._store is None else self._store.guards
        self._stats = None if self._store is None else StatsReader(self._store.metrics)
        self._calls = Calls(self._store, probe_s, self._guarded)
        watch_calls(workers, self._called, ["add_lora"])

    # ---- requests --------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:  # noqa: ANN401
        """Identify the request's contents that vLLM's keys do not cover."""
        self._guarded(lambda: self._name(req_context), None)
        return offload.RequestOffloadingContext()

    def _name(self, context: Any) -> None:  # noqa: ANN401
        request = request_on_stack(context.req_id)
        extras = None if request is None else self._keys.extras(request)
        if request is not None and extras is not None:
            # vLLM's hashes cover the salt, but only the name and path of an adapter, and the client's name for an item.
            items = frozenset(item.identifier for item in request.mm_features)
            named = _Named(extras, request.lora_request, items)
            named.hints = safe_hints(request)
            context.set_state(named)
            self._named[context.req_id] = named

    def _item_doubted(self, identifier: str) -> None:
        for named in self._named.values():
            named.is_doubted |= identifier in named.identifiers

    def _is_unchanged(self, adapter: LoraRequest | None) -> bool:
        """Return whether an adapter still has the files of its first request, so that vLLM has read no others."""
        return adapter is None or self._keys.adapters.named(adapter.lora_int_id) == (
            adapter_versions(adapter.lora_path),
        )

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401
        """Forget the request's answers."""
        self._named.pop(req_context.req_id, None)
        self._calls.forget(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> Any:  # noqa: ANN401
        """Return HIT, MISS, or RETRY while a thread asks the tiers, for at most the sum of their `probe_deadline_s`."""
        found = self._guarded(lambda: self._found(key, req_context), otherwise=False)
        result = offload.LookupResult
        return result.RETRY if found is None else result.HIT if found else result.MISS

    def _found(self, key: bytes, context: Any) -> bool | None:  # noqa: ANN401
        named = context.get_state(_Named)
        if named is None or named.is_doubted or named.hints.max_load_tokens == 0:
            return False
        end = context.get_offload_key_position(key) or 0
        is_prefix = _group_of(key) in self._prefix_groups
        return self._calls.ask(context.req_id, key, lambda: self._object(key, end, named), is_prefix=is_prefix)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ANN401, ARG002
        """Pass this step's lookups to a thread."""
        self._guarded(self._calls.flush, None)

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start storing chunks."""
        self._submit(job_metadata, self._config.limits.store_deadline_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start loading chunks."""
        self._submit(job_metadata, self._config.limits.load_deadline_s)

    def _submit(self, job: TransferJob, limit_s: float) -> None:
        items = self._guarded(lambda: self._items(job), [])
        self._calls.submit(job, items, time.monotonic() + limit_s)

    def _items(self, job: TransferJob) -> list[ObjectBytes]:
        """Return a job's objects and their memory; empty if the objects have no names or may not be stored."""
        keys, context = [*job.keys], job.req_context
        named: _Named | None = context.get_state(_Named)
        if named is None or named.is_doubted or not self._is_unchanged(named.loaded):
            return []
        if named.hints.opt_out and not job.is_promotion:
            return []
        ends = [(_group_of(key), context.get_offload_key_position(key) or 0) for key in keys]
        objects = [self._object(key, end, named) for key, (_, end) in zip(keys, ends, strict=True)]
        named.ends.update((end, item.key) for end, item in zip(ends, objects, strict=True))
        origins = [self._origin(*end, named) for end in ends]
        rows = [(self._pages[chunk],) for chunk in job.chunk_ids]
        return [ObjectBytes(*it) for it in zip(objects, rows, origins, strict=True)]

    def _origin(self, group: int, end: int, named: _Named) -> Origin:
        chunk = self._prefix_groups.get(group, 0)
        return Origin(named.ends.get((group, end - chunk)), max(end // chunk - 1, 0)) if chunk else Origin()

    def _object(self, key: bytes, end: int, named: _Named) -> ObjectId:
        # All keys of vLLM have the same length, an epoch has 0 or 16 bytes, and a content 0 or 32. So different parts
        # never give the same input.
        return ObjectId(ChunkKey(hashlib.sha256(_KEY_DOMAIN + self._epoch + named.content(end) + key).digest()))

    def get_finished_jobs(self) -> list[Any]:
        """Return the results of jobs that have ended since the last call."""
        drained, self._drained = self._drained, []
        return [*drained, *(self._result(*done) for done in self._calls.finished())]

    def _result(self, job: TransferJob, keys: Sequence[bytes], seconds: float) -> Any:  # noqa: ANN401
        if job.is_promotion:
            keys = () if self._is_off else keys  # after a change of weights, the KV may be from before
            self._calls.miss(job.req_context.req_id, frozenset(job.keys).difference(keys))
        elif self._has_events and keys and len(self._events) < EVENTS_MAX:
            self._guards.run(
                Feature.EVENTS,
                lambda: self._events.append(
                    offload.OffloadingEvent([*keys], self.medium, removed=False, locality=self.locality)
                ),
                otherwise=None,
            )
        return tiering.JobResult(
            job_id=job.job_id,
            success=len(keys) == len(job.keys),
            successful_keys=keys if job.is_promotion else None,
            transfer_time=seconds,
            transfer_bytes=len(keys) * self.block_size_bytes,
        )

    def take_events(self) -> list[Any]:
        """Return announcements of stored blocks. Evictions are not announced."""
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: object) -> dict[str, Any]:  # noqa: ARG003 - vLLM's interface
        """Return the metrics of kvtier, by their names in `/metrics`."""
        return tiering_metrics(offload)

    def get_stats(self) -> Any:  # noqa: ANN401 - vLLM's
        """Return the change in kvtier's metrics since the last report. At most four reports are made per second."""
        increase = None if self._stats is None else self._guards.run(Feature.EXPORT, self._stats.take, otherwise=None)
        if increase is None:
            return None
        stats = OffloadingConnectorStats()
        self._guards.run(Feature.EXPORT, add_to, stats, increase, otherwise=None)
        return stats

    def drain_jobs(self) -> None:
        """End all transfers, because vLLM resets its host memory. This engine no longer finds what was stored before.

        Raises:
            TimeoutError: a copy still accesses vLLM's memory, which must not be reused.
        """
        self._calls.drain(DRAIN_S)
        self._drained = self.get_finished_jobs()
        self._events.clear()  # vLLM has announced that all blocks are gone
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        logger.info(
            "the cache was reset: this engine no longer finds the KV stored before. After a restart, it finds that KV "
            "again, but not the KV stored since the reset"
        )

    def shutdown(self) -> None:
        """Finish the stores within `limits.close_deadline_s`, and end all threads. Idempotent.

        Raises:
            TimeoutError: a copy still accesses vLLM's memory.
        """
        until_s = time.monotonic() + self._config.limits.close_deadline_s
        self._calls.close(self._config.limits.close_deadline_s)
        if self._store is not None:
            self._store.close(max(0.0, until_s - time.monotonic()))
        self._pages = np.empty((0, 0), np.int8)  # vLLM can unmap the memory only if nothing refers to it

    # ---- invalidation ----------------------------------------------------------------------------------------------

    def _called(self, call: WorkerCall) -> AbstractContextManager[None]:
        """Record a call to vLLM's workers before vLLM makes it (`engine_hooks.watch_calls`)."""
        if call.method == "add_lora" and call.args:
            self._guarded(lambda: self._keys.loaded(call.args[0]), None)
        else:
            self._weights_change(f"{call.method}()")
        return nullcontext()

    def _weights_change(self, what: str) -> None:
        if not self._is_off:
            self._is_off = True
            logger.error(
                "the weights have changed, or may have (%s): kvtier stores and finds nothing until the engine is "
                "restarted, because new KV would be stored under the old weights' name",
                what,
            )

    def _guarded(self, act: Callable[[], T], otherwise: T) -> T:
        """Return the result of `act`, or `otherwise` after an error or if kvtier is off. Any thread may call it."""
        if not self._is_off:
            try:
                return act()
            except Exception:
                self._is_off = True
                logger.exception("kvtier has failed and is off until a restart; requests are computed without it")
        return otherwise


def _group_of(key: bytes) -> int:
    return int.from_bytes(key[-4:], "big")
