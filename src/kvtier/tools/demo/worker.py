"""Runs one pass of the demo in its own process. The parent process calls `pass_events`, which is here as well.

The process is `python -m kvtier.tools.demo.worker JOB.json`. It prints one JSON object per line: `ready`, a `request`
for each request, then `done`, or else `error`. Passes differ only in whether kvtier is attached to the model.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtier.errors import ConfigError, KvError
from kvtier.tools.demo.model import LlamaShape, build_model, read_pretrained
from kvtier.tools.demo.request_plan import PlannedRequest, build_prompt

if TYPE_CHECKING:
    import torch

WARM_UP_TOKENS = 256

SILENCE_S = 300.0
"""Seconds without output after which a process is killed. A request to the largest model takes a few seconds."""

GRACE_S = 10.0
"""Time that a process may take to exit before it is killed."""


class DemoError(KvError):
    """A pass failed for a reason other than a setting."""


@dataclass(frozen=True, slots=True)
class PassJob:
    """The work of one pass. The process of the pass gets it as JSON."""

    shape: LlamaShape
    seed: int
    """Seed of random weights."""
    checkpoint: str | None
    """Directory of trained weights; None means random weights."""
    new_tokens: int
    """Tokens of the longest answer."""
    threads: int
    requests: tuple[PlannedRequest, ...]
    directory: str | None
    """Directory of the store; None in the pass without kvtier."""
    namespace: str
    """Namespace of the pass, which hides the chunks of other namespaces in the store."""

    @classmethod
    def read(cls, path: Path) -> "PassJob":
        """Read the job from the JSON file at `path`."""
        members: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        members["shape"] = LlamaShape(**members["shape"])
        requests: list[dict[str, Any]] = members["requests"]
        members["requests"] = tuple(
            PlannedRequest(it["session"], it["turn"], it["parent"], tuple(it["tokens"]), it["end"]) for it in requests
        )
        return cls(**members)


class LogitsRecorder:
    """A logits processor that changes nothing. It records margins and the time of the first logits."""

    def __init__(self) -> None:
        self.begin_s = time.perf_counter()
        self.first_token_s = 0.0
        self.margins: list[float] = []
        """For each new token, the best token's logit minus the second best's."""

    def __call__(self, input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":  # noqa: ARG002  the library's signature
        """Record the margin of one token. Return the unchanged scores."""
        best: list[float] = cast("Any", scores[0].topk(2).values).tolist()
        if not self.margins:
            self.first_token_s = time.perf_counter() - self.begin_s
        self.margins.append(best[0] - best[1])
        return scores


class PassModel:
    """The model, with kvtier attached if the job has a store."""

    def __init__(self, job: PassJob) -> None:
        import torch  # noqa: PLC0415  an extra, needed only here

        torch.set_num_threads(job.threads)
        self.new_tokens = job.new_tokens
        model = build_model(job.shape, job.seed) if job.checkpoint is None else read_pretrained(Path(job.checkpoint))
        self.parameters = sum(it.numel() for it in model.parameters())
        self.generate: Callable[..., Any] = cast("Any", model).generate
        self.kv = None
        # The first request of a process includes allocations and lazy imports, so it is not measured.
        self.answer(list(range(WARM_UP_TOKENS)))
        if job.directory is not None:
            from kvtier.connect.transformers import attach  # noqa: PLC0415

            # The demo's weights have no revision, so this field can separate namespaces.
            self.kv = attach(model, job.directory, revision=job.namespace)
            self.generate = self.kv.generate

    def answer(self, prompt: list[int]) -> dict[str, object]:
        """Run one request. Return the measurements."""
        import torch  # noqa: PLC0415

        tokens = torch.tensor([prompt])
        recorder = LogitsRecorder()
        output = self.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            logits_processor=[recorder],
        )
        total_s = time.perf_counter() - recorder.begin_s
        return {
            "answer": output[0, tokens.shape[1] :].tolist(),
            "ttft_ms": recorder.first_token_s * 1e3,
            "total_ms": total_s * 1e3,
            "restored": {} if self.kv is None else self.kv.last.restored_by_source,
            "uncached_reason": "" if self.kv is None else self.kv.last.uncached_reason,
            "margins": recorder.margins,
        }


def run_pass(job: PassJob, emit: Callable[[Mapping[str, object]], None]) -> None:
    """Run all requests of a pass, and emit the pass's events."""
    begin_s = time.perf_counter()
    model = PassModel(job)
    emit(
        {
            "event": "ready",
            "set_up_s": time.perf_counter() - begin_s,
            "parameters": model.parameters,
            "chunk_tokens": 0 if model.kv is None else model.kv.chunk_tokens,
        }
    )
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    first_s = time.perf_counter()
    for request in job.requests:
        prompts.append(build_prompt(request, prompts, answers))
        event = model.answer(prompts[-1])
        answers.append(cast("list[int]", event["answer"]))
        emit({"event": "request", **event})
    last_s = time.perf_counter()
    closed = None if model.kv is None else model.kv.close()
    end_s = time.perf_counter()
    emit({"event": "done", "wall_s": end_s - first_s, "flush_s": end_s - last_s, "lost": closed.lost if closed else 0})


def pass_events(name: str, job: PassJob, work: Path) -> Generator[Mapping[str, Any]]:
    """Start the process of one pass and yield its events. The process has ended when the generator ends.

    Args:
        name: name of the pass.
        job: work of the pass.
        work: a directory for the job file and the process's stderr.

    Raises:
        ConfigError: the process refused a setting.
        DemoError: the process failed or was silent for too long.
    """
    job_file, errors_file = work / f"{name}.json", work / f"{name}.stderr"
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    with errors_file.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.tools.demo.worker", str(job_file)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(job.threads),
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the pass
        )
    is_done = False
    try:
        for line in _lines(process, name):
            event: Mapping[str, Any] = json.loads(line)
            if event["event"] == "error":
                raise ConfigError(f"pass {name}: {event['message']}")
            is_done = event["event"] == "done"
            yield event
        code = process.wait(GRACE_S)
        if code or not is_done:
            last = errors_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
            raise DemoError("\n".join([f"pass {name} ended with exit code {code}", *last]))
    except subprocess.TimeoutExpired:
        raise DemoError(f"pass {name} did not exit within {GRACE_S:.0f} s of its last answer") from None
    finally:
        _end(process)


def _environment(threads: int) -> dict[str, str]:
    return {
        # Spinning threads gain nothing on an idle machine. On a shared one they take cores from the working thread,
        # and make a pass up to ten times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def _lines(process: subprocess.Popen[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines of the process's output, with a deadline for each."""
    assert process.stdout is not None
    buffered = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(SILENCE_S):
                raise DemoError(f"pass {name} had no output for {SILENCE_S:.0f} s and was killed")
            read = os.read(process.stdout.fileno(), 1 << 16)
            if not read:
                return
            *lines, buffered = (buffered + read).split(b"\n")
            yield from lines


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate the process, and kill it if it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(GRACE_S)
    if process.stdout is not None:
        process.stdout.close()


def main() -> int:
    """Run the pass whose job file is named on the command line. Return the exit code."""

    def emit(event: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()  # raises if the parent has ended

    try:
        run_pass(PassJob.read(Path(sys.argv[1])), emit)
    except KvError as error:
        emit({"event": "error", "message": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
