"""`kvtier bench serve` on real servers: its logs agree, a server that dies fails alone, and nothing is left."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from server import Client

from kvtier.errors import ConfigError
from kvtier.tools.bench.serve.arms import Arm, parse_arms
from kvtier.tools.bench.serve.campaign import Record, ServeSettings
from kvtier.tools.bench.serve.checkpoint import WORDS, kv_bytes_per_token
from kvtier.tools.bench.serve.generator import GeneratorResult, served_model
from kvtier.tools.bench.serve.load_driver import tokens_per_word
from kvtier.tools.bench.serve.regret import join_runs
from kvtier.tools.bench.serve.results import arm_result
from kvtier.tools.bench.serve.server import find_lmcache, find_vllm, session_pids

pytestmark = pytest.mark.engine

TOKENS = 1500
KV_BYTES = 72 << 20
"""Of the device: 2,176 tokens, one conversation. Host memory holds less."""


class Talks:
    """Conversations of two turns, in turn; kills the server of the second run after its first answer."""

    prompt_tokens = TOKENS

    def __init__(self, users: int = 2) -> None:
        self.users = users
        self.sessions: list[int] = []
        self.commands: list[str] = []
        """Of the processes of the first server, after its last answer."""
        self.shared: set[str] = set()
        """Its shared memory then."""

    def drive(
        self, url: str, directory: Path, *, repetition: int, requests_per_s: float | None, is_over: Callable[[], str]
    ) -> GeneratorResult:
        port = str(urlsplit(url).port)  # the process that runs this test may have children of other tests
        (server,) = (pid for pid in children() if port in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        self.sessions.append(server)
        assert served_model(url)[0] == "m"
        draw = random.Random(repetition)
        talks = [[{"role": "user", "content": text(draw, TOKENS)}] for _ in range(self.users)]
        began_s, problem = time.time(), None
        with (directory / "requests.jsonl").open("w") as file:
            for turn in range(2):
                for user, talk in enumerate(talks):
                    if turn:
                        talk.append({"role": "user", "content": text(draw, 20)})
                    try:
                        row = ask(url, talk, f"conversation-{user}.{turn}")
                    except OSError:
                        problem = is_over()
                        break
                    file.write(json.dumps(row | {"user": user, "turn": turn}) + "\n")
                    if len(self.sessions) == 2:
                        os.kill(server, signal.SIGKILL)
                        time.sleep(1)
        ended_s = time.time()
        self.shared = self.shared or set(os.listdir(f"/proc/{server}/root/dev/shm"))
        self.commands = self.commands or [Path(f"/proc/{pid}/cmdline").read_text() for pid in session_pids(server)]
        sent = 2 * self.users
        return GeneratorResult(
            began_s=began_s, measured_from_s=began_s, ended_s=ended_s, requests=sent, failed=0, error=problem
        )

    def pids(self) -> list[int]:
        return [os.getpid()]


def children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def text(draw: random.Random, count: int) -> str:
    return " ".join(f"t{draw.choice(WORDS)}" for _ in range(count))


def ask(url: str, talk: list[dict[str, str]], name: str) -> dict[str, object]:
    """One request; its answer is added to `talk`."""
    sent_s = time.time()
    found = Client(url).post("/v1/chat/completions", {"messages": talk, "max_tokens": 8}, name)
    talk.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
    now_s = time.time()
    return {
        "id": name, "sent_s": sent_s, "first_s": now_s, "ended_s": now_s, "is_warm_up": False, "error": None,
        "prompt_tokens": found["usage"]["prompt_tokens"], "output_tokens": found["usage"]["completion_tokens"],
    }  # fmt: skip


def record_of(arms: list[Arm], load: Talks, place: Path, **more: object) -> Record:
    """A record with its model, on one core and with memory for one conversation in the device."""
    cores = tuple(sorted(os.sched_getaffinity(0)))[-1:]
    settings = ServeSettings(
        arms=tuple(arms), repeats=1, ratios=(), rates=(), model=None, vllm=find_vllm(None), device_kv_bytes=KV_BYTES,
        host_bytes=KV_BYTES * 3 // 4, store_bytes=1 << 30, memory_bytes=4 << 30, running=2, context_tokens=2048,
        server_cores=cores, client_cores=(), load={},
    )  # fmt: skip
    try:
        record = Record(replace(settings, **more), load, place)
    except ConfigError as error:
        pytest.skip(f"no control groups here: {error}")
    record.make_model()
    return record


def check_nothing_is_left(record: Record, load: Talks) -> None:
    assert all(session_pids(session) == [] for session in load.sessions)
    assert not any(Path("/sys/fs/cgroup").glob(f"**/kvtier-serve-{os.getpid()}-*"))
    assert sorted(it.name for it in record.runs.parent.iterdir() if not it.name.startswith("model")) == ["runs"]


def test_lmcache_beside_vllm_brings_conversations_back_from_its_drive(tmp_path: Path) -> None:
    vllm = find_vllm(None)
    try:
        lmcache = find_lmcache(None, vllm)
    except ConfigError as error:
        pytest.skip(f"make .lmcache/.done installs LMCache: {error}")
    load = Talks(users=5)
    record = record_of(
        parse_arms(["lmcache"]), load, tmp_path, lmcache=lmcache, host_bytes=256 << 20, memory_bytes=5 << 30
    )
    (key,) = record.order()
    result = record.run(key, lambda: None)
    assert result["status"] == "ok", result
    assert any("lmcache" in it and "http_server" in it for it in load.commands), "the server is in vLLM's session"
    check_nothing_is_left(record, load)
    assert load.shared, "vLLM's KV memory, which LMCache's server maps"
    assert not load.shared & set(os.listdir("/dev/shm"))
    (run,) = join_runs(record.done())
    figures = arm_result(run)
    assert (figures.unmatched, figures.wrong_sums) == (0, 0)
    assert figures.tokens_by_place is not None
    # The device holds one of the five conversations, host memory three before LMCache evicts, and the drive all.
    assert figures.tokens_by_place["external"] >= 4 * 1280
    assert figures.hits_by_session is not None
    assert figures.hits_by_session["sessions"] == 5
    assert figures.read_bytes is not None
    assert figures.read_bytes >= 512 * kv_bytes_per_token(), "some of it came back from the drive"
    assert figures.written_bytes is not None
    assert figures.written_bytes >= 4 * 1280 * kv_bytes_per_token()


def test_logs_agree_and_a_server_that_dies_fails_alone(tmp_path: Path) -> None:
    load = Talks()
    record = record_of(parse_arms(["kvtier", "none"], {"planner.enabled": False}), load, tmp_path)
    (model,) = tmp_path.glob("model-*")
    assert record.settings.vllm is not None
    assert tokens_per_word(record.settings.vllm, model) == 1
    results = {key.name: record.run(key, lambda: None) for key in (record.order()[1], record.order()[0])}
    assert {name: it["status"] for name, it in results.items()} == {"kvtier-0": "ok", "none-0": "failed"}, results
    assert "was killed by signal 9; the last lines of" in results["none-0"]["error"]
    assert "INFO" in results["none-0"]["error"], "the lines themselves"
    check_nothing_is_left(record, load)

    places = [run for run in join_runs(record.done()) if run.files.arm == "kvtier"]
    (kvtier,) = places
    assert [it.id for it in kvtier.requests] == [f"conversation-{user}.{turn}" for turn in (0, 1) for user in (0, 1)]
    figures = arm_result(kvtier)
    assert (figures.unmatched, figures.wrong_sums) == (0, 0)
    assert figures.tokens_by_place is not None
    assert figures.tokens_by_place["disk"] >= 1024, "a conversation came back from the drive"
    assert figures.tokens_by_place["computed"] < 4 * TOKENS - 2048
    assert figures.loaded_bytes
    assert figures.written_bytes
    sample = json.loads((record.runs / "kvtier-0" / "samples.jsonl").read_text().splitlines()[-1])
    assert sample["rss_bytes"] > sample["cpu_s"] > 0
    assert 0 < sample["memory_bytes"] <= 4 << 30
    assert any(name.startswith("vllm:kvtier_") for name in sample["metrics"])
