"""Arms and engines of `bench/vllm.py`, and the measurement of one answer."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import Answer, Ask, Engine
from sizes import Sizes

from kvtier.tools.bench.serve.arms import parse_arm, transfer_config

CHUNK_FILE_BYTES_MIN = 16 << 10
"""Smaller files of a store have no KV."""

QUIET_S = 0.5
QUIET_DEADLINE_S = 60.0


LMCACHE = "lmcache"
ARMS = ("none", "native", "kvtier", *((LMCACHE,) if find_spec("lmcache") else ()))
PROTECTED = "protected"
MEANS = {
    "none": "no connector",
    "native": "vLLM's native tiering: host memory and its fs tier; on a CPU with a worker that copies with memcpy",
    "kvtier": "kvtier: host memory and the directory tier, without vllm.prefix_protection",
    LMCACHE: "LMCache in the engine's process: host memory and its disk tier with direct I/O; where it is installed",
    PROTECTED: "the same with vllm.prefix_protection, as by default; in the growing conversations alone",
}


def dtype_of(device: str) -> str:
    """A processor without bfloat16 instructions computes it nine times slower than float32."""
    has_bfloat16 = {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if device != "cpu" or has_bfloat16 else "float32"


def connector(arm: str, directory: Path, host_bytes: int, *, is_cpu: bool) -> dict[str, Any] | None:
    """The `kv_transfer_config` of an arm; all arms have the same host memory."""
    if arm == LMCACHE:
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    chosen = parse_arm("kvtier" if arm == PROTECTED else arm)
    if chosen.kind == "kvtier":
        settings = {"tiers": [f"directory:{directory}"], "vllm.prefix_protection": arm == PROTECTED}
        chosen = replace(chosen, settings=settings)
    return transfer_config(chosen, directory, host_bytes, 0, is_cpu=is_cpu)


def lmcache_environment(directory: Path, host_bytes: int) -> dict[str, str]:
    """LMCache's settings, which it reads from the environment."""
    return {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{host_bytes / 1e9:g}",
        "LMCACHE_LOCAL_DISK": f"file://{directory}/",
        "LMCACHE_MAX_LOCAL_DISK_SIZE": "40",
        "LMCACHE_SAVE_DECODE_CACHE": "True",
        "LMCACHE_EXTRA_CONFIG": '{"use_odirect": true}',
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }


class Bench:
    """Engines of one run.

    Args:
        sizes: of all parts.
        models: directory with the checkpoint.
        work: for stores and logs.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, sizes: Sizes, models: Path, work: Path, device: str = "cpu") -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = dtype_of(device)
        self.rows: list[dict[str, Any]] = []
        """Samples of the part under way; those of an interrupted run come first."""
        self.on_rows: Callable[[], None] = lambda: None
        self._models = models
        self._work = work
        self._count = 0

    def left(self, arms: Sequence[str], **key: object) -> list[str]:
        """The arms that have no rows with `key` yet."""
        done = {row["arm"] for row in self.rows if all(row[name] == value for name, value in key.items())}
        return [arm for arm in arms if arm not in done]

    def keep(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add the rows of an arm that is done."""
        self.rows += rows
        self.on_rows()

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
        host_bytes = host_bytes or sizes.host_bytes
        is_cpu = self.device == "cpu"
        more = lmcache_environment(directory, host_bytes) if arm == LMCACHE else {}
        # On a GPU as vLLM is by default: CUDA graphs, asynchronous scheduling.
        given: dict[str, Any] = {} if is_cpu else {"enforce_eager": False}
        engine = Engine(
            self._models / sizes.model,
            self._work / f"engine{self._count}.log",
            connector(arm, directory, host_bytes, is_cpu=is_cpu),
            dtype=self.dtype,
            # vLLM requires memory for one request of the maximum length.
            max_model_len=sizes.talk_tokens if engine_bytes else sizes.prompt_tokens + 256,
            kv_cache_memory_bytes=engine_bytes * (2 if self.dtype == "bfloat16" else 4) // 4 or 2 * sizes.host_bytes,
            max_num_seqs=sizes.running,
            environment={**(environment or {}), **more},
            sabotage=sabotage,
            **given,
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
