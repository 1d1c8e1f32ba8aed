"""The load generator of `kvtier bench serve` on vLLM: ids arrive, conversations grow, and a death is noticed."""

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from server import Server
from settings import connector

from kvtier.errors import ConfigError
from kvtier.tools.bench.serve.generator import REQUESTS_FILE, GeneratorSettings, run, served_model
from kvtier.tools.bench.serve.workload import ConversationSizes, draw

pytestmark = pytest.mark.engine

OWN = Path(__file__).parents[2] / ".venv-aiperf" / "bin" / "aiperf"
AIPERF = str(OWN) if OWN.exists() else shutil.which("aiperf")
BLOCK_MAX = 128
SIZES = ConversationSizes(users=4, rounds=3, system_tokens=128, history_tokens=400, answer_tokens=8, requests_per_s=4.0)
FLAGS = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.skipif(AIPERF is None, reason="needs aiperf: make .venv-aiperf/.done")
@pytest.mark.vllm_core
def test_ids_reach_kvtier_and_each_prompt_continues_the_one_before(checkpoints: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    given = connector(tmp_path / "kv", host__capacity_bytes="64MiB", journal__path=str(tmp_path / "journal"))
    flags = [*FLAGS, "--chat-template", str(template)]
    workload = draw(SIZES, seed=1, number=0, seconds=5.0, warm_up=1)
    with Server(checkpoints / "llama", tmp_path / "server.log", json.dumps(given), *flags) as server:
        assert served_model(server.url) == ("m", 2048)
        common: dict[str, Any] = {"url": server.url, "model": "m", "command": str(AIPERF)}
        (tmp_path / "whole").mkdir()
        result = run(workload, GeneratorSettings(seconds=5.0, **common), tmp_path / "whole")
        assert result.error is None
        (journal,) = (tmp_path / "journal").iterdir()
        known = {line["id"]: line for line in lines_of(journal) if line["kind"] == "request"}

        (tmp_path / "cut").mkdir()
        killed_s: list[float] = []

        def kill_later() -> str:
            if not killed_s and len(lines_of(tmp_path / "cut" / REQUESTS_FILE)) > 4:
                server.kill()
                killed_s.append(time.time())
            return ""

        cut = run(workload, GeneratorSettings(seconds=60.0, **common), tmp_path / "cut", is_over=kill_later)
        assert cut.ended_s - killed_s[0] < 30
    rows = lines_of(tmp_path / "whole" / REQUESTS_FILE)
    check_rows(rows, known)
    assert result.requests == sum(not row["is_warm_up"] for row in rows) >= 16
    assert result.failed == 0
    assert "no longer accepts connections" in str(cut.error)
    kept = lines_of(tmp_path / "cut" / REQUESTS_FILE)
    assert kept[0]["error"] is None
    assert kept[-1]["error"] is not None
    assert kept[-1]["first_s"] is None
    with pytest.raises(ConfigError, match="does not answer"):
        served_model(server.url)


def check_rows(rows: list[dict[str, Any]], known: dict[str, dict[str, Any]]) -> None:
    """What the generator writes agrees with kvtier's journal, and each prompt continues the one before."""
    talks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["sent_s"]):
        assert row["error"] is None
        assert row["sent_s"] < row["first_s"] <= row["ended_s"]
        assert known[row["id"]]["prompt_tokens"] == row["prompt_tokens"]
        assert row["output_tokens"] == SIZES.answer_tokens
        talks[row["user"]].append(row)
    assert [row["is_warm_up"] for row in talks[0]] == [True, True]
    new = SIZES.question_tokens + SIZES.answer_tokens
    for talk in talks.values():
        assert [row["turn"] for row in talk] == list(range(len(talk)))
        for turn, row in enumerate(talk):
            found = known[row["id"]]["resident_tokens"] + sum(known[row["id"]]["found_tokens"].values())
            assert row["prompt_tokens"] == 128 + 400 + turn * new + SIZES.question_tokens
            if turn:  # all of the conversation is known, down to a block
                assert found > row["prompt_tokens"] - SIZES.question_tokens - BLOCK_MAX - 2
                assert row["sent_s"] - talk[turn - 1]["sent_s"] > (0.0 if row["is_warm_up"] else 0.9)
            else:  # of another conversation nothing but the system prompt
                assert found <= SIZES.system_tokens
    assert max(len(talk) for talk in talks.values()) == SIZES.rounds


def test_a_model_without_a_chat_template_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    with (
        Server(checkpoints / "llama", tmp_path / "server.log", json.dumps(connector(None)), *FLAGS) as server,
        pytest.raises(ConfigError, match="has no chat template; use a model with one, or vLLM's --chat-template"),
    ):
        served_model(server.url)
    with pytest.raises(ConfigError, match="does not answer"):
        served_model(server.url)
