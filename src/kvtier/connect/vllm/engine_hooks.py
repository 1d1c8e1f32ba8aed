"""Lists every use of vLLM beyond its connector and tier interfaces, and provides functions for most uses.

vLLM passes a connector its configuration, its requests and its KV memory. kvtier also requires the scheduler, the calls
to workers, and the files that are read. Each row of `HOOKS` says what is used, and on which functions of vLLM it
depends. `check` compares the rows that an engine requires with the installed vLLM before the first request. So an
engine on another release of vLLM fails with a message that names what this release lacks.

vLLM's objects are found on the call stack, among the callers whose methods are running while vLLM makes or calls the
connector. Only this file reads the stack and private names. Public attributes are used where they are needed:
`scheduler.engine_cache` and `scheduler.block_pool` read and write some, and `checkpoint_reads` and
`requests.multimodal_items` add some. The package's `__init__` registers the connector, and notices when vLLM imports
its loaders.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial, wraps
from importlib import import_module
from itertools import chain, islice
from operator import attrgetter
from traceback import walk_stack
from typing import Any, Literal, NamedTuple

from kvtier.connect.vllm.vllm_types import (
    Block,
    BlockPool,
    BlockTables,
    KvCacheManager,
    LoraRequest,
    Request,
    VllmConfig,
    VllmScheduler,
)
from kvtier.errors import ConfigError

logger = logging.getLogger(__name__)

Part = Literal[
    "import", "engine", "core", "scheduler", "tiering", "prefix_protection", "worker", "layers", "cpu", "lora",
]  # fmt: skip
"""What requires a hook: the connector's import, every process of an engine, the core's process, the connector,
secondary tier or prefix protection in that process, a worker's connector, its layers, layers on a CPU, or adapters."""

OnStack = Literal[
    "input_queue", "model_executor", "scheduler", "vllm_config", "_vllm_config", "_kv_cache_config",
    "get_model", "get_draft_model", "lora_manager",
]  # fmt: skip
"""Attributes of callers that `on_stack` returns."""

SCHEDULER_STATE = (
    "kv_cache_manager",
    "requests",
    "running",
    "finished_recving_kv_req_ids",
    "failed_recving_kv_req_ids",
)
"""Attributes of vLLM's scheduler that kvtier requires to keep vLLM's own prefix cache correct across a reset."""


class Hook(NamedTuple):
    """One use of vLLM beyond its interfaces."""

    name: str
    """What is used, and how."""
    part: Part
    """What requires it."""
    why: str
    places: Sequence[str]
    """Functions and classes of vLLM on which it depends, as ``module:path`` below ``vllm.``. The names that
    follow are arguments, attributes and variables that are used, or that show that the function is unchanged."""
    without: str = ""
    """What is lost without it. If empty, the engine does not start, or does not start with the feature."""


HOOKS = (
    Hook(
        "hash functions of KV events", "import",
        "kvtier publishes events for routers under the hashes that vLLM gives the same blocks.",
        (
            "v1.core.kv_cache_utils:hash_block_tokens hash_function parent_block_hash extra_keys",
            "v1.core.kv_cache_utils:generate_block_hash_extra_keys request",
            "v1.core.kv_cache_utils:maybe_convert_block_hash",
            "v1.core.kv_cache_utils:to_event_extra_keys",
            "utils.hashing:get_hash_fn_by_name",
        ),
    ),
    Hook(
        "`KVConnectorFactory` (registration)", "import",
        "A `MultiConnector` finds the classes of its connectors' metrics by name alone.",
        (("distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector "
          "name module_path class_name"),),
        "A server with a `MultiConnector` exports no metrics of kvtier.",
    ),
    Hook(
        "fields of configurations", "engine",
        "kvtier refuses engines whose KV depends on more than the keys of chunks cover.",
        (
            "config.attention:AttentionConfig use_non_causal hisparse_config",
            "config.cache:CacheConfig use_replayssm",
            "config.speculative:SpeculativeConfig parallel_drafting draft_model_config draft_load_config",
            "config.model:ModelConfig sleep_preserve_parameter_names",
            "v1.kv_cache_interface:AttentionSpec state_content_bytes",
        ),
    ),
    Hook(
        "handles of items in shared memory", "engine",
        "kvtier does not cache a request whose image is only an address, because vLLM reuses addresses.",
        ("multimodal.cache.shm:ShmObjectStoreSenderCache.address_as_item address monotonic_id",),
    ),
    Hook(
        "`MultiModalKwargsItem` (attribute added)", "engine",
        "Each item keeps the digest of its data, because several requests may have the same item.",
        ("multimodal.inputs:MultiModalKwargsItem",),
        "Items are digested again for each request.",
    ),
    Hook(
        "`VllmConfig` while it is made (stack)", "engine",
        "kvtier checks the settings and notes the checkpoint's files before vLLM loads the weights.",
        ("config.vllm:VllmConfig.__post_init__ self get_connector_class",),
        "Wrong settings are refused only after the weights were loaded.",
    ),
    Hook(
        "`EngineCore.model_executor` (stack), and its `collective_rpc` (replaced)", "core",
        "kvtier calls the workers, and stops before vLLM calls a method that may change weights or memory.",
        (
            "v1.engine.core:EngineCore.__init__ model_executor",
            "v1.executor.abstract:Executor.collective_rpc method timeout args kwargs non_block",
        ),
    ),
    Hook(
        "`EngineCore.scheduler` (stack), its requests and its `failed_recving_kv_req_ids` (written)", "scheduler",
        "Requests that wait for a load start anew before a reset and after a change of weights.",
        (
            "v1.engine.core:EngineCore.__init__ scheduler",
            f"v1.core.sched.scheduler:Scheduler.__init__ {' '.join(SCHEDULER_STATE)}",
            "v1.core.sched.scheduler:Scheduler.get_kv_connector",
            "v1.request:Request.__init__ num_computed_tokens",
            "v1.request:RequestStatus WAITING PREEMPTED WAITING_FOR_REMOTE_KVS",
        ),
    ),
    Hook(
        "`kv_role` of the scheduler's configuration (stack, rewritten)", "scheduler",
        "A prefill engine of kvtier loads, and vLLM delays the reuse of blocks only for a role that loads.",
        (
            "v1.core.sched.scheduler:Scheduler.__init__ vllm_config is_kv_consumer defer_block_free",
            "config.kv_transfer:KVTransferConfig kv_role",
        ),
    ),
    Hook(
        "the tokenizer of `Scheduler.structured_output_manager`", "scheduler",
        "An operator who asks why a request missed sees where its prompt changed as text.",
        (
            "v1.core.sched.scheduler:Scheduler.__init__ structured_output_manager",
            "v1.structured_output:StructuredOutputManager.__init__ tokenizer",
        ),
        "The answer has token ids only.",
    ),
    Hook(
        "`EngineCore.sleep` among the callers (stack)", "scheduler",
        "kvtier distinguishes the reset with which vLLM falls asleep from a reset of a user.",
        ("v1.engine.core:EngineCore.sleep pause_complete", "v1.engine.core:EngineCore.release_kv_cache_memory"),
        "KV from before a sleep is not found after it.",
    ),
    Hook(
        "`EngineCoreProc.input_queue` (stack)", "scheduler",
        "kvtier wakes an idle engine that has events to publish or blocks to free.",
        ("v1.engine.core:EngineCoreProc.__init__ input_queue", "v1.engine:EngineCoreRequestType WAKEUP"),
        "An idle engine publishes events and frees blocks only at its next request.",
    ),
    Hook(
        "`Scheduler.deferred_frees` and `._inflight_prefills`", "scheduler",
        "A reset counts as free the blocks that a step under way still writes, and returns what a prompt has reserved.",
        ("v1.core.sched.scheduler:Scheduler.__init__ deferred_frees _inflight_prefills",),
        "A reset fails while a step is under way, and may delay requests.",
    ),
    Hook(
        "`KVCacheManager.reset_prefix_cache` (replaced)", "scheduler",
        "Before a reset kvtier gives back the blocks of its stores and of waiting requests, so that it succeeds.",
        (
            "v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache",
            "v1.core.kv_cache_manager:KVCacheManager.__init__ block_pool",
            "v1.core.kv_cache_manager:KVCacheManager.free request",
            "v1.core.kv_cache_manager:KVCacheManager.get_block_ids request_id",
            "v1.core.block_pool:BlockPool.reset_prefix_cache num_gpu_blocks",
        ),
    ),
    Hook(
        "`BlockPool` and its blocks", "scheduler",
        "A store pins its source blocks, and vLLM calls back when it hands one of them out.",
        (
            "v1.core.block_pool:BlockPool.__init__ blocks num_gpu_blocks",
            "v1.core.block_pool:BlockPool.touch blocks",
            "v1.core.block_pool:BlockPool.unpin_blocks blocks on_reuse",
            "v1.core.block_pool:BlockPool.free_blocks ordered_blocks",
            "v1.core.block_pool:BlockPool.get_num_free_blocks",
            "v1.core.kv_cache_utils:KVCacheBlock block_id block_hash ref_cnt next_free_block",
        ),
    ),
    Hook(
        "`BlockPool.free_block_queue` (reordered)", "prefix_protection",
        "Prefix protection moves blocks that no waiting prompt needs to its front (`vllm.prefix_protection`).",
        (
            "v1.core.block_pool:BlockPool.get_new_blocks free_block_queue",
            "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.iter_blocks_after",
            "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove block",
            "v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n blocks",
            "v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks request",
            "v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids",
        ),
    ),
    Hook(
        "fields of `Request` for hints", "scheduler",
        "kvtier takes vLLM's own hints, and stores states where vLLM sees two prompts diverge.",
        ("v1.request:Request.__init__ kv_hints session_id shared_prefix_boundary",),
        "These hints have no effect, and fewer windows and states are found.",
    ),
    Hook(
        "loaders of weights (awaited in `sys.meta_path`, replaced), and `LoadConfig` (attributes added)", "worker",
        "kvtier compares the files that each worker reads with those that it identifies.",
        (
            "model_executor.model_loader:DefaultModelLoader._prepare_weights model_name_or_path",
            "model_executor.model_loader:ShardedStateLoader.load_weights model model_config",
            "model_executor.model_loader.base_loader:BaseModelLoader.__init__ load_config",
            "config:get_current_vllm_config_or_none",
            "config.load:LoadConfig",
        ),
        "KV stays in host memory.",
    ),
    Hook(
        "`Worker.get_model` and `.get_draft_model` (stack)", "worker",
        "kvtier compares bytes of the weights after each step, and digests all of them after a change.",
        ("v1.worker.gpu_worker:Worker.get_model", "v1.worker.gpu_worker:Worker.get_draft_model"),
        "A change without a call of vLLM is not noticed, and new weights get a random name.",
    ),
    Hook(
        "`load_weights` of the model (replaced)", "worker",
        "A trainer in the engine's process may load weights without a call of vLLM.",
        ("model_executor.model_loader.default_loader:DefaultModelLoader.load_weights load_weights",),
        "Such a load is noticed by the bytes that it changes.",
    ),
    Hook(
        "`attn_backend` of layers", "layers",
        "The attention backend decides what the bytes of a page mean, so it is part of an object's name.",
        (
            "model_executor.layers.attention.attention:Attention.__init__ attn_backend",
            "model_executor.layers.attention_layer_base:AttentionLayerBase get_attn_backend",
            "config.compilation:CompilationConfig static_forward_context",
        ),
    ),
    Hook(
        "`isa` of layers", "cpu",
        "On a CPU the vector instructions decide the bytes of a page, too.",
        ("v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__ isa",),
    ),
    Hook(
        "`lora_manager` (stack), and its `_load_adapter` (replaced)", "lora",
        "kvtier compares the files of an adapter before and after each load with those that it identifies.",
        (
            "v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin.load_lora_model lora_manager",
            "lora.worker_manager:LRUCacheWorkerLoRAManager._load_adapter lora_request",
            "lora.worker_manager:LRUCacheWorkerLoRAManager.add_adapter _load_adapter _adapter_manager capacity",
            "lora.worker_manager:LRUCacheWorkerLoRAManager.list_adapters",
        ),
    ),
    Hook(
        "`_vllm_config` and `_kv_cache_config` of a connector (stack)", "tiering",
        "vLLM passes a secondary tier neither, and both determine what its bytes mean.",
        ("distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.__init__ _vllm_config _kv_cache_config",),
    ),
    Hook(
        "`request` of `on_new_request` (stack)", "tiering",
        "A secondary tier gets only a request's id, and needs its adapter, images and hints.",
        (
            ("distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
             "OffloadingConnectorScheduler.on_new_request request"),
            "v1.request:Request.__init__ request_id lora_request mm_features",
        ),
        "Nothing is stored or found below vLLM's host memory.",
    ),
)  # fmt: skip
"""All hooks. docs/internals/vllm-inside.md shows this table."""


def check(*parts: Part) -> None:
    """Compare the hooks of these parts with the installed vLLM. Log a warning for each optional hook that is missing.

    Raises:
        ConfigError: vLLM lacks a required hook, or its release is not supported. The message says what is missing.
    """
    refused: list[str] = []
    for hook in HOOKS:
        if hook.part in parts and (lacks := [text for place in hook.places for text in _lacks(place)]):
            text = f"vLLM has no {', '.join(lacks)} ({hook.name}). {hook.why} {hook.without}".rstrip()
            report = logger.warning if hook.without else refused.append
            report(text)
    if refused:
        from kvtier.connect.vllm import installed_engine  # noqa: PLC0415 - imports settings and tiers

        raise ConfigError(f"{' '.join(refused)} Install vLLM {installed_engine.check_release()} as it was published")


def _lacks(place: str) -> list[str]:
    """Return what the installed vLLM lacks: the place itself, or names in it."""
    place, *names = place.split()
    module, path = place.split(":")
    try:
        found = inspect.unwrap(attrgetter(path)(import_module(f"vllm.{module}")))
    except Exception:  # noqa: BLE001 - an import of vLLM may raise anything
        return [f"vllm.{place}"]
    code, fields = getattr(found, "__code__", None), getattr(found, "__dataclass_fields__", ())
    known = {*dir(found), *fields} if code is None else {*code.co_names, *code.co_varnames, *code.co_cellvars}
    return [f"{name} in vllm.{place}" for name in names if name not in known]


# ---- the stack -----------------------------------------------------------------------------------------------------

_FRAMES_MAX = 16
"""Maximum number of callers searched for a local variable."""


def on_stack(name: OnStack, *otherwise: Any) -> Any:  # noqa: ANN401 - vLLM's objects
    """Return attribute `name` of the nearest object whose method is running. vLLM does not pass it as an argument.

    Args:
        name: name of the attribute.
        otherwise: what to return if no caller has it.

    Raises:
        LookupError: no caller has the attribute.
    """
    for frame, _ in walk_stack(inspect.currentframe()):
        caller = frame.f_locals.get("self")
        if hasattr(caller, name):
            return getattr(caller, name)
    if otherwise:
        return otherwise[0]
    raise LookupError(f"no caller has {name}")


def is_running(*functions: str) -> bool:
    """Return whether one of these functions of vLLM's engine core is among the callers."""
    return any(
        frame.f_code.co_name in functions and frame.f_globals.get("__name__") == "vllm.v1.engine.core"
        for frame, _ in walk_stack(inspect.currentframe())
    )


def config_being_made() -> VllmConfig | None:
    """Return the `VllmConfig` whose constructor is importing the connector, or None.

    A connector receives vLLM's configuration only after the weights are loaded, up to half an hour later. But
    `VllmConfig.__post_init__` imports the connector's class before that, in the server's process.
    """
    for frame, _ in islice(walk_stack(inspect.currentframe()), _FRAMES_MAX):
        found: Any = frame.f_locals.get("self")
        if frame.f_code.co_name == "__post_init__" and type(found).__name__ == "VllmConfig":
            return None if found.model_config is None or found.kv_transfer_config is None else found
    return None


def request_on_stack(number: str) -> Request | None:
    """Return the request with this id from a caller's variables, because vLLM passes only the id.

    Return None for the request of a remote engine.
    """
    frames = islice(walk_stack(inspect.currentframe()), _FRAMES_MAX)
    found: Iterator[Request] = (frame.f_locals.get("request") for frame, _ in frames)
    return next((it for it in found if getattr(it, "request_id", None) == number and hasattr(it, "lora_request")), None)


def let_role_load(config: VllmConfig) -> None:
    """Make vLLM's scheduler treat a prefill engine as an engine that loads.

    The scheduler delays the reuse of blocks that a running step still writes, but only for a role that loads. It reads
    the role after making the connector.

    Args:
        config: the connector's configuration. In a `MultiConnector` it is not the scheduler's.
    """
    config = on_stack("vllm_config", config)
    if config.kv_transfer_config.kv_role == "kv_producer":
        config.kv_transfer_config.kv_role = "kv_both"


# ---- calls to workers ----------------------------------------------------------------------------------------------

HARMLESS = frozenset({
    "execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids", "get_supported_tasks",
    "get_kv_cache_spec", "get_supported_kv_cache_layouts", "get_kv_connector_handshake_metadata",
    "get_cache_block_size_bytes", "get_simple_cpu_offload_num_cpu_blocks", "supports_draft_weight_updates",
    "check_health", "synchronize_device", "profile", "reset_mm_cache", "reset_encoder_cache",
    "release_late_interaction_query_cache", "add_lora", "remove_lora", "pin_lora", "list_loras", "save_sharded_state",
    "save_tensorized_model", "compute_weight_checksums", "get_model_inspection", "get_encoder_timing_stats",
    "get_compilation_match_table", "shutdown", "init_weight_transfer_engine", "shutdown_weight_transfer_engine",
})  # fmt: skip
"""Methods of vLLM's workers that change no weights (vLLM 0.32 and 0.33)."""

_ARGS, _KWARGS = 2, 3
"""Positions of the method's arguments in ``collective_rpc(method, timeout, args, kwargs)``."""


class WorkerCall(NamedTuple):
    """A call that vLLM makes to its workers."""

    method: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    is_plain: bool
    """Whether the call names one of vLLM's own methods and returns only after the workers have."""

    def argument(self, name: str, otherwise: Any = None) -> Any:  # noqa: ANN401
        """Return the argument `name`, else the first positional one, else `otherwise`."""
        return self.kwargs.get(name, self.args[0] if self.args else otherwise)


def watch_calls(
    executor: Any,  # noqa: ANN401 - vLLM's `Executor`
    around: Callable[[WorkerCall], AbstractContextManager[None]],
    noted: Collection[str],
) -> None:
    """Run each call to the engine's workers that may change weights or memory inside `around`.

    Args:
        executor: the engine's executor.
        around: returns a context manager that is entered before the call and left after it.
        noted: harmless methods whose calls also run inside `around`.
    """
    unseen = HARMLESS.difference(noted)
    inner = executor.collective_rpc

    @wraps(inner)
    def collective_rpc(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        method: Any = args[0] if args else kwargs.get("method")
        if isinstance(method, str) and method in unseen:
            return inner(*args, **kwargs)
        name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
        given: Any = args[_ARGS] if len(args) > _ARGS else kwargs.get("args")
        named: Any = args[_KWARGS] if len(args) > _KWARGS else kwargs.get("kwargs")
        call = WorkerCall(
            name,
            given if isinstance(given, tuple | list) else (),
            named if isinstance(named, Mapping) else {},
            isinstance(method, str) and not kwargs.get("non_block"),
        )
        with around(call):
            return inner(*args, **kwargs)

    executor.collective_rpc = collective_rpc


def watch_load_weights(model: Any, called: Callable[[], None]) -> None:  # noqa: ANN401 - a `torch.nn.Module`
    """Call `called` before each `load_weights` of the model, if it has that method."""
    if (inner := getattr(model, "load_weights", None)) is None:
        return

    @wraps(inner)
    def load_weights(*args: object, **kwargs: object) -> object:
        called()
        return inner(*args, **kwargs)

    model.load_weights = load_weights


# ---- files that vLLM reads -----------------------------------------------------------------------------------------

_IS_WATCHED = "_kvtier_is_watched"


def watch_loaders(loaders: Any) -> None:  # noqa: ANN401 - a module
    """Make vLLM's loaders note the files that they are about to read. Idempotent.

    Args:
        loaders: vLLM's `vllm.model_executor.model_loader`. kvtier leaves a module of another form unchanged, and cannot
            identify its engine.
    """
    with suppress(AttributeError):
        default, sharded = loaders.DefaultModelLoader, loaders.ShardedStateLoader
        prepare, load_weights = default._prepare_weights, sharded.load_weights  # noqa: SLF001
        if hasattr(default, _IS_WATCHED):
            return
        setattr(default, _IS_WATCHED, True)

        @wraps(prepare)
        def _prepare_weights(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            found = prepare(self, *args, **kwargs)
            _note(lambda: (self.load_config, args[0] if args else kwargs["model_name_or_path"], found[0], found[1]))
            return found

        @wraps(load_weights)
        def _load_weights(self: Any, model: Any, model_config: Any) -> Any:  # noqa: ANN401
            _note(lambda: (self.load_config, str(model_config.model), model_config.model_weights, ()))
            return load_weights(self, model, model_config)

        default._prepare_weights, sharded.load_weights = _prepare_weights, _load_weights  # noqa: SLF001


def _note(read: Callable[[], tuple[Any, ...]]) -> None:
    """Call `checkpoint_reads.note` with `read()`, unless the engine transfers no KV."""
    try:
        config = getattr(sys.modules.get("vllm.config"), "get_current_vllm_config_or_none", lambda: None)()
        if config is None or config.kv_transfer_config is not None:
            import_module("kvtier.connect.vllm.checkpoint_reads").note(*read())
    except Exception as error:  # noqa: BLE001 - the engine must load, even if it cannot be identified
        logger.warning("kvtier could not record which files vLLM reads: %r", error)


def watch_adapter_loads(
    manager: Any,  # noqa: ANN401 - vLLM's `LRUCacheWorkerLoRAManager`
    load: Callable[[Callable[[LoraRequest], object], LoraRequest], object],
) -> None:
    """Call `load` with vLLM's own loading function and the adapter, whenever vLLM loads an adapter from its files."""
    inner = manager._load_adapter  # noqa: SLF001
    manager._load_adapter = wraps(inner)(partial(load, inner))  # noqa: SLF001


def has_room(manager: Any) -> bool:  # noqa: ANN401
    """Return whether a worker can load one more adapter without evicting another."""
    held = manager._adapter_manager  # noqa: SLF001
    return len(held) < held.capacity


# ---- blocks and requests of the scheduler --------------------------------------------------------------------------


def free_blocks(pool: BlockPool) -> Iterator[Block]:
    """Yield the free blocks in allocation order. Any change to the pool invalidates the iterator."""
    return pool.free_block_queue.iter_blocks_after(None)


def hand_out_first(pool: BlockPool, blocks: Sequence[Block]) -> None:
    """Move these free blocks to the front of the free list, in this order."""
    for block in blocks:
        pool.free_block_queue.remove(block)
    pool.free_block_queue.prepend_n(blocks)


def decoder(scheduler: VllmScheduler) -> Callable[[list[int]], str | None]:
    """Return a function that turns token ids into text, or into None without a tokenizer (`skip_tokenizer_init`)."""
    return getattr(
        getattr(getattr(scheduler, "structured_output_manager", None), "tokenizer", None), "decode", lambda _: None
    )


def resident_blocks(manager: KvCacheManager, request: Request) -> BlockTables:
    """Return the block ids in vLLM's own cache that match a request."""
    return manager.get_computed_blocks(request)[0].get_block_ids()


def watch_resets(manager: KvCacheManager, begins: Callable[[], int], ended: Callable[[bool], None]) -> None:
    """Call `begins` before each reset of vLLM's own prefix cache and `ended` after it.

    Args:
        manager: vLLM's KV cache manager.
        begins: returns how many blocks in use vLLM must count as free. vLLM resets only if all blocks are free.
        ended: receives True if the cache was reset.
    """
    inner = manager.reset_prefix_cache

    @wraps(inner)
    def reset_prefix_cache() -> bool:
        pool, leaving = manager.block_pool, begins()
        pool.num_gpu_blocks -= leaving
        try:
            was_reset = inner()
        finally:
            pool.num_gpu_blocks += leaving
        ended(was_reset)
        return was_reset

    manager.reset_prefix_cache = reset_prefix_cache


def deferred_blocks(scheduler: VllmScheduler) -> Iterator[Block]:
    """Return the blocks that vLLM will free after a step that is still running."""
    return chain.from_iterable(freed for _, freed in getattr(scheduler, "deferred_frees", ()))


def forget_reservation(scheduler: VllmScheduler, request: Request) -> None:
    """Cancel the reservation of blocks that vLLM holds for the rest of a prompt.

    Otherwise vLLM starts no load that requires these blocks. If such a load belongs to the first request in the queue,
    the engine is stuck, because `request` waits behind it.
    """
    getattr(scheduler, "_inflight_prefills", set[Request]()).discard(request)
