"""What each worker of a pipeline on a CPU gets: what vLLM leaves out there, and what a test breaks on purpose.

vLLM imports this module in each worker (`worker_extension_cls`), before it loads the model. Tests only name it.
"""

import os
from importlib import import_module
from typing import Any

SABOTAGE = "STAGE_SABOTAGE"
"""A variable: ``module:function``, called in each worker before it loads the model."""


class Stage:
    """Adds nothing to vLLM's worker."""


def swap() -> None:
    """Each of two stages takes the part of the other one."""
    from kvtier.connect.vllm.engine_setup import EngineSetup

    inner = EngineSetup.first_layers
    EngineSetup.first_layers = property(  # type: ignore[assignment, method-assign]
        lambda self: [count - it for it, count in zip(inner.__get__(self), self.geometry.layer_counts, strict=True)]
    )


def fail_late() -> None:
    """The last stage fails between kvtier's exchanges, where vLLM gives it no memory."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from kvtier.connect.vllm import vllm_imports

    vllm_imports.START_S = 5.0
    inner = GPUModelRunner.initialize_kv_cache_tensors

    def initialize(self: Any, *given: Any, **named: Any) -> Any:
        if self.parallel_config.rank:
            raise MemoryError("no memory for the last stage")
        return inner(self, *given, **named)

    GPUModelRunner.initialize_kv_cache_tensors = initialize  # type: ignore[method-assign]


def worker_of(engine: Any, stage: int) -> int:
    """The process of a stage's worker; called in the engine's process."""
    return engine.engine_core.engine_core.model_executor.workers[stage].proc.pid


def take_the_best() -> None:
    """In the engine's process: an object counts as soon as one rank has it."""
    from kvtier.runtime import rank_group
    from kvtier.types import SEVERITY

    rank_group.merged = lambda *both: min(both, key=lambda it: (SEVERITY[it.outcome], -sum(it.present)))


def _receive() -> None:
    """Let a stage make the buffers for what it receives. vLLM makes them in its warm-up, which it skips here."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    inner = GPUModelRunner.sync_and_gather_intermediate_tensors

    def gather(self: Any, *arguments: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return inner(self, *arguments)

    GPUModelRunner.sync_and_gather_intermediate_tensors = gather  # type: ignore[method-assign]


_receive()
for _place in filter(None, os.environ.get(SABOTAGE, "").split(",")):
    _module, _, _function = _place.partition(":")
    getattr(import_module(_module), _function)()
