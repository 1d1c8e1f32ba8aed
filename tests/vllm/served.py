"""A vLLM engine as seen from inside its process: takes calls from a pipe, one at a time, and answers each."""

import json
import os
import sys
import time
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DRAIN_S = 200.0


class Served:
    """An engine in this process, stepped by hand, so that a test decides what happens between two steps.

    Args:
        arguments: of `vllm.LLM`.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        common = {"skip_tokenizer_init": True, "enforce_eager": True, "seed": 0, "disable_log_stats": False}
        self._engine = LLM(**common | arguments).llm_engine
        self._count = 0

    def run(self, requests: list[dict[str, Any]], limit_s: float) -> list[dict[str, Any]]:
        """Answer all requests, which arrive and are aborted at the steps that they name.

        Raises:
            TimeoutError: not every request has ended after `limit_s` seconds.
        """
        answers: list[dict[str, Any]] = [
            {"tokens": [], "logprobs": [], "cached": 0, "ttft_s": None, "reason": None} for _ in requests
        ]
        waiting = dict(enumerate(requests))
        names: dict[str, int] = {}
        inside: dict[int, str] = {}
        began: dict[int, float] = {}
        deadline = time.monotonic() + limit_s
        step = 0
        while waiting or names:
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests {sorted(names.values())} have not ended after {limit_s:.0f} s")
            for index, request in list(waiting.items()):
                if request.get("at_step", 0) <= step:
                    del waiting[index]
                    began[index] = time.perf_counter()
                    name = request.get("name") or f"r{self._count}"
                    self._count += 1
                    inside[index] = self._add(name, request)
                    names[name] = index
            for name, index in list(names.items()):
                if requests[index].get("abort_at_step", step + 1) <= step:
                    self._engine.abort_request([inside[index]], internal=True)
                    answers[index]["reason"] = "abort"
                    del names[name]
            for output in self._engine.step():
                index = names.get(output.request_id)
                if index is None:
                    continue
                answer, found = answers[index], output.outputs[0]
                if found.token_ids and answer["ttft_s"] is None:
                    answer["ttft_s"] = time.perf_counter() - began[index]
                if output.finished:
                    del names[output.request_id]
                    answer["tokens"] = list(found.token_ids)
                    answer["logprobs"] = [
                        sorted((token, value.logprob) for token, value in row.items()) for row in found.logprobs or []
                    ]
                    answer["cached"] = output.num_cached_tokens or 0
                    answer["reason"] = found.finish_reason
                    answer["transfer"] = output.kv_transfer_params
            step += 1
        return answers

    def converse(
        self, conversations: list[list[list[int]]], count: int, think_s: float, limit_s: float
    ) -> list[dict[str, Any]]:
        """Hold all `conversations` at once; each asks its next turn `think_s` seconds after the last answer ended.

        Args:
            conversations: for each, the tokens that each turn adds to the text so far.
            count: tokens of each answer.
            think_s: seconds from an answer's end to the next turn.
            limit_s: seconds for all.

        Returns:
            For each turn of each conversation, in the order of their ends, its `conversation`, `turn`, `cached` tokens
            and `ttft_s`.

        Raises:
            TimeoutError: they have not ended after `limit_s` seconds.
        """
        scheduler = self._engine.engine_core.engine_core.scheduler
        texts: list[list[int]] = [[] for _ in conversations]
        due = [(0.0, number, 0) for number in range(len(conversations))]
        asked: dict[str, tuple[int, int, float]] = {}
        first: dict[str, float] = {}
        ended: list[dict[str, Any]] = []
        began = time.perf_counter()
        while due or asked:
            now = time.perf_counter() - began
            if now > limit_s:
                raise TimeoutError(f"{len(asked)} requests have not ended after {limit_s:.0f} s")
            for at, number, turn in [it for it in due if it[0] <= now]:
                due.remove((at, number, turn))
                texts[number] += conversations[number][turn]
                name = f"r{self._count}"
                self._count += 1
                self._add(name, {"tokens": list(texts[number]), "count": count})
                asked[name] = (number, turn, now)
            if not scheduler.has_requests():
                time.sleep(0.001)
                continue
            for output in self._engine.step():
                if (known := asked.get(output.request_id)) is None:
                    continue
                number, turn, at = known
                now = time.perf_counter() - began
                if output.outputs[0].token_ids:
                    first.setdefault(output.request_id, now - at)
                if not output.finished:
                    continue
                del asked[output.request_id]
                texts[number] += output.outputs[0].token_ids
                found = {"conversation": number, "turn": turn, "cached": output.num_cached_tokens or 0}
                ended.append(found | {"ttft_s": first[output.request_id]})
                if turn + 1 < len(conversations[number]):
                    due.append((now + think_s, number, turn + 1))
        return ended

    def _add(self, name: str, request: dict[str, Any]) -> str:
        from vllm.lora.request import LoRARequest

        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if (seed := request.get("embedding_seed")) is not None:
            prompt = {"prompt_embeds": self._embeddings(len(request["tokens"]), seed)}
        if (seed := request.get("image_seed")) is not None:
            prompt["multi_modal_data"] = {"image": [_image(seed)]}
            if request.get("image_name"):
                prompt["multi_modal_uuids"] = {"image": [request["image_name"]]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        lora = request.get("lora")
        return self._engine.add_request(
            name,
            prompt,
            SamplingParams(
                n=(samples := request.get("samples", 1)),
                temperature=float(samples > 1),
                max_tokens=request["count"],
                logprobs=request.get("logprobs"),
                detokenize=False,
                ignore_eos=True,
                extra_args={"kv_transfer_params": given} if (given := request.get("transfer")) else None,
            ),
            lora_request=LoRARequest(Path(lora).name, request.get("lora_number", 1), lora) if lora else None,
        )

    def _embeddings(self, count: int, seed: int) -> Any:
        import torch

        config = self._engine.model_config
        drawn = torch.randn(count, config.get_hidden_size(), generator=torch.Generator().manual_seed(seed))
        return drawn.to(config.dtype)

    def drain(self) -> None:
        """Step until the scheduler has nothing left: what was to be stored has been read from the engine's blocks.

        Raises:
            TimeoutError: it never comes to rest.
        """
        core = self._engine.engine_core.engine_core
        scheduler = core.scheduler
        deadline = time.monotonic() + DRAIN_S
        while scheduler.has_requests() or core.batch_queue:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the scheduler is still busy with {list(scheduler.requests)} after {DRAIN_S:.0f} s")
            self._engine.step()

    def reset(self, *, connector: bool) -> bool:
        """Reset the engine's prefix cache and, with `connector`, the connector's."""
        self.drain()
        return self._engine.reset_prefix_cache(reset_connector=connector)

    def metrics(self) -> dict[str, float]:
        """Every counter, gauge and histogram sum of vLLM, by name and those labels that tell something."""
        found: dict[str, float] = {}
        for metric in self._engine.get_metrics():
            labels = {key: value for key, value in metric.labels.items() if key not in ("engine", "model_name")}
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            value = getattr(metric, "value", getattr(metric, "sum", None))
            if value is not None:
                found[f"{metric.name}{{{shown}}}" if shown else metric.name] = value
        return found

    def chunk_tokens(self) -> int:
        """Of kvtier's chunks."""
        return self._engine.engine_core.engine_core.scheduler.connector._setup.geometry.chunk_tokens

    def cpu_s(self) -> float:
        """Processor seconds of all threads of this process so far."""
        return time.process_time()

    def told_by(self, place: str) -> Any:
        """What ``module:function`` says here."""
        return _called(place)

    def do(self, place: str, given: tuple[Any, ...], *, drains: bool) -> Any:
        """What ``module:function`` returns, given the engine and `given`."""
        if drains:
            self.drain()
        return _called(place, self._engine, *given)

    def close(self) -> None:
        """End the engine as its own server would."""
        self.drain()
        self._engine.engine_core.shutdown()


def serve(connection: Connection, job: str) -> None:
    """Build the engine that `job` describes and answer calls until one is `close`, or the pipe is closed.

    Args:
        connection: takes ``(method, arguments)``, gives ``(True, result)`` or ``(False, message)``.
        job: JSON with ``arguments`` (of `vllm.LLM`), ``environment``, ``log`` (file for everything that is printed)
            and ``sabotage`` (``module:function``, called before the engine is built, or empty).
    """
    found = json.loads(job)
    log = os.open(found["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(found["environment"])
    engine: Any = None
    name = "start"
    while name != "close":
        try:
            if engine is None:
                for place in filter(None, found["sabotage"].split(",")):
                    _called(place)
                engine, result = Served(found["arguments"]), None
            else:
                name, arguments = connection.recv()
                result = getattr(engine, name)(**arguments)
            connection.send((True, result))
        except EOFError:
            break
        except Exception as error:  # noqa: BLE001 - whatever it is, the test that asked must see it
            traceback.print_exc()
            connection.send((False, f"{type(error).__name__}: {error}"))
            if engine is None:
                break
    sys.stdout.flush()


def _called(place: str, *given: Any) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)(*given)


def _image(seed: int) -> Any:
    import numpy as np
    from models import IMAGE_SIDE
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8))
