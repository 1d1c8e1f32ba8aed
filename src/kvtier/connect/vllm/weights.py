"""Weights that change while the engine runs: vLLM replaces them without notifying a connector.

calls    in the scheduler's process: every call of vLLM to its workers passes `Executor.collective_rpc`. Before a call
         that is not in `HARMLESS`, kvtier stops loads and stores. An adapter that is loaded is identified
sample   in each worker's process: `WeightSample` compares a few bytes of each parameter, and where it is, after each
         step. It also notices `load_weights` of the model. So it sees what code in the process does without a call
"""

import inspect
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

HARMLESS = frozenset({
    "execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids", "get_supported_tasks",
    "get_kv_cache_spec", "get_supported_kv_cache_layouts", "get_kv_connector_handshake_metadata",
    "get_cache_block_size_bytes", "get_simple_cpu_offload_num_cpu_blocks", "supports_draft_weight_updates",
    "check_health", "synchronize_device", "profile", "reset_mm_cache", "reset_encoder_cache",
    "release_late_interaction_query_cache", "add_lora", "remove_lora", "pin_lora", "list_loras", "save_sharded_state",
    "save_tensorized_model", "compute_weight_checksums", "get_model_inspection", "get_encoder_timing_stats",
    "get_compilation_match_table", "shutdown",
})  # fmt: skip
"""Methods of vLLM's workers that change no weights (vLLM 0.32 and 0.33)."""

SAMPLE_S = 0.25
"""Interval at which bytes in a GPU's memory are compared: the result has to be waited for. Bytes in host memory are
compared at every look. A look at a model of 300 parameters on a CPU takes about 75 us."""

SAMPLE_ELEMENTS = 64
"""Elements of a parameter that are compared. In bfloat16 a small step of training leaves most elements unchanged."""

_ARGS = 2
"""Position of the arguments for the method: ``collective_rpc(method, timeout, args, kwargs)``."""


def on_stack(name: str) -> Any:  # noqa: ANN401 - vLLM's objects
    """Attribute `name` of the nearest object whose method is running. vLLM passes only KV memory to a connector.

    Raises:
        LookupError: none has it.
    """
    for info in inspect.stack(0):
        caller = info.frame.f_locals.get("self")
        if hasattr(caller, name):
            return getattr(caller, name)
    raise LookupError(f"no caller has {name}")


def watch_calls(executor: Any, called: Callable[[str, Any], None]) -> None:  # noqa: ANN401 - vLLM's `Executor`
    """Call `called(method, adapter)` before any call of the engine's workers that may change numbers.

    Args:
        executor: the engine's.
        called: gets the name of the method; and of `add_lora` the adapter, otherwise None.
    """
    inner = executor.collective_rpc

    @wraps(inner)
    def collective_rpc(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401
        method: Any = args[0] if args else kwargs.get("method")
        is_known = isinstance(method, str) and method in HARMLESS
        if not is_known or method == "add_lora":
            name = method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)
            given: Any = args[_ARGS] if len(args) > _ARGS else kwargs.get("args", ())
            called(name, given[0] if is_known and given and isinstance(given, (tuple, list)) else None)
        return inner(*args, **kwargs)

    executor.collective_rpc = collective_rpc


class WeightSample:
    """Where each parameter of some models is, and some of its bytes. Used by one thread, apart from `load_weights`.

    Args:
        models: each a `torch.nn.Module`.
        has_moving_experts: vLLM moves experts between places, which changes no number (expert parallel load balancing).
    """

    def __init__(self, *models: Any, has_moving_experts: bool = False) -> None:  # noqa: ANN401
        self._models = models
        self._has_moving_experts = has_moving_experts
        self._next_sample_s = 0.0
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._take()
        for model in models:
            inner = getattr(model, "load_weights", None)
            if inner is not None:
                model.load_weights = self._noticed(inner)

    def look(self, *, is_reset: bool = False) -> str:
        """What has changed the weights since the start or the last reset; empty if nothing has.

        Args:
            is_reset: from now on compare with the weights as they are now.
        """
        try:
            if is_reset:
                self._take()
            elif not self._changed and (found := self._moved() or self._rewritten()):
                self._changed = found
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without kvtier
            self._changed = f"a look at them failed: {error!r}"
        if self._changed:
            self._compared = []  # it keeps the memory of replaced parameters
        return self._changed

    def _take(self) -> None:
        self._changed = ""
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)  # noqa: SLF001 - what the module computes with
            for model in self._models
            for path, module in model.named_modules()
            if not (self._has_moving_experts and "experts" in path and "shared" not in path)
            for name, parameter in module._parameters.items()  # noqa: SLF001
            if parameter is not None and parameter.numel()
        ]
        self._addresses = self._now()
        now = [owner[name] for owner, name in self._places]
        by_device = [[_slice(it) for it in now if it.device.type == device] for device in ("cpu", "cuda")]
        self._compared = [(slices, torch.cat(slices)) for slices in by_device if slices]
        if self._stream is not None:
            torch.cuda.synchronize()  # the copies are compared on another stream

    def _now(self) -> list[int]:
        return [owner[name].data_ptr() for owner, name in self._places]

    def _moved(self) -> str:
        # No other tensor gets the memory of a replaced one: `_compared` keeps it.
        return "" if self._now() == self._addresses else "parameters were replaced"

    def _rewritten(self) -> str:
        is_due = time.monotonic() >= self._next_sample_s
        for slices, seen in self._compared:
            if is_due or not seen.is_cuda:
                # On a GPU on a stream of its own: the engine's holds steps that have been launched ahead.
                with torch.cuda.stream(self._stream):
                    if not torch.equal(torch.cat(slices), seen):
                        return "parameters were written in place"
        if is_due:
            self._next_sample_s = time.monotonic() + SAMPLE_S
        return ""

    def _noticed(self, inner: Callable[..., object]) -> Callable[..., object]:
        @wraps(inner)
        def load_weights(*args: object, **kwargs: object) -> object:
            self._changed = "load_weights of the model was called"
            return inner(*args, **kwargs)

        return load_weights


def _slice(parameter: torch.Tensor) -> torch.Tensor:
    """Adjacent bytes in the middle of a parameter's memory, whatever its strides."""
    memory = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(parameter.untyped_storage())
    first = int(parameter.storage_offset()) * parameter.element_size()
    size = min(parameter.nbytes, memory.numel() - first)
    count = min(size, SAMPLE_ELEMENTS * parameter.element_size())
    return memory[first + (size - count) // 2 :][:count]
