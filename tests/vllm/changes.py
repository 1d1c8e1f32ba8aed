"""What changes the weights of a running engine, and what does not. Each function is named by a test.

Each gets vLLM's engine and the directory of another checkpoint of the same model.
"""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any


def reload(engine: Any, path: str) -> None:
    """As an operator does it, or a trainer that writes checkpoints."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": path})


def call(engine: Any, path: str) -> None:
    """A function of the caller, in every worker."""
    engine.collective_rpc(_write, args=(path,))


def call_reload(engine: Any, path: str) -> None:
    """A function of the caller that reads a checkpoint, in every worker."""
    engine.collective_rpc(_reload, args=(path,))


def apply(engine: Any, path: str) -> None:
    """A function of the caller, on the model."""
    engine.apply_model(lambda model: _copy(model, path))


def load_directly(engine: Any, path: str) -> None:
    """As trainers do it that run in the process of the engine: vLLM is not called."""
    model = _model(engine)
    model.load_weights(_tensors(model, path))


def write_directly(engine: Any, path: str) -> None:
    """Without any call, and without a trace in the tensors' counters."""
    _copy(_model(engine), path)


def replace_directly(engine: Any, path: str) -> None:
    """Other parameters in the place of the old ones."""
    import torch

    for module in _model(engine).modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
    _copy(_model(engine), path)


def sleep(engine: Any, path: str) -> None:
    """On a GPU, sleep of level 2 discards the weights, and a trainer writes others when the engine wakes up."""
    engine.sleep(level=2)
    engine.wake_up()
    _copy(_model(engine), path)


def interrupt(engine: Any, prompts: list[list[int]], steps: int) -> None:
    """Ask for `prompts`, and leave them after some steps: running, or waiting for their loads."""
    from vllm import SamplingParams

    for number, tokens in enumerate(prompts):
        sampling = SamplingParams(max_tokens=30, ignore_eos=True, detokenize=False)
        engine.add_request(f"left{id(prompts)}.{number}", {"prompt_token_ids": tokens}, sampling)
    for _ in range(steps):
        engine.step()


def begin(engine: Any, tokens: list[int]) -> None:
    """Ask for a prompt, and leave it when some of it has been computed."""
    interrupt(engine, [tokens], 0)
    scheduler = engine.engine_core.engine_core.scheduler
    while not any(it.num_computed_tokens for it in scheduler.running):  # the connector may still be asked
        engine.step()


def reset(engine: Any, preempts: bool, everywhere: bool) -> bool:
    """One of vLLM's resets."""
    return engine.reset_prefix_cache(preempts, everywhere)


def harmless(engine: Any, path: str) -> None:
    """What monitoring and benchmarks call."""
    for name in ("check_health", "get_model_inspection", "synchronize_device", "get_supported_tasks"):
        engine.collective_rpc(name)
    engine.reset_mm_cache()
    engine.reset_encoder_cache()


def overlook_calls() -> None:
    """Calls are not watched: the control of what the workers notice."""
    from kvtier.connect.vllm import engine_hooks

    engine_hooks.HARMLESS |= {"reload_weights"}


def overlook() -> None:
    """Nothing is watched: the control of the tests."""
    from kvtier.connect.vllm.scheduler.cache_invalidation import Invalidation
    from kvtier.connect.vllm.scheduler.weight_calls import WeightCalls
    from kvtier.connect.vllm.worker.weight_changes import WeightSample

    WeightSample.look = lambda self, *, is_reset=False: ""  # type: ignore[method-assign]
    Invalidation.weights_change = lambda self, what: None  # type: ignore[method-assign]
    WeightCalls.around = lambda self, call: nullcontext()  # type: ignore[method-assign]


def _reload(worker: Any, path: str) -> None:
    worker.reload_weights(weights_path=path)


def _write(worker: Any, path: str) -> None:
    _copy(worker.get_model(), path)


def _copy(model: Any, path: str) -> None:
    """`load_weights` of the class, which writes ``parameter.data``: what watches the model does not see the call."""
    type(model).load_weights(model, _tensors(model, path))


def _tensors(model: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Tensors that vLLM leaves where they are on a CPU: embeddings and norms. It packs all others elsewhere."""
    sizes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return ((name, tensor) for name, tensor in tensors_of(path) if sizes.get(name) == tensor.shape)


def tensors_of(path: str) -> Iterator[tuple[str, Any]]:
    """All tensors of a checkpoint, by name."""
    from safetensors import safe_open

    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


def _model(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.get_model()


def ask_and_replace(engine: Any, tokens: list[int], path: str, number: int, other: str) -> list[int]:
    """What the engine answers with an adapter whose weights are replaced after the request has arrived.

    Args:
        engine: vLLM's.
        tokens: the prompt.
        path: of the adapter.
        number: of the adapter.
        other: path of the adapter whose weights come into its place.
    """
    from vllm.lora.request import LoRARequest

    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    adapter = LoRARequest(Path(path).name, number, path)
    engine.add_request(f"replaced-{number}", {"prompt_token_ids": tokens}, sampling, lora_request=adapter)
    replace_adapter(engine, path, other)
    while True:
        for output in engine.step():
            if output.finished:
                return list(output.outputs[0].token_ids)


def replace_adapter(engine: Any, path: str, other: str) -> None:
    """The weights of an adapter are replaced, as rsync and downloads do it."""
    new = Path(path) / "new"
    shutil.copyfile(Path(other) / "adapter_model.safetensors", new)
    new.replace(Path(path) / "adapter_model.safetensors")
