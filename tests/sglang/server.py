"""SGLang's HTTP server and its offline engine on a CPU, with the flags that `kvtier sglang config` prints.

`cpu_engine/sglang_cpu.py` says what is a stand-in there. Each runs in processes of its own.
"""

import functools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from tests.waiting import free_port, wait_until

HERE = Path(__file__).parent
PAGE = 64
OUTPUT_TOKENS = 16
STORED = "sglang:backuped_tokens_total"
UP_S = 600.0
"""A start takes 20 s on a quiet machine, and minutes on a busy one: SGLang imports all models."""
ANSWER_S = 100.0
END_S = 30.0
PLACE = "/PLACE"
"""Stands for the store in flags that are printed once."""

CPU = shlex.split(
    "--device cpu --attention-backend torch_native --dtype bfloat16 --disable-overlap-schedule --grammar-backend none"
)
"""What SGLang needs on a CPU."""

SMALL = shlex.split("--max-total-tokens 1536 --hicache-ratio 4 --context-length 2048 --max-running-requests 4")
"""A device pool of two prompts of 700 tokens, and a host pool of eight."""

WAITS = ("--hicache-storage-prefetch-policy", "wait_complete")
"""So that a busy machine decides no hit."""

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # One thread: the order of additions, and with it the last bit, must not depend on the number of free cores.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
ADMIN = "key of the tests"


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A run of `kvtier`."""
    words = [sys.executable, "-m", "kvtier.cli.main", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def printed(*further: object) -> str:
    """What `kvtier sglang config` prints for a store at `PLACE`, without notes. SGLang is asked once for all tests."""
    done = command("sglang", "config", "--tier", f"directory:{PLACE}?capacity_bytes=1GiB", *further)
    notes = [line for line in done.stderr.splitlines() if not line.startswith("Written: ")]
    assert (done.returncode, notes) == (0, [])
    return done.stdout


def flags(root: Path, *further: object) -> list[str]:
    """What `kvtier sglang config` prints for a store at `root`, as words."""
    return shlex.split(printed(*further).replace(PLACE, str(root)))


def prompt(seed: int, count: int = 700) -> list[int]:
    """`count` random tokens."""
    drawn = random.Random(seed)
    return [drawn.randrange(3, 1024) for _ in range(count)]


def sampling() -> dict[str, Any]:
    """Greedy."""
    return {"max_new_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}


class Answer(NamedTuple):
    """What came back."""

    tokens: list[int]
    device: int
    """Prompt tokens whose KV was in the device pool."""
    host: int
    storage: int

    @classmethod
    def of(cls, response: dict[str, Any]) -> "Answer":
        """SGLang's response."""
        told = response["meta_info"]
        found = told.get("cached_tokens_details") or {}
        assert told["cached_tokens"] == sum(found.get(place, 0) for place in ("device", "host", "storage"))
        return cls(response["output_ids"], found.get("device", 0), found.get("host", 0), found.get("storage", 0))

    @property
    def cached(self) -> dict[str, int]:
        """Prompt tokens that were not computed, by place; without zeros."""
        return {place: count for place, count in self._asdict().items() if place != "tokens" and count}


def environment(sabotage: Sequence[str] = ()) -> dict[str, str]:
    """Of SGLang's processes on a CPU; `sabotage` are functions of `sabotage.py` that break something there."""
    paths = [str(HERE / "cpu_engine"), *filter(None, [os.environ.get("PYTHONPATH")])]
    broken = " ".join(f"sabotage:{name}" for name in sabotage)
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), "SABOTAGE": broken}


def offline(model: Path, *arguments: str, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Answers of `sgl.Engine` in a new process, one after the other."""
    words = [sys.executable, str(HERE / "offline_engine.py"), "--model-path", str(model), *CPU, *SMALL, *arguments]
    asked = json.dumps({"prompts": prompts, "sampling": sampling()})
    done = subprocess.run(
        words,
        env=environment(),
        input=asked,
        capture_output=True,
        text=True,
        timeout=UP_S + ANSWER_S,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]  # its own, after the answers
    return [Answer.of(each) for each in json.loads(done.stdout.splitlines()[-1])]


class Server:
    """A server on a free port of this machine; a context manager. It starts at once; see `await_up`.

    Args:
        model: directory of the checkpoint.
        log: file for everything that the server prints.
        arguments: flags besides `CPU` and `SMALL`.
        ranks: of tensor parallelism.
        sabotage: see `environment`.
    """

    def __init__(self, model: Path, log: Path, *arguments: str, ranks: int = 1, sabotage: Sequence[str] = ()) -> None:
        self._log, self._ranks, port = log, ranks, free_port()
        self._url = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *CPU, *SMALL, *arguments]
        words += ["--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--skip-server-warmup"]
        words += ["--tp-size", str(ranks), "--enable-metrics", "--enable-cache-report", "--admin-api-key", ADMIN]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                words,
                env={**environment(sabotage), "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_up(self) -> None:
        """Wait until the server answers.

        Raises:
            AssertionError: it has ended.
            TimeoutError: it does not answer.
        """
        wait_until(self._is_up, f"the server ({self._log})", UP_S, pause_s=0.3)

    def ask(self, tokens: Sequence[int], limit_s: float = ANSWER_S, **fields: Any) -> Answer:
        """The answer to a prompt; `fields` are further ones of the request."""
        body = {"input_ids": tokens, "sampling_params": sampling(), **fields}
        return Answer.of(json.loads(self._call("/generate", body, limit_s)))

    def ask_and_keep(self, tokens: Sequence[int], **fields: Any) -> Answer:
        """The answer to a prompt, when the store has all pages of both on all ranks. Pages of other places it has."""
        before = self.total(STORED)
        answer = self.ask(tokens, **fields)
        new = (len(tokens) + OUTPUT_TOKENS - 1) // PAGE * PAGE - sum(answer.cached.values())
        wait_until(lambda: self.total(STORED) >= before + new * self._ranks, f"{new} stored tokens")
        return answer

    def forget(self) -> None:
        """Empty SGLang's device pool and host pool."""
        self._call_when_idle("/flush_cache", {})

    def attach(self, extra: dict[str, Any]) -> None:
        """Another store, in place of the one there is; `extra` is the extra config."""
        path, fields = "/hicache/storage-backend", {"hicache_storage_backend": "dynamic"}
        fields["hicache_storage_backend_extra_config_json"] = json.dumps(extra)
        self._call_when_idle(path, method="DELETE")
        self._call_when_idle(path, {**fields, "hicache_storage_prefetch_policy": WAITS[1]}, method="PUT")

    def total(self, name: str, *labels: str) -> float:
        """The sum of a metric over its series with these labels."""
        lines = [line for line in self._call("/metrics").splitlines() if line.partition("{")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))

    def log(self) -> str:
        """Everything that the server has printed so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _call_when_idle(self, *call: Any, **named: Any) -> None:
        """SGLang refuses with code 400 while it still computes or copies, which its log says."""

        def is_taken() -> bool:
            try:
                self._call(*call, **named)
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                return False
            return True

        wait_until(is_taken, f"{call}, for which {self._log} says why not")

    def _call(self, path: str, body: object = None, limit_s: float = ANSWER_S, method: str | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.read().decode()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log()[-3000:]
        try:
            self._call("/health", limit_s=10.0)
        except (OSError, urllib.error.URLError):
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_S)
