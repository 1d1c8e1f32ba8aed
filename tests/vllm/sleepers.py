"""vLLM's sleep on a CPU: its own classes, above memory that loses what it holds. Each function is named by a test.

vLLM's worker for CPUs ignores sleep. Here it has the methods of the worker for GPUs, and instead of unmapping memory it
fills it with other bytes. Linear layers keep their weights as parameters, as on a GPU.
"""

from collections.abc import Iterable, Iterator
from typing import Any

LOST = {"weights": 0xFF, "kv_cache": 0x41}
"""Each byte of memory that was away: no number, and a large one. An empty place of a block must hold a number."""


def __getattr__(name: str) -> Any:
    """`Worker`: vLLM's class of workers that can sleep, as each process of an engine finds it by its name."""
    if name != "Worker":
        raise AttributeError(name)
    from vllm.v1.worker.cpu_worker import CPUWorker

    if not hasattr(CPUWorker, "_is_sleepy"):
        CPUWorker._is_sleepy = True
        _apply()
    return CPUWorker


def _apply() -> None:
    import torch
    import vllm._custom_ops
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    vllm._custom_ops._supports_onednn = False
    torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.accelerator.get_memory_info = lambda *_: (0, 0)  # type: ignore[assignment]
    for name in ("sleep", "wake_up", "discard"):
        setattr(CPUWorker, name, getattr(Worker, name))
    CPUWorker.sleep_mode_backend = property(_backend)
    _register_backend()


def _backend(worker: Any) -> Any:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

    class Forgetful(SleepModeBackend):
        """As `CuMemBackend`, for memory that cannot be unmapped."""

        def __init__(self) -> None:
            self.kept: list[tuple[Any, Any]] = []
            self.asleep: set[str] = set()

        def suspend(self, level: int = 1) -> None:
            """Level 1 keeps the weights."""
            if level == 1 and "weights" not in self.asleep:
                self.kept = [(memory, memory.clone()) for memory in _weights(worker)]
            self.discard(("weights", "kv_cache"))

        def resume(self, tags: list[str] | None = None) -> None:
            """Without a copy there is nothing in it."""
            self.asleep -= set(tags or self.asleep)
            if "weights" not in self.asleep:
                for memory, copy in self.kept:
                    memory.copy_(copy)
                self.kept = []

        def discard(self, tags: tuple[str, ...]) -> None:
            """Keep nothing."""
            for tag in set(tags) - self.asleep:
                for memory in _weights(worker) if tag == "weights" else _kv(worker):
                    memory.fill_(LOST[tag])
            self.asleep |= set(tags)

    if not hasattr(worker, "_forgetful"):
        worker._forgetful = Forgetful()
    return worker._forgetful


def sleep(engine: Any, level: int, mode: str = "abort") -> None:
    """vLLM falls asleep."""
    engine.sleep(level=level, mode=mode)


def wake_up(engine: Any, *tags: str) -> bool:
    """vLLM wakes up, or a part of it, while its caller handles an error of its own; whether all of it is awake."""
    try:
        {}["a request"]
    except KeyError:
        return engine.wake_up(list(tags) or None)


def reload_half(engine: Any) -> str:
    """Weights are replaced until the sender fails; vLLM's error."""
    from changes import _model

    def tensors() -> Iterator[Any]:
        for count, (name, it) in enumerate(_model(engine).named_parameters()):
            if count == 5:
                raise ValueError("the sender has failed")
            yield name, it.detach() / 2

    try:
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors(), "is_checkpoint_format": False})
    except ValueError as error:
        return str(error)
    return ""


def sleep_later(engine: Any, level: int) -> None:
    """vLLM falls asleep once nothing is under way: what it does then, in the process of an engine of its own."""
    from concurrent.futures import Future

    core, paused = engine.engine_core.engine_core, Future[None]()
    core.pause_scheduler = lambda **_: paused
    ended = core.sleep(level)
    del core.pause_scheduler
    core.pause_scheduler("abort")
    paused.set_result(None)
    ended.result()


def fail_to_sleep(engine: Any) -> str:
    """vLLM's sleep fails before it takes memory away; the error."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    inner = CPUWorker.sleep

    def sleep(*_: Any, **__: Any) -> None:
        raise RuntimeError("memory is short")

    CPUWorker.sleep = sleep
    try:
        return _error_of_sleep(engine)
    finally:
        CPUWorker.sleep = inner


def hang(engine: Any) -> str:
    """A copy of the first rank does not end before vLLM sleeps; the error."""
    engine.collective_rpc(_hang)
    return _error_of_sleep(engine)


def _error_of_sleep(engine: Any) -> str:
    try:
        engine.sleep(level=1)
    except (RuntimeError, TimeoutError) as error:
        assert engine.wake_up(), "vLLM counts as awake"
        return repr(error)
    return ""


def _hang(worker: Any) -> None:
    from kvtier.connect.vllm.worker.copier import BlockCopier

    BlockCopier.close = lambda *_: worker.rank > 0  # type: ignore[method-assign]


def ask_ranks(engine: Any, number: int) -> list[Any]:
    """Each rank's answer to a call."""
    return engine.collective_rpc(_rank, args=(number,))


def _rank(worker: Any, number: int) -> tuple[int, int]:
    return number, worker.rank


def reset_encoder(engine: Any) -> None:
    """As vLLM tells those who change weights."""
    engine.reset_encoder_cache()


def release_kv(engine: Any) -> None:
    """Only the memory of the KV goes away."""
    engine.engine_core.engine_core.pause_scheduler(clear_cache=False)
    engine.engine_core.engine_core.release_kv_cache_memory()


def _memories(tensors: Iterable[Any]) -> list[Any]:
    """The memory of tensors, once each, as bytes."""
    import torch

    storages = {it.untyped_storage().data_ptr(): it.untyped_storage() for it in tensors if it.numel()}
    return [torch.empty(0, dtype=torch.uint8).set_(it) for it in storages.values()]


def _kv(worker: Any) -> list[Any]:
    return _memories(worker.model_runner.kv_caches)


def _weights(worker: Any) -> list[Any]:
    """What vLLM allocates while it loads the model."""
    import torch

    kv = {it.data_ptr() for it in _kv(worker)}
    held = [
        it
        for module in worker.get_model().modules()
        for it in (*vars(module).values(), *module._parameters.values(), *module._buffers.values())
        if isinstance(it, torch.Tensor)
    ]
    return [it for it in _memories(held) if it.data_ptr() not in kv]


def transfer(engine: Any, path: str) -> None:
    """A trainer sends its weights while requests wait with their KV, by vLLM's calls in their order."""
    core = engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    engine.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {}})
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", kwargs={"update_info": {"path": path}})
    engine.collective_rpc("finish_weight_update")
    core.resume_scheduler()


def held_by_host(engine: Any) -> int:
    """Bytes of host memory that are not zero."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    rank = get_kv_transfer_group()._worker_side._rank
    return sum(len(memory) - bytes(memory).count(0) for memory in rank.arena.memory)


def unfenced() -> None:
    """Copies are neither waited for nor stopped, and are late: the control of the fence."""
    from sabotage import LATE_S, slow_copies

    from kvtier.connect.vllm.scheduler.cache_invalidation import Invalidation
    from kvtier.connect.vllm.scheduler.scheduler import Scheduler
    from kvtier.connect.vllm.worker.worker_side import WorkerSide

    slow_copies(LATE_S)
    WorkerSide.sleep = lambda self: setattr(self.worker, "is_asleep", True)  # type: ignore[method-assign]
    Scheduler.drain = lambda self, wait_s: None  # type: ignore[method-assign]
    Invalidation.stop = lambda self, why: setattr(self, "stopped_by", why)  # type: ignore[method-assign]


def undigested() -> None:
    """All weights have one digest: the control of the names."""
    from kvtier.connect.vllm.worker import weight_changes as weights

    weights.digest_of = lambda *_: bytes(32)


def _register_backend() -> None:
    """A backend of vLLM's weight transfer, as a plug-in has one: the worker reads the trainer's files."""
    from changes import tensors_of
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    class Backend(WeightTransferEngine):  # type: ignore[type-arg]
        init_info_cls = update_info_cls = dict

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any) -> None:
            self.model.load_weights(tensors_of(update_info["path"]))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("files", Backend)
