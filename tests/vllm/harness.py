"""A vLLM engine in a process of its own, as a test drives it: asked, made to forget, ended, killed.

All processes are forked from one that has imported vLLM already, which saves nine seconds each. Nothing of vLLM runs in
the process of the tests.
"""

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from served import serve

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # One thread: the order of additions, and with it the last bit, must not depend on the number of free cores.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    # The sampler's helpers would be compiled, at twelve seconds a machine and two a process.
    "TORCHDYNAMO_DISABLE": "1",
}

SEED = "ASYNCHRONOUS_SEED"
"""A variable. With it engines with a connector are asynchronous (see `asynchronous`), and others stay as they are."""

START_S = 300.0
ANSWER_S = 300.0
END_S = 120.0
_PRELOADED = ["vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"]
_LOG_LINES = 30
_LOG_COLUMNS = 200
_START = ["forkserver"]
"""How processes are started; see `use_gpu`."""


class EngineError(Exception):
    """The engine refused, failed, or did not answer in time."""


@dataclass(frozen=True)
class Ask:
    """One request."""

    tokens: Sequence[int]
    count: int = 8
    """Tokens to generate, greedily."""
    salt: str = ""
    lora: str = ""
    """Directory of an adapter."""
    lora_number: int = 1
    embedding_seed: int | None = None
    """Instead of `tokens`, as many embeddings drawn with this seed."""
    image_seed: int | None = None
    """Seed for the pixels of an image, at `models.IMAGE` among the tokens."""
    image_name: str = ""
    """The `uuid` that the client gives it."""
    at_step: int = 0
    """Arrives when the engine has done this many steps."""
    abort_at_step: int | None = None
    logprobs: int | None = 5
    transfer: dict[str, Any] | None = None
    """`kv_transfer_params`."""
    name: str = ""
    """The request's id; by default ``r`` and its number."""
    samples: int = 1
    """More than one are drawn at random."""


@dataclass(frozen=True)
class Answer:
    """What came back."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] = field(repr=False)
    """For each token the five likeliest, and the one that was taken: (token, log probability), by token."""
    cached: int
    """Prompt tokens that were not computed, from the engine's own blocks or ours."""
    ttft_s: float | None
    reason: str | None
    transfer: dict[str, Any] | None = None
    """`kv_transfer_params` of the response."""


def in_process(function: Callable[..., None], *arguments: Any) -> None:
    """Run `function` in a process of its own, where what vLLM brings along is imported already.

    Raises:
        EngineError: it failed.
    """
    process = _context().Process(target=function, args=arguments)
    process.start()
    process.join(START_S)
    if process.is_alive():
        process.kill()
        process.join(END_S)
    if process.exitcode:
        raise EngineError(f"{function.__name__} ended with exit code {process.exitcode}")


def use_gpu() -> None:
    """For engines on a GPU: compiled, with the default number of threads, each in a new process, as CUDA demands."""
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"):
        ENVIRONMENT.pop(name, None)
    _START[0] = "spawn"


def _context() -> ForkServerContext | SpawnContext:
    os.environ.update(ENVIRONMENT)  # before the first process is made: all others inherit it
    if _START[0] == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class Engine:
    """An engine that runs until it is closed; a context manager.

    Args:
        model: directory of the checkpoint.
        log: file for everything that the engine prints.
        connector: the connector's configuration, or None.
        environment: further variables of the process.
        sabotage: ``module:function`` that breaks something before the engine is built.
        arguments: of `vllm.LLM`.

    Raises:
        EngineError: the engine did not come up.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        connector: dict[str, Any] | None = None,
        *,
        environment: dict[str, str] | None = None,
        sabotage: str = "",
        **arguments: Any,
    ) -> None:
        self.log = log
        self._is_over = False
        given = {"model": str(model)} | arguments
        if connector is not None:
            given["kv_transfer_config"] = connector
            if seed := os.environ.get(SEED):
                environment = {SEED: seed} | (environment or {})
                sabotage = ",".join(filter(None, ("asynchronous:apply", sabotage)))
        job = {"arguments": given, "environment": environment or {}, "log": str(log), "sabotage": sabotage}
        context = _context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, json.dumps(job)))
        self._process.start()
        theirs.close()
        try:
            self._receive("start", START_S)
        except EngineError:
            self.kill()
            raise

    def ask(self, *requests: Ask | Sequence[int], limit_s: float = ANSWER_S, **fields: Any) -> list[Answer]:
        """Answers to all `requests`, which run together; bare tokens become an `Ask` with `fields`."""
        asked = [it if isinstance(it, Ask) else Ask(it, **fields) for it in requests]
        found = [{key: value for key, value in vars(it).items() if value not in (None, "")} for it in asked]
        return [Answer(**it) for it in self._call("run", limit_s + 10.0, requests=found, limit_s=limit_s)]

    def ask_in_turn(self, *prompts: Ask | Sequence[int], **fields: Any) -> list[Answer]:
        """Answers to all `prompts`, each asked when the one before has ended."""
        return [self.ask(prompt, **fields)[0] for prompt in prompts]

    def ask_and_close(self, *prompts: Ask | Sequence[int], **fields: Any) -> list[Answer]:
        """Answers to all `prompts`, in turn; then the engine ends, and what is pending is in its tiers."""
        answers = self.ask_in_turn(*prompts, **fields)
        self.close()
        return answers

    def hits_of(self, *prompts: Ask | Sequence[int], **fields: Any) -> int:
        """Tokens of `prompts`, asked in turn, that come from the connector."""
        before = self.external_hits()
        self.ask_in_turn(*prompts, **fields)
        return self.external_hits() - before

    def converse(
        self, conversations: list[list[list[int]]], *, count: int, think_s: float, limit_s: float
    ) -> list[dict[str, Any]]:
        """See `Served.converse`."""
        given = {"conversations": conversations, "count": count, "think_s": think_s, "limit_s": limit_s}
        return self._call("converse", limit_s + 10.0, **given)

    def drain(self) -> None:
        """Step until nothing is left to do."""
        self._call("drain", ANSWER_S)

    def forget(self, *, everywhere: bool = False) -> bool:
        """Empty the engine's own prefix cache, and the connector's as well if `everywhere`; whether it worked."""
        return self._call("reset", ANSWER_S, connector=everywhere)

    def metrics(self) -> dict[str, float]:
        """vLLM's counters, gauges and sums."""
        return self._call("metrics", ANSWER_S)

    def external_hits(self) -> int:
        """Tokens that came from the connector so far."""
        return round(self.metrics().get("vllm:external_prefix_cache_hits", 0))

    def cpu_s(self) -> float:
        """Processor seconds of the engine's process, with everything that runs in its background."""
        return self._call("cpu_s", ANSWER_S)

    def told_by(self, place: str) -> Any:
        """What ``module:function`` says in the engine's process."""
        return self._call("told_by", ANSWER_S, place=place)

    def do(self, place: str, *given: Any, drains: bool = True) -> Any:
        """What ``module:function`` returns in the engine's process, given vLLM's engine and `given`.

        Args:
            place: of the function.
            given: further arguments.
            drains: the engine first comes to rest.
        """
        return self._call("do", ANSWER_S, place=place, given=given, drains=drains)

    @property
    def chunk_tokens(self) -> int:
        """Of kvtier's chunks. In a model with states it depends on vLLM's blocks, and they on the processor."""
        return self._call("chunk_tokens", ANSWER_S)

    @property
    def process_id(self) -> int:
        """Of the engine's process."""
        assert self._process.pid is not None
        return self._process.pid

    def printed(self) -> str:
        """Everything that the engine has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def private(self) -> list[str]:
        """What it has said of KV that it shares with no other engine."""
        return re.findall(r" WARNING .*(KV is kept in host memory only.*)", self.printed())

    def close(self) -> None:
        """End the engine properly.

        Raises:
            EngineError: it did not end, or not well.
        """
        if self._is_over:
            return
        if self._process.is_alive():
            self._call("close", END_S)
            self._process.join(END_S)
        code = self._process.exitcode
        self.kill()
        if code:
            raise self._failed(f"ended with exit code {code}")

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._is_over = True
        if self._process.is_alive():
            os.kill(self.process_id, signal.SIGKILL)
        self._process.join(END_S)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _call(self, name: str, patience_s: float, /, **arguments: Any) -> Any:
        try:
            self._connection.send((name, arguments))
        except OSError as error:
            raise self._failed(f"{name}: the process has gone") from error
        return self._receive(name, patience_s)

    def _receive(self, name: str, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            raise self._failed(f"{name}: no answer within {limit_s:.0f} s")
        try:
            is_good, result = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._failed(f"{name}: the process has gone") from None
        if not is_good:
            raise self._failed(f"{name}: {result}")
        return result

    def _failed(self, message: str) -> EngineError:
        lines = [line[:_LOG_COLUMNS] for line in self.printed().splitlines()[-_LOG_LINES:]]
        return EngineError("\n".join([message, *lines]))
