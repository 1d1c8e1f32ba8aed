"""Detects changes of a worker's weights, which vLLM replaces without notifying a connector.

digest   after a known change (`weight_calls`): a digest of every tensor that the model computes with
sample   after each step: `WeightSample` compares a few bytes of each parameter, and its address. It also notices
         `load_weights` of the model. So it sees changes that code in the process makes without calling vLLM
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvtier.connect.vllm.engine_hooks import watch_load_weights
from kvtier.keys.weights import digest_tensors

SAMPLE_S = 0.25
"""Seconds between comparisons of bytes in GPU memory, each of which has to wait for its result. Bytes in host memory
are compared at every look. A look at a model of 300 parameters on a CPU takes about 75 us."""

SAMPLE_ELEMENTS = 64
"""Number of elements compared per parameter. In bfloat16 a small training step leaves most elements unchanged."""

DIGEST_PART_BYTES = 64 << 20
"""Maximum bytes of a tensor in one copy from a device for a digest."""

HELD_MAX = 200_000
"""Maximum number of modules, objects, lists and dicts of all models searched for tensors."""

WITHOUT_WEIGHTS = (
    *("torch.", "triton.", "transformers.", "logging.", "threading.", "vllm.config.", "vllm.compilation."),
    *("vllm.distributed.", "vllm.logger.", "vllm.lora.punica_wrapper.", "vllm.v1.worker.workspace."),
)
"""Packages whose objects are not searched. They have no tensors, or only what a step leaves behind."""


def digest_of(models: Iterable[Any], others: Collection[int] = ()) -> bytes | None:
    """Return one digest of all tensors and numbers with which the models compute, or None if any cannot be read.

    It covers parameters, buffers, and what vLLM derived from them when it loaded them. Derived values may be
    attributes, or parts of objects that are not modules, such as an attention implementation.

    Args:
        models: each a `torch.nn.Module`.
        others: addresses of memory that does not contain weights.
    """
    parts: list[tuple[str, torch.Tensor]] = []
    numbers: dict[str, float] = {}
    modules = [(f"{number}.{path}.", it) for number, model in enumerate(models) for path, it in model.named_modules()]
    seen = {id(module) for _, module in modules}
    for where, module in modules:
        parameters: dict[str, Any] = module._parameters  # noqa: SLF001 - what it computes with
        own = cast("dict[str, Any]", vars(module))
        held: dict[str, Any] = {**own, **module._buffers, **parameters}  # noqa: SLF001
        # On a CPU vLLM packs weights elsewhere and leaves an empty parameter.
        if any(it is not None and it.device.type == "cpu" and not it.numel() for it in parameters.values()):
            return None
        tensors = [it for it in held.values() if isinstance(it, torch.Tensor)]
        if any(it.is_meta or is_traceable_wrapper_subclass(it) for it in tensors):
            return None
        held |= _held({name: it for name, it in own.items() if name not in _OF_MODULES}, seen)
        numbers |= {where + name: it for name, it in held.items() if isinstance(it, float)}
        found = ((where + name, it.detach()) for name, it in held.items() if isinstance(it, torch.Tensor))
        parts += [(name, it) for name, it in found if it.untyped_storage().data_ptr() not in others]
    pieces = itertools.chain.from_iterable(_pieces(name, tensor) for name, tensor in parts)
    rest = json.dumps(sorted(numbers.items())).encode()
    return digest_tensors(itertools.chain(pieces, [("numbers", "", (), rest)])).digest


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _held(within: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield each tensor and number in some values, nested ones included, with its path.

    Args:
        within: the values, by name.
        seen: ids of objects that are not searched. Objects that are searched are added.

    Raises:
        ValueError: more than `HELD_MAX` objects would be searched.
    """
    todo = deque(within.items())
    while todo:
        path, it = todo.popleft()
        if isinstance(it, float) or (isinstance(it, torch.Tensor) and not it.is_meta):
            yield path, it
        elif id(it) not in seen and (parts := _parts(it)):
            seen.add(id(it))
            todo += [(f"{path}.{name}", part) for name, part in parts]
            if len(seen) > HELD_MAX:
                raise ValueError(f"a model has more than {HELD_MAX} objects, up to {path}")


def _parts(it: Any) -> list[tuple[Any, Any]]:  # noqa: ANN401 - anything
    """Return the content of a list, tuple, dict or object with attributes, by names that are equal in each process."""
    if isinstance(it, list | tuple):
        return list(enumerate(cast("Sequence[Any]", it)))
    if isinstance(it, dict):
        held = cast("dict[Any, Any]", it).items()
        return [(name if isinstance(name, str | int) else number, part) for number, (name, part) in enumerate(held)]
    kind = cast("type[Any]", type(it))
    is_module, is_code = isinstance(it, torch.nn.Module), isinstance(it, type | FunctionType | MethodType | ModuleType)
    if is_code or (f"{kind.__module__}.".startswith(WITHOUT_WEIGHTS) and not is_module):
        return []
    slots = [name for each in kind.__mro__ for name in vars(each).get("__slots__", ()) if hasattr(it, name)]
    return [*((name, getattr(it, name)) for name in slots), *getattr(it, "__dict__", {}).items()]


def _pieces(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    """Yield the memory between a tensor's first and last element, in pieces, for `digest_tensors`."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    first = int(tensor.storage_offset()) * tensor.element_size()
    steps = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    size = (sum(steps) + 1) * tensor.element_size() if tensor.numel() else 0
    kind = f"{tensor.dtype} {tuple(tensor.stride())}"
    for offset in range(0, max(1, size), DIGEST_PART_BYTES):
        piece = memory[first + offset : first + min(size, offset + DIGEST_PART_BYTES)].cpu()
        yield f"{name} {offset}", kind, tuple(tensor.shape), piece.numpy().data


class WeightSample:
    """The address and some bytes of each parameter of some models.

    Only one thread uses it, but any thread may call a model's `load_weights`.

    Args:
        models: each a `torch.nn.Module`.
        has_moving_experts: whether vLLM moves experts in memory, which changes no weight (expert parallel load
            balancing).
    """

    def __init__(self, *models: Any, has_moving_experts: bool = False) -> None:  # noqa: ANN401
        self._models = models
        self._has_moving_experts = has_moving_experts
        self._next_sample_s = 0.0
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._take()
        for model in models:
            watch_load_weights(model, self._loading)

    def look(self, *, is_reset: bool = False) -> str:
        """Return what has changed the weights since the start or the last reset; empty if nothing has.

        Args:
            is_reset: whether to compare with the present weights from now on.
        """
        try:
            if is_reset:
                self._take()
            elif not self._changed and (found := self._moved() or self._rewritten()):
                self._changed = found
        except Exception as error:  # noqa: BLE001 - whatever fails, the engine continues without kvtier
            self._changed = f"comparing them failed: {error!r}"
        if self._changed:
            self._compared = []  # drop the samples, which keep the memory of replaced parameters
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
        # No other tensor can get the memory of a replaced one, because `_compared` keeps it.
        return "" if self._now() == self._addresses else "parameters were replaced"

    def _rewritten(self) -> str:
        is_due = time.monotonic() >= self._next_sample_s
        for slices, seen in self._compared:
            if is_due or not seen.is_cuda:
                # On a GPU, use a separate stream, because the engine's stream has steps that were launched ahead.
                with torch.cuda.stream(self._stream):
                    if not torch.equal(torch.cat(slices), seen):
                        return "parameters were written in place"
        if is_due:
            self._next_sample_s = time.monotonic() + SAMPLE_S
        return ""

    def _loading(self) -> None:
        self._changed = "load_weights of the model was called"


def _slice(parameter: torch.Tensor) -> torch.Tensor:
    """Return adjacent bytes in the middle of a parameter's memory, whatever its strides."""
    memory = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(parameter.untyped_storage())
    first = int(parameter.storage_offset()) * parameter.element_size()
    size = min(parameter.nbytes, memory.numel() - first)
    count = min(size, SAMPLE_ELEMENTS * parameter.element_size())
    return memory[first + (size - count) // 2 :][:count]
