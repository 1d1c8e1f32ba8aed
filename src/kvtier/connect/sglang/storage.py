"""The storage backend that SGLang's HiCache creates by name.

HiCache's threads call `batch_exists*`, `batch_get*` and `batch_set*` with pages of SGLang's own host pools. Once the
backend is attached, no method raises: a failure counts as a miss and is logged once.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple, cast

from kvtier.config.loader import flat, load, override
from kvtier.config.sections import Config
from kvtier.connect.model_files import note_fingerprint
from kvtier.connect.sglang import checkpoint_reads
from kvtier.connect.sglang import sglang_imports as sglang
from kvtier.connect.sglang.environment_probe import page_hash_problem
from kvtier.connect.sglang.host_pools import KV, StoredPool, describe
from kvtier.connect.sglang.identity import identify, leaves
from kvtier.connect.sglang.installed_engine import (
    COMPILE_ADVICE,
    EXTRA,
    SUPPORTED,
    check_version,
    installed,
    settings_in,
)
from kvtier.connect.sglang.sglang_types import (
    ExtraInfo,
    HostPool,
    Indices,
    Leaves,
    PoolTransfer,
    PoolTransferResult,
    StorageConfig,
)
from kvtier.connect.sglang.stats import CallKind, StorageStats
from kvtier.connect.sglang.weight_updates import forget, watch_weights
from kvtier.errors import ConfigError
from kvtier.layout import KvLayout, Loss
from kvtier.runtime.observers.guards import Feature
from kvtier.runtime.open_object_store import open_object_store
from kvtier.runtime.tiered_object_store import ObjectBytes, ObjectId, ObjectStore, Origin
from kvtier.tier.registry import kind_of
from kvtier.types import ChunkKey, Outcome

logger = logging.getLogger(__name__)

THREAD_S = 8.0
"""Seconds that a call in a storage thread may take. When SGLang empties its cache, it waits 10 s for its threads. After
that, it ends the engine."""

KEY_BYTES = 32
_KEY_DOMAIN = b"kvtier.sglang\0"
_NOTICES_MAX = 256


class _OwnRank(NamedTuple):
    """The position of this process among the engine's processes."""

    number: int
    ranks: int


def check_page_hash() -> None:
    """Log an error if SGLang cannot compile the hash that names its pages.

    The trial runs in its own folder. torch compiles under a lock without an owner. A process that ends meanwhile leaves
    the lock behind, and the next process waits for it forever.
    """
    try:
        problem = page_hash_problem()
    except OSError as error:  # no folder for the trial
        problem = str(error)
    if problem:
        logger.error(
            "SGLang cannot compile the hash that names its pages, so it finds none of its stored pages: %s; %s",
            problem,
            COMPILE_ADVICE,
        )


class KvtierStorage(sglang.HiCacheStorage):
    """Keeps pages of SGLang's host pools in kvtier's tiers.

    Args:
        storage_config: the model, the ranks, and the extra config with kvtier's settings.
        kwargs: empty in SGLang 0.5.23.

    Raises:
        ConfigError: a setting is wrong, the release is not supported, or the model cannot be identified.
    """

    def __init__(self, storage_config: StorageConfig, kwargs: object = None) -> None:
        del kwargs
        self._ranks = storage_config
        self._config: Config = settings_of(storage_config.extra_config)
        self._release = str(installed())
        check_version(installed(), self._config.sglang.unsupported)
        if storage_config.dcp_size > 1:
            raise ConfigError(
                f"SGLang's dcp_size = {storage_config.dcp_size} is not supported: SGLang {SUPPORTED[0]} then "
                "attaches no storage but its own files and Mooncake; allowed: 1, or serve without kvtier"
            )
        _check_common(self._config, storage_config)
        arguments = leaves(sglang.context())
        self._fingerprint, digested = identify(arguments, self._release)
        _check_alone(self._config.store.loss, arguments)
        self._place = _place()
        self._hosts: dict[str, HostPool] = {}
        """Host pools by name, in the order in which SGLang registers them."""
        self._pools: dict[str, StoredPool] = {}
        """Stored pools by name, except those without bytes."""
        self._store: ObjectStore | None = None
        """The tiers; None until all pools are known, and after `close`."""
        self._is_over = bool(doubt := checkpoint_reads.doubt(sglang.context(), digested))
        if doubt:
            logger.warning(
                "kvtier stores and finds nothing in this engine, because its KV cannot be identified: %s", doubt
            )
        self._noticed: set[str] = set()
        self._stats = StorageStats(bool(storage_config.enable_storage_metrics), _labels(storage_config))
        watch_weights(self._weights_change)
        threading.Thread(target=check_page_hash, name="kvtier page hash", daemon=True).start()

    # ---- attach and detach -----------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Add the pool that holds the KV of tokens."""
        self.mem_pool_host = mem_pool_host
        self._describe(KV, mem_pool_host)
        self._hosts[KV] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: object) -> None:
        """Add another pool. If the store is already open, reopen it."""
        name = _text(host_pool_name)
        if name == KV:
            return
        self._describe(name, host_pool)
        self._hosts[name] = host_pool
        if self._store is not None:
            self._close_store()
            self._open()

    def on_host_pools_registered(self) -> None:
        """Open the store, because all pools are now known.

        Raises:
            ConfigError: a pool is not supported, or a tier cannot be used.
            TierError: a required tier cannot be opened.
        """
        self._open()

    def close(self) -> None:
        """Finish pending writes and end all threads. Idempotent."""
        self._is_over = True
        forget(self._weights_change)
        self._close_store()

    def _describe(self, name: str, pool: HostPool, number: int = 0) -> StoredPool | None:
        return describe(name, pool, self._ranks, sglang.arange(getattr(pool, "page_size", 1) or 1), number)

    def _open(self) -> None:
        if self._is_over:
            return
        self._pools = {}
        # Keep SGLang's order, in which later pools come last, because names of objects contain the numbers of groups.
        for name, pool in self._hosts.items():
            described = self._describe(name, pool, len(self._pools))
            if described is not None:
                self._pools[name] = described
        if not self._pools:
            raise ConfigError("SGLang has registered no host pool with bytes to store")
        page = int(self._hosts[KV].page_size)
        layout = KvLayout(page, tuple(pool.layout for pool in self._pools.values()))
        self._store = open_object_store(
            self._config, layout, self._fingerprint.digest, rank=self._place.number, ranks=self._place.ranks
        )
        self._stats.read(self._store.metrics)
        note_fingerprint(self._config, self._fingerprint)
        if self._config.store.loss != "none":
            logger.warning(
                "SGLang does not pass salts to its storage, so requests to this server cannot demand exact KV "
                "(store.loss is %s)",
                self._config.store.loss,
            )
        logger.info(
            "kvtier stores %s of SGLang %s in %s; fingerprint %s",
            ", ".join(f"{name} ({pool.layout.pages})" for name, pool in self._pools.items()),
            self._release,
            ", ".join(tier.label for tier in self._config.tiers),
            self._fingerprint.digest.hex()[:16],
        )

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close(self._config.limits.close_deadline_s)

    def _weights_change(self) -> None:
        if not self._is_over:
            logger.error(
                "the engine's weights were replaced: kvtier stores and finds nothing from now on, because new KV would "
                "be stored under the old weights' name. Restart the engine to use kvtier again"
            )
        self._is_over = True

    # ---- lookups ---------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return whether the page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: ExtraInfo = None) -> int:
        """Return the number of leading pages that are stored."""
        del extra_info
        return self._guarded("batch_exists", lambda: self._run(KV, keys), 0)

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[PoolTransfer] | None = None, extra_info: ExtraInfo = None
    ) -> PoolTransferResult:
        """Return the lengths of the prefixes of `keys` that all pools can restore."""
        del extra_info
        nothing = sglang.PoolTransferResult(0, {}, [])
        return self._guarded("batch_exists_v2", lambda: self._restorable(keys, pool_transfers or ()), nothing)

    def _restorable(self, keys: Sequence[str], transfers: Iterable[PoolTransfer]) -> PoolTransferResult:
        run = self._run(KV, keys)
        found: dict[Any, int] = {sglang.PoolName.KV: run} if run else {}
        restorable = set(range(1, run + 1))
        for transfer in transfers:
            if not restorable:
                break
            name, policy = _text(transfer.name), transfer.hit_policy
            if policy == sglang.PoolHitPolicy.ALL_PAGES:
                ends = set(range(1, self._run(name, keys[:run]) + 1))
            elif policy == sglang.PoolHitPolicy.TRAILING_PAGES:
                ends = _windows(self._present(name, keys[:run]), max(1, len(transfer.keys or ())))
            else:
                self._notice("policy", f"SGLang's hit policy {policy} is not supported, so the lookup is a miss")
                return sglang.PoolTransferResult(0, {}, [])
            if ends:
                found[transfer.name] = max(ends)
            restorable &= ends
        return sglang.PoolTransferResult(max(restorable, default=0), found, sorted(restorable))

    def _run(self, name: str, keys: Sequence[str]) -> int:
        """Return the number of leading pages in the store."""
        if name == KV and KV not in self._pools and self._pools:
            return len(keys)  # the KV pool has no bytes of its own, so the other pools decide
        store, pool = self._usable(name)
        return store.leading_run(_objects(keys, pool), self._probe_deadline_s)

    def _present(self, name: str, keys: Sequence[str]) -> list[bool]:
        store, pool = self._usable(name)
        return store.contains(_objects(keys, pool), self._probe_deadline_s)

    @property
    def _probe_deadline_s(self) -> float:
        return sum(tier.probe_deadline_s for tier in self._config.tiers)

    # ---- pages -----------------------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: Sequence[str], host_indices: Indices, extra_info: ExtraInfo = None) -> list[bool]:
        """Load pages into the pool. Return for each whether it was loaded; if it was not, its bytes are undefined."""
        return self._move("prefetch", KV, keys, host_indices, extra_info, self._until_s("prefetch"))

    def batch_set_v1(self, keys: Sequence[str], host_indices: Indices, extra_info: ExtraInfo = None) -> list[bool]:
        """Store pages from the pool. Return for each whether a tier has it."""
        return self._move("backup", KV, keys, host_indices, extra_info, self._until_s("backup"))

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: ExtraInfo = None) -> dict[Any, list[bool]]:
        """Load pages of several pools. Return the results of `batch_get_v1` by pool."""
        return self._move_all("prefetch", transfers, extra_info)

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: ExtraInfo = None) -> dict[Any, list[bool]]:
        """Store pages of several pools. Return the results of `batch_set_v1` by pool."""
        return self._move_all("backup", transfers, extra_info)

    def _until_s(self, way: CallKind) -> float:
        """Return the deadline of a call.

        With several pools, a thread of SGLang makes one call for the KV and then one for all other pools. Each call
        then has half of `THREAD_S`.
        """
        limits = self._config.limits
        limit_s = limits.load_deadline_s if way == "prefetch" else limits.store_deadline_s
        return time.monotonic() + min(limit_s, THREAD_S if len(self._pools) < 2 else THREAD_S / 2)

    def _move_all(
        self, way: CallKind, transfers: Sequence[PoolTransfer], extra_info: ExtraInfo
    ) -> dict[Any, list[bool]]:
        until_s = self._until_s(way)
        return {
            each.name: self._move(way, _text(each.name), each.keys or (), each.host_indices, extra_info, until_s)
            for each in transfers
        }

    def _move(
        self, way: CallKind, name: str, keys: Sequence[str], indices: Indices, extra_info: ExtraInfo, until_s: float
    ) -> list[bool]:
        def run() -> list[bool]:
            store, pool = self._usable(name)
            call = store.get_into if way == "prefetch" else store.put_from
            began_s = time.perf_counter()
            outcomes = call(_items(pool, keys, indices, extra_info), until_s - time.monotonic())
            stats = way, len(keys), pool.page_bytes, time.perf_counter() - began_s
            store.guards.run(Feature.METRICS, self._stats.called, *stats, otherwise=None)
            return [outcome is Outcome.DONE for outcome in outcomes]

        return self._guarded(f"{way} of {name}", run, [False] * len(keys))

    # ---- SGLang's other methods ------------------------------------------------------------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ANN401
        """Return None, a miss. With ``interface_v1``, SGLang calls only the methods for batches of pages."""

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:  # noqa: ANN401, ARG002
        """Return a miss for every page, for the same reason as `get`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ANN401, ARG002
        """Store nothing and return False, for the same reason as `get`."""
        return False

    def batch_set(
        self,
        keys: Sequence[str],  # noqa: ARG002
        values: Any = None,  # noqa: ANN401, ARG002
        target_locations: Any = None,  # noqa: ANN401, ARG002
        target_sizes: Any = None,  # noqa: ANN401, ARG002
    ) -> bool:
        """Store nothing and return False, for the same reason as `get`."""
        return False

    def clear(self) -> None:
        """Refuse, because other engines may use the store.

        Raises:
            NotImplementedError: always. SGLang's clear request fails with this message.
        """
        raise NotImplementedError(
            "kvtier removes nothing on request, because other engines may use the store, and its cap evicts old "
            "objects. To remove all, stop the engines and remove the store's directory. To start with an empty cache, "
            "change store.secret"
        )

    def get_stats(self) -> object:
        """Return the figures for SGLang's metrics since the last call."""
        nothing = sglang.StorageMetrics()
        return self._guarded("get_stats", lambda: self._stats.take(sglang.StorageMetrics), nothing)

    # ---- failures --------------------------------------------------------------------------------------------------

    def _usable(self, name: str) -> tuple[ObjectStore, StoredPool]:
        store = self._store
        if store is None or self._is_over:
            raise _UnusableError("the store is not open")
        pool = self._pools.get(name)
        if pool is None:
            raise _UnusableError(f"SGLang has registered no pool {name!r}; known: {', '.join(self._pools)}")
        return store, pool

    def _guarded(self, what: str, run: Callable[[], Any], miss: Any) -> Any:  # noqa: ANN401 - SGLang's types
        try:
            return run()
        except _UnusableError as reason:
            self._notice(what, f"{what} counts as a miss: {reason}")
        except Exception as error:
            if f"{what} {type(error).__name__}" not in self._noticed:
                logger.exception("%s has failed and counts as a miss", what)
            self._notice(f"{what} {type(error).__name__}", "")
        return miss

    def _notice(self, topic: str, text: str) -> None:
        """Log a line once per topic."""
        if topic in self._noticed or len(self._noticed) >= _NOTICES_MAX:
            return
        self._noticed.add(topic)
        if text and not self._is_over:
            logger.warning("%s", text)


class _UnusableError(Exception):
    """Raised if the store cannot be used for a call."""


def settings_of(extra: Mapping[str, object] | None) -> Config:
    """Return the engine's settings. All of its processes get equal settings if their environments are equal.

    Args:
        extra: the value of ``--hicache-storage-backend-extra-config`` without the keys that SGLang removes. It
            overrides the settings file and the environment.

    Raises:
        ConfigError: a setting is unknown or invalid, or a tier or ``interface_v1`` is missing.
    """
    given = extra or {}
    if not given.get("interface_v1"):
        raise ConfigError(
            "must be enabled, because without it SGLang copies each page once more, in another order",
            setting="interface_v1",
            value=repr(given.get("interface_v1")),
            origin=EXTRA,
            allowed="1",
        )
    config = override(load().config, flat(settings_in(given), EXTRA), EXTRA)
    if not config.tiers:
        raise ConfigError(
            "no tier is configured", setting="tiers", origin=EXTRA, allowed='one or more, such as ["disk:/path/to/kv"]'
        )
    return config


def _check_common(config: Config, ranks: StorageConfig) -> None:
    """Refuse tiers whose objects only the writing rank sees.

    Raises:
        ConfigError: each rank has its own store, but SGLang lets one rank write for all.
    """
    if not ranks.is_mla_model or ranks.tp_size == 1:
        return
    if not any(kind_of(tier).is_common(tier) or kind_of(tier).is_shared(tier) for tier in config.tiers):
        raise ConfigError(
            f"tiers: {', '.join(tier.label for tier in config.tiers)}: each of the {ranks.tp_size} ranks has its "
            "own store there, but SGLang lets one rank write the KV of this model for all; allowed: at least one tier "
            "that all ranks use, such as a directory with shared = true"
        )


def _check_alone(loss: Loss, arguments: Leaves) -> None:
    """Refuse a lossy class (`store.loss`) if SGLang passes KV on to other engines, whose class is unknown.

    Raises:
        ConfigError: the engine has a lossy class, and its `disaggregation_mode` is not ``null``.
    """
    if loss != "none" and (mode := arguments("disaggregation_mode")) != "null":
        raise ConfigError(
            f"SGLang's disaggregation_mode = {mode!r} would pass lossy KV on to other engines, whose store.loss is "
            "unknown",
            setting="store.loss",
            value=loss,
            allowed="none; or any class with disaggregation_mode = null, where one engine computes prompts and answers",
        )


def _place() -> _OwnRank:
    """Return this process's number among the processes of the engine, over all of its replicas, and their count."""
    widths = sglang.parallel()
    replica = widths.dp_rank or 0
    world = int(widths.tp_size) * int(widths.pp_size)
    number = (replica * int(widths.pp_size) + int(widths.pp_rank)) * int(widths.tp_size) + int(widths.tp_rank)
    return _OwnRank(number, max(world * max(int(widths.dp_size), 1), number + 1))


def _labels(ranks: StorageConfig) -> dict[str, str]:
    """Return the labels of this process's metrics, which are also the labels of SGLang's own metrics."""
    return {name: str(getattr(ranks, name)) for name in ("tp_rank", "pp_rank", "dp_rank")}


def _text(name: object) -> str:
    return str(getattr(name, "value", name))


def _items(pool: StoredPool, keys: Sequence[str], indices: Indices, extra_info: ExtraInfo) -> list[ObjectBytes]:
    if indices is None or len(indices) != len(keys) * pool.page_size:
        count = None if indices is None else len(indices)
        raise _UnusableError(
            f"SGLang passed {count} positions for {len(keys)} pages of {pool.page_size} tokens in pool {pool.name}"
        )
    if keys and not 0 <= int(indices.min()) <= int(indices.max()) < int(pool.pool.size):
        raise _UnusableError(f"SGLang passed positions outside of pool {pool.name}, which has {pool.pool.size} tokens")
    if not pool.are_pages(indices):
        raise _UnusableError(
            f"SGLang passed positions that are not whole pages of {pool.page_size} tokens in pool {pool.name}"
        )
    objects = _objects(keys, pool)
    before: Sequence[str] = getattr(extra_info, "prefix_keys", None) or ()
    # Without `hicache_storage_pass_prefix_keys`, SGLang does not pass the keys of the pages before these.
    parents: list[ChunkKey | None] = [_keys(before[-1:])[0] if before else None]
    parents += [each.key for each in objects]
    origins = [Origin(parent, len(before) + at) for at, parent in enumerate(parents)]
    return list(map(ObjectBytes, objects, pool.pieces(indices), origins))


def _keys(texts: Sequence[str]) -> list[ChunkKey]:
    """Return 32 bytes per page hash. A string need not be a hexadecimal SHA-256: SGLang's own tests use others."""
    try:
        keys = list(map(bytes.fromhex, texts))
    except ValueError:
        keys = [b""]
    if {*map(len, keys)} <= {KEY_BYTES}:
        return cast("list[ChunkKey]", keys)
    return [ChunkKey(hashlib.sha256(_KEY_DOMAIN + text.encode()).digest()) for text in texts]


def _objects(keys: Sequence[str], pool: StoredPool) -> list[ObjectId]:
    """Return the object ids of these pages."""
    return list(map(ObjectId._make, zip(_keys(keys), repeat(pool.number))))  # twice as fast as ObjectId(key, number)


def _windows(present: Sequence[bool], width: int) -> set[int]:
    """Return the lengths of the prefixes whose last `width` pages, or all pages if there are fewer, are present."""
    ends: set[int] = set()
    streak = 0
    for position, is_present in enumerate(present, 1):
        streak = streak + 1 if is_present else 0
        if streak >= min(width, position):
            ends.add(position)
    return ends
