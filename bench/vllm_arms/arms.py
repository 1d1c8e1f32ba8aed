"""Arms and sizes of `bench/vllm.py`, and the measurement of one answer."""

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import Answer, Ask, Engine

from kvtier.bench.serve.arms import parse_arm, transfer_config

DTYPE = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()) else "float32"
"""A processor without bfloat16 instructions computes it nine times slower than float32."""

VALUE_BYTES = 2 if DTYPE == "bfloat16" else 4
TALK_TOKENS_MAX = 2048
"""Length of the longest conversation."""

CHUNK_FILE_BYTES_MIN = 16 << 10
"""Smaller files of a store have no KV."""

QUIET_S = 0.5
QUIET_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Sizes:
    """Sizes of all parts."""

    model: str
    prompt_tokens: int
    prompts: int
    """Samples of each time to first token."""
    pair_tokens: int
    """Prompts that measure the cost of a miss; short, so that a store has more weight."""
    pairs: int
    talks: int
    """Runs of each arm with the growing conversations."""
    conversations: int
    turns: int
    first_tokens: int
    turn_tokens: int
    answer_tokens: int
    running: int
    """Largest batch of the engine."""
    think_conversations: int
    think_turns: int
    think_first_tokens: int
    think_turn_tokens: int
    think_pairs: int
    """Runs of each arm."""
    throttled_tokens: int
    throttled_prompts: int
    host_bytes: int
    small_host_bytes: int
    """Smaller than the KV of the prompt."""
    engine_bytes: int
    """KV memory of the engine in float32, half of it in bfloat16; smaller than the conversations' KV."""


FULL = Sizes(
    model="llama-137m",
    prompt_tokens=8000,
    prompts=5,
    pair_tokens=600,
    pairs=20,
    talks=5,
    conversations=24,
    turns=3,
    first_tokens=300,
    turn_tokens=112,
    answer_tokens=16,
    running=8,
    think_conversations=12,
    think_turns=4,
    think_first_tokens=900,
    think_turn_tokens=250,
    think_pairs=5,
    throttled_tokens=4000,
    throttled_prompts=6,
    host_bytes=512 << 20,
    small_host_bytes=64 << 20,
    engine_bytes=200 << 20,
)

QUICK = Sizes(
    model="llama",
    prompt_tokens=3000,
    prompts=2,
    pair_tokens=1000,
    pairs=3,
    talks=1,
    conversations=8,
    turns=2,
    first_tokens=600,
    turn_tokens=200,
    answer_tokens=8,
    running=4,
    think_conversations=4,
    think_turns=3,
    think_first_tokens=600,
    think_turn_tokens=200,
    think_pairs=2,
    throttled_tokens=2000,
    throttled_prompts=2,
    host_bytes=16 << 20,
    small_host_bytes=2 << 20,
    engine_bytes=6 << 20,
)

ARMS = ("none", "native", "kvtier")
PROTECTED = "protected"
MEANS = {
    "none": "no connector",
    "native": "vLLM's native tiering: host memory and its fs tier, with a worker that copies with memcpy",
    "kvtier": "kvtier: host memory and the directory tier, without vllm.prefix_protection",
    PROTECTED: "the same with vllm.prefix_protection, as by default; in the growing conversations alone",
}


def connector(arm: str, directory: Path, host_bytes: int) -> dict[str, Any] | None:
    """The `kv_transfer_config` of an arm; all arms have the same host memory."""
    chosen = parse_arm("kvtier" if arm == PROTECTED else arm)
    if chosen.kind == "kvtier":
        settings = {"tiers": [f"directory:{directory}"], "vllm.prefix_protection": arm == PROTECTED}
        chosen = replace(chosen, settings=settings)
    return transfer_config(chosen, directory, host_bytes, 0, is_cpu=True)


class Bench:
    """Engines of one run.

    Args:
        sizes: of all parts.
        models: directory with the checkpoint.
        work: for stores and logs.
    """

    def __init__(self, sizes: Sizes, models: Path, work: Path) -> None:
        self.sizes = sizes
        self._models = models
        self._work = work
        self._count = 0

    def store(self, arm: str, purpose: str) -> Path:
        """The directory of an arm for a purpose."""
        directory = self._work / f"{arm}-{purpose}"
        directory.mkdir(exist_ok=True)
        return directory

    def engine(
        self,
        arm: str,
        directory: Path,
        *,
        host_bytes: int = 0,
        engine_bytes: int = 0,
        environment: dict[str, str] | None = None,
        sabotage: str = "",
    ) -> Engine:
        """An engine of an arm, warmed up with two prompts."""
        sizes = self.sizes
        self._count += 1
        engine = Engine(
            self._models / sizes.model,
            self._work / f"engine{self._count}.log",
            connector(arm, directory, host_bytes or sizes.host_bytes),
            dtype=DTYPE,
            # vLLM requires memory for one request of the maximum length.
            max_model_len=TALK_TOKENS_MAX if engine_bytes else sizes.prompt_tokens + 256,
            kv_cache_memory_bytes=engine_bytes * VALUE_BYTES // 4 or 2 * sizes.host_bytes,
            max_num_seqs=sizes.running,
            environment=environment,
            sabotage=sabotage,
        )
        for number in range(2):
            engine.ask(Ask([5 + number, *range(10, 600)], count=2))
            engine.drain()
        return engine


def ask(engine: Engine, tokens: Sequence[int]) -> Answer:
    """One token after a prompt."""
    return engine.ask(Ask(tokens, count=1, logprobs=None), limit_s=600.0)[0]


def settle(engine: Engine, directory: Path) -> None:
    """Wait until all stores have ended, so that they do not disturb the next measurement."""
    engine.drain()
    until_s = time.monotonic() + QUIET_DEADLINE_S
    before = -1
    while time.monotonic() < until_s:
        now = stored_bytes(directory)
        if now == before:
            return
        before = now
        time.sleep(QUIET_S)


def stored_bytes(directory: Path) -> int:
    """Bytes of all files below `directory`, which may change meanwhile."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def forget_pages(directory: Path) -> None:
    """Drop the store's files from the page cache."""
    for path in (path for path in directory.rglob("*") if path.is_file()):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


def invert(directory: Path) -> int:
    """Invert 4 KiB in the middle of every file with KV; returns the number of files."""
    paths = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size >= CHUNK_FILE_BYTES_MIN]
    for path in paths:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            before = file.read(4096)
            file.seek(-len(before), os.SEEK_CUR)
            file.write(bytes(255 - byte for byte in before))
    return len(paths)


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
