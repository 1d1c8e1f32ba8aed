"""kvtier as one of several connectors of vLLM's `MultiConnector`."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, Start
from judge import prompt
from server import Server
from settings import connector, whole

pytestmark = pytest.mark.engine

LONG = prompt(*PROMPTS["long"])


def among_others(directory: Path, **fields: Any) -> dict[str, Any]:
    """kvtier below a `MultiConnector`, as a user of two connectors writes it."""
    ours = connector(directory) | fields
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours]},
    }


@pytest.mark.vllm_core
def test_a_server_with_several_connectors_answers_and_counts(checkpoints: Path, start: Start, tmp_path: Path) -> None:
    plain = start("llama").ask_in_turn(LONG, count=16)
    given = json.dumps(among_others(tmp_path / "kv"))
    sizes = ["--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(64 << 20)]
    for turn in range(2):
        with Server(checkpoints / "llama", tmp_path / f"server{turn}.log", given, *sizes) as server:
            assert server.complete(LONG, 16) == plain[0].tokens
            found = "vllm:kvtier_load_tokens_total" if turn else "vllm:kvtier_store_chunks_total"
            until_s = time.monotonic() + 60
            while not (total := sum(value for name, value in server.metrics().items() if name.startswith(found))):
                assert time.monotonic() < until_s, server.printed()[-3000:]
                server.complete([5], 1)  # counts travel with steps
                time.sleep(0.2)
            assert total == whole(len(LONG)) if turn else total >= len(LONG) // 256
            assert "EngineDeadError" not in server.printed()


@pytest.mark.vllm_core
def test_an_engine_in_this_process_takes_it_too(start: Start, tmp_path: Path) -> None:
    engine = start("llama", among_others(tmp_path / "kv"), disable_log_stats=False)
    wanted = engine.ask(LONG)[0].tokens
    engine.drain()
    engine.forget()
    assert engine.ask(LONG)[0].tokens == wanted
    assert engine.external_hits() == whole(len(LONG))
