"""The way of the guide: `kvtier vllm config`, vLLM's OpenAI server, a restart, and what its metrics say."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines import PROMPTS, Start
from judge import prompt
from server import Server
from settings import whole

pytestmark = pytest.mark.engine

LONG, SHORT = (prompt(*PROMPTS[name]) for name in ("long", "short"))
HITS = "vllm:external_prefix_cache_hits_total"


def config(*arguments: str) -> str:
    """What `kvtier vllm config` prints."""
    command = [sys.executable, "-m", "kvtier.cli.main", "vllm", "config", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_the_server_streams_restarts_and_hits(checkpoints: Path, start: Start, tmp_path: Path) -> None:
    plain = start("llama").ask_in_turn(LONG, SHORT, count=16)
    given = config(
        "--dir", str(tmp_path / "kv"), "--set", "host.capacity_bytes=64MiB", "--set", "planner.enabled=false"
    )
    sizes = ["--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20)]
    for turn in range(2):
        with Server(checkpoints / "llama", tmp_path / f"server{turn}.log", given, *sizes) as server:
            told = [server.complete(tokens, 16) for tokens in (LONG, SHORT)]
            assert told == [it.tokens for it in plain]
            both = whole(len(LONG)) + whole(len(SHORT))
            assert told_by(server, HITS) == turn * both
            told = "vllm:kvtier_load_tokens_total" if turn else "vllm:kvtier_store_chunks_total"
            until_s = time.monotonic() + 120
            while not told_by(server, told):
                assert time.monotonic() < until_s, "\n".join(name for name in server.metrics() if "kvtier" in name)
                server.complete([5], 1)  # counts travel with steps
                time.sleep(0.2)


def told_by(server: Server, name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for series, value in server.metrics().items() if series.partition("{")[0] == name)


def test_the_printed_configuration_works_as_it_is(start: Start, tmp_path: Path) -> None:
    given = json.loads(config("--dir", str(tmp_path / "kv")))
    assert given["kv_connector"] == "KvtierConnector"
    assert given["kv_load_failure_policy"] == "recompute"
    engine = start("llama", given)
    engine.ask(LONG)
    engine.forget()
    engine.ask(LONG)
    assert engine.external_hits() == whole(len(LONG))
