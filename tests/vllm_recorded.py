"""A recording of vLLM 0.32.0 on a CPU: configuration, KV tensors, and the block tables of each step.

A connector that only watches wrote `golden/vllm_0_32.json`, on models with random weights: one prompt of 700 tokens
with 80 generated ones, then one of 3,000 tokens with 4. This module turns it into objects with the names of vLLM's
classes, so that code that reads them is tested without vLLM. tests/vllm compares it with the engine itself.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_GOLDEN = Path(__file__).parent / "golden" / "vllm_0_32.json"
_ENUMS = {"kv_quant_mode", "cache_role", "role", "mamba_type"}


@cache
def _golden() -> dict[str, Any]:
    return json.loads(_GOLDEN.read_text())["cases"]


@dataclass(frozen=True)
class Step:
    """One step of one request."""

    request: int
    tokens: int
    """Tokens scheduled in the step. 0 if the request has finished."""
    blocks: list[list[int]]
    offers: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Recorded:
    """One engine. Its tensors are made anew, over memory for the requested number of blocks."""

    config: Any
    layers: dict[str, Any]
    steps: list[Step]
    views: dict[str, dict[str, Any]]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what `register_kv_caches` gets: views of one allocation, which is filled with ones."""
        size = max(tensor.size for tensor in self.config.kv_cache_tensors)
        memory = torch.ones(size, dtype=torch.int8)
        return {
            name: memory.view(dtype).as_strided(view["shape"], view["stride"], view["offset"])
            for name, view in self.views.items()
            for dtype in [getattr(torch, view["dtype"])]
        }


def recorded(case: str, blocks: int | None = None) -> Recorded:
    """Return a recorded engine, with another number of blocks if given."""
    found = _golden()[case]
    config = _object("KVCacheConfig", found["config"])
    views = {name: dict(view) for name, view in found["views"].items()}
    _check_placement(config, views)
    if blocks is not None:
        _shrink(config, views, blocks)
    steps = [
        Step(step["request"], step["tokens"], step["blocks"], [tuple(offer) for offer in step["offers"]])
        for step in found["steps"]
    ]
    layers = {name: _layer(layer) for name, layer in found["layers"].items()}
    return Recorded(config, layers, steps, views)


def _layer(found: dict[str, Any]) -> Any:
    backend = SimpleNamespace(get_name=lambda: found["backend"])
    fields: dict[str, Any] = {"attn_backend": backend} | ({"isa": found["isa"]} if found["isa"] else {})
    return _instance(found["cls"], fields)


def _object(name: str, found: Any) -> Any:
    if isinstance(found, dict):
        fields = {key: _object(key, value) for key, value in found.items() if key != "__class__"}
        return _instance(found.get("__class__", name), fields)
    if isinstance(found, list):
        return [_object(name, item) for item in found]
    return SimpleNamespace(name=found.rpartition(".")[2]) if name in _ENUMS else found


def _instance(name: str, fields: dict[str, Any]) -> Any:
    return type(name, (SimpleNamespace,), {})(**fields)


def _check_placement(config: Any, views: dict[str, dict[str, Any]]) -> None:
    """Check the recording itself: each view is where the configuration says."""
    for tensor in config.kv_cache_tensors:
        for number, name in enumerate(tensor.layers):
            view = views[name]
            width = getattr(torch, view["dtype"]).itemsize
            assert view["offset"] * width == tensor.offset + number * tensor.layer_stride
            assert view["stride"][0] * width == tensor.block_stride
            assert view["shape"][0] == config.num_blocks


def _shrink(config: Any, views: dict[str, dict[str, Any]], blocks: int) -> None:
    size = blocks * max(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    for tensor in config.kv_cache_tensors:
        assert tensor.layer_stride == tensor.block_stride * config.num_blocks, (
            "only layer-compact layouts were recorded"
        )
        tensor.layer_stride, tensor.size = tensor.block_stride * blocks, size
        for number, name in enumerate(tensor.layers):
            view = views[name]
            view["offset"] = number * tensor.layer_stride // getattr(torch, view["dtype"]).itemsize
            view["shape"] = [blocks, *view["shape"][1:]]
    config.num_blocks = blocks
