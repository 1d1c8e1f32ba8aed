"""What each worker of a pipeline on a CPU gets: what vLLM leaves out there, and what a test breaks on purpose.

vLLM imports this module in each worker (`worker_extension_cls`), before it loads the model.
"""

import os
from importlib import import_module
from typing import Any

SABOTAGE = "STAGE_SABOTAGE"
"""A variable: ``module:function``, called in each worker before it loads the model."""


class Stage:
    """Adds nothing to vLLM's worker."""


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
