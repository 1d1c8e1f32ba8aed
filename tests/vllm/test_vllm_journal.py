"""The journal and the plug-in of vLLM's server say the same of each request as vLLM and the metrics do."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from judge import prompt
from server import Server
from settings import CHUNK, connector, whole
from tests.waiting import wait_until

from kvtier.tools.bench.serve.campaign import STATISTICS, STATISTICS_PATH
from kvtier.tools.bench.serve.server import write_packages

pytestmark = [pytest.mark.engine, pytest.mark.vllm_core]

TOKENS = 1400
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
KV_BYTES = 4 << 20
"""Of one prompt and most of another."""
COUNT = 8


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summed(metrics: dict[str, float], name: str, **labels: str) -> float:
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for series, value in metrics.items()
        if series.partition("{")[0] == name and all(it in series for it in wanted)
    )


def _objects(store: Path) -> int:
    return sum(it.stat().st_size >= 393_216 for it in store.rglob("*") if it.is_file())


def test_every_request_is_in_both_with_its_id_and_the_same_tokens(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join(filter(None, (str(write_packages(tmp_path, STATISTICS)), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(STATISTICS_PATH, str(tmp_path / "engine.jsonl"))
    # Two chunks in host memory, of the five that a prompt has.
    given = connector(tmp_path / "kv", host__capacity_bytes="1MiB", journal__path=str(tmp_path / "journal"))
    sizes = ["--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(KV_BYTES)]
    sizes += ["--chat-template", TEMPLATE]
    sent = [("cmpl-first", 1), ("b-0", 2), ("chatcmpl-c-0a1b2c3d", 3), ("conversation 1/turn-2", 1), ("again", 1)]
    seeds: set[int] = set()
    with Server(checkpoints / "llama", tmp_path / "server.log", json.dumps(given), *sizes) as server:
        for name, seed in sent:
            body = {"prompt": prompt(TOKENS, seed), "max_tokens": COUNT}
            assert len(server.stream("/v1/completions", body, name)) == COUNT
            # A later request wants what this one stores, and host memory has no room for it.
            seeds.add(seed)
            wait_until(lambda: _objects(tmp_path / "kv") >= 5 * len(seeds), "the writes", 60.0)
        words = " ".join(f"t{token}" for token in prompt(40, 4))
        chat = {"messages": [{"role": "user", "content": words}], "max_completion_tokens": COUNT}
        assert len(server.stream("/v1/chat/completions", chat, "chat-0-1")) == COUNT
        # Its client may have opted out, and vLLM does not pass that on.
        beams = {"prompt": prompt(600, 5), "max_tokens": 2, "n": 2, "use_beam_search": True}
        server.post("/v1/completions", beams, "beams")
        server.complete([5], 1)  # counts travel with steps
        metrics = server.metrics()
        (journal,) = (tmp_path / "journal").iterdir()
        # vLLM kills its engine, and what is not written is lost.
        wait_until(lambda: '"prompt_tokens":1,' in journal.read_text(), "the journal", 60.0)
        assert server.printed().count("no hints on to the requests of a beam search; nothing of it is stored") == 1
    stats = lines_of(tmp_path / "engine.jsonl")[: len(sent)]
    every = lines_of(journal)
    requests = [line for line in every if line["kind"] == "request"][: len(sent)]
    objects = [line for line in every if line["kind"] == "object"]
    names = [name for name, _ in sent]
    assert lines_of(tmp_path / "engine.jsonl")[len(sent)]["id"] == "chat-0-1"
    assert [line["id"] for line in every if line["kind"] == "request"][len(sent)] == "chat-0-1"
    assert [line["id"] for line in stats] == [line["id"] for line in requests] == names
    for one, other in zip(stats, requests, strict=True):
        assert one["prompt_tokens"] == other["prompt_tokens"] == TOKENS
        assert one["output_tokens"] == other["output_tokens"] == COUNT
        assert one["cached_tokens"] == other["resident_tokens"] + sum(other["loaded_tokens"].values())
        assert other["arrived_s"] < one["time_s"]
        assert one["prefill_s"] > 0
        assert sum(other["loaded_tokens"].values()) == other["wanted_tokens"]
    assert [line["cached_tokens"] for line in stats] == [0, 0, 0, whole(TOKENS), whole(TOKENS)]
    assert [line["resident_tokens"] for line in requests] == [0, 0, 0, 0, whole(TOKENS)]
    loaded = requests[3]
    assert loaded["planner"]["chosen_tokens"] == sum(loaded["found_tokens"].values()) == whole(TOKENS)
    assert loaded["loaded_tokens"]["directory"] >= 3 * CHUNK
    assert 0 < loaded["load_s"] <= stats[3]["prefill_s"] + stats[3]["queued_s"]
    assert loaded["loaded_bytes"] == summed(metrics, "vllm:kvtier_transfer_bytes_total", link="scatter")
    for place in ("host", "directory"):
        of_lines = sum(line["loaded_tokens"].get(place, 0) for line in requests)
        assert of_lines == summed(metrics, "vllm:kvtier_load_tokens_total", place=place)
    read = [line for line in objects if line["way"] == "read"]
    assert sum(line["bytes"] for line in read) == summed(metrics, "vllm:kvtier_transfer_bytes_total", link="promote")
    assert not [line for line in every if "beams" in line.get("id", "")]
    assert [line["stored_tokens"] for line in requests] == [TOKENS // CHUNK * CHUNK] * 3 + [0, 0]


def test_times_of_what_never_came_are_null() -> None:
    with warnings.catch_warnings(action="ignore"):
        from vllm.v1.engine import FinishReason
        from vllm.v1.metrics.stats import IterationStats, RequestStateStats

        from kvtier.tools.bench.serve import vllm_stat_logger

    # vLLM sets the time of the first token also for an end without one.
    began = {"queued_ts": 1e6, "scheduled_ts": 1e6 + 2}
    ended = {"first_token_ts": 1e6 + 3, "last_token_ts": 1e6 + 7}
    found = []
    answered, failed_in_its_first_step, failed_in_the_queue = (began, 5), (began, 0), ({"queued_ts": 1e6}, 0)
    for times, tokens in (answered, failed_in_its_first_step, failed_in_the_queue):
        stats = RequestStateStats(num_generation_tokens=tokens, **times, **ended)
        step = IterationStats()
        step.update_from_finished_request(FinishReason.ERROR, "cmpl-a-0", 10, 5, stats)
        (line,) = vllm_stat_logger._lines((0.0, step.finished_requests[0]))
        fields = json.loads(line)
        found.append([fields[name] for name in ("queued_s", "prefill_s", "decode_s")])
    assert found == [[2.0, 1.0, 4.0], [2.0, None, None], [None, None, None]]
