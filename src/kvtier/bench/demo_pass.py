"""One pass of the demo, in a process of its own: `python -m kvtier.bench.demo_pass JOB.json`.

The job file says what to do; each event is one line of JSON on stdout: `ready`, then a `request` for each request, then
`done`; or `error`. Passes differ in nothing but whether kvtier stands between the caller and `generate`.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtier.bench.demo_model import ModelShape, build_model
from kvtier.bench.demo_trace import Step, build_prompt
from kvtier.errors import KvError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

    from kvtier.connect.transformers import Attachment

WARM_UP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Job:
    """What one pass is to do; travels to its process as JSON."""

    shape: ModelShape
    seed: int
    new_tokens: int
    threads: int
    steps: tuple[Step, ...]
    directory: str | None
    """Where kvtier keeps its chunks; None is the pass without kvtier."""
    namespace: str
    """Separates what this pass may see from whatever else the directory holds."""

    def write(self, path: Path) -> None:
        """Write the job to `path`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        """The job that was written to `path`."""
        plain: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        plain["shape"] = ModelShape(**plain["shape"])
        steps: list[dict[str, Any]] = plain["steps"]
        for step in steps:
            step["tokens"] = tuple(step["tokens"])
        plain["steps"] = tuple(Step(**step) for step in steps)
        return cls(**plain)


class Engine:
    """The model with or without kvtier, asked in the same way."""

    def __init__(self, job: Job) -> None:
        import torch  # noqa: PLC0415  an extra, wanted only here

        torch.set_num_threads(job.threads)
        self.new_tokens = job.new_tokens
        model = build_model(job.shape, job.seed)
        self.parameters = sum(it.numel() for it in model.parameters())
        self.generate: Callable[..., Any] = cast("Any", model).generate
        # The first request of a process pays for allocations and lazy imports; no pass should be charged for that.
        self._generate(self.generate, torch.arange(WARM_UP_TOKENS).unsqueeze(0))
        self.kv = None if job.directory is None else attach_kvtier(model, job)

    def answer(self, prompt: list[int]) -> dict[str, object]:
        """Send one request; the measured facts of it."""
        import torch  # noqa: PLC0415

        tokens = torch.tensor([prompt])
        generate = self.generate if self.kv is None else self.kv.generate
        answer, watch, total_s = self._generate(generate, tokens)
        return {
            "answer": answer,
            "ttft_ms": watch.first_token_s * 1e3,
            "total_ms": total_s * 1e3,
            "restored": {} if self.kv is None else self.kv.last.restored_by_source,
            "uncached_reason": "" if self.kv is None else self.kv.last.uncached_reason,
            "margins": watch.margins,
        }

    def _generate(self, generate: Callable[..., Any], tokens: "torch.Tensor") -> tuple[list[int], "Watch", float]:
        import torch  # noqa: PLC0415

        watch = Watch()
        begin_s = watch.begin()
        output = generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            logits_processor=[watch],
        )
        total_s = time.perf_counter() - begin_s
        return output[0, tokens.shape[1] :].tolist(), watch, total_s


class Watch:
    """Sees the logits of each new token as they are made (a logits processor); changes nothing."""

    def __init__(self) -> None:
        self.begin_s = 0.0
        self.first_token_s = 0.0
        self.margins: list[float] = []

    def begin(self) -> float:
        """Start the clock, right before `generate` is called."""
        self.begin_s = time.perf_counter()
        return self.begin_s

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":  # noqa: ARG002  the library's signature
        """Note when the first logits came and how close the best two of each token are."""
        best: list[float] = cast("Any", scores[0].topk(2).values).tolist()
        if not self.margins:
            self.first_token_s = time.perf_counter() - self.begin_s
        self.margins.append(best[0] - best[1])
        return scores


def attach_kvtier(model: "LlamaForCausalLM", job: Job) -> "Attachment":
    """Put kvtier between us and `model`."""
    from kvtier.connect.transformers import attach  # noqa: PLC0415

    # The demo's weights have no revision, so its place is free to keep the namespaces apart.
    return attach(model, job.directory, revision=job.namespace)


def run(job: Job, emit: Callable[[Mapping[str, object]], None]) -> None:
    """Do the pass."""
    begin_s = time.perf_counter()
    engine = Engine(job)
    emit(
        {
            "event": "ready",
            "set_up_s": time.perf_counter() - begin_s,
            "parameters": engine.parameters,
            "chunk_tokens": 0 if engine.kv is None else engine.kv.chunk_tokens,
        }
    )
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    first_s = time.perf_counter()
    for position in range(len(job.steps)):
        prompts.append(build_prompt(job.steps, position, prompts, answers))
        facts = engine.answer(prompts[-1])
        answers.append(facts["answer"])  # pyright: ignore[reportArgumentType]
        emit({"event": "request", **facts})
    last_s = time.perf_counter()
    closed = None if engine.kv is None else engine.kv.close()
    end_s = time.perf_counter()
    emit(
        {
            "event": "done",
            "wall_s": end_s - first_s,
            "flush_s": end_s - last_s,
            "lost": 0 if closed is None else closed.lost,
        }
    )


def main() -> int:
    """The process's entry point."""

    def emit(event: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()  # a parent that has gone shows here, and ends this process

    try:
        run(Job.read(Path(sys.argv[1])), emit)
    except KvError as error:
        emit({"event": "error", "message": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
