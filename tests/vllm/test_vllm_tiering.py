"""kvtier's tiers below vLLM's own tiering manager: equal answers, no wrong KV, no waiting.

The copies between vLLM's KV memory and its host memory are a stand-in (`tiering_on_cpu`).
"""

from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Expected, Start
from judge import is_same

pytestmark = pytest.mark.engine

BLOCK = 128
"""Tokens of vLLM's blocks on a CPU, and so of a chunk."""


def tiering(*tiers: str, chunk: int = 1, **settings: Any) -> dict[str, Any]:
    """vLLM's connector with the tiering manager, and kvtier below it. Settings are named like ``host__evictor``."""
    kvtier = {name.replace("__", "."): value for name, value in settings.items()}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tiering_on_cpu",
            "cpu_bytes_to_use": 64 << 20,
            "blocks_per_chunk": chunk,
            "secondary_tiers": [
                {
                    "type": "KvtierSecondaryTier",
                    "module_path": "kvtier.connect.vllm.secondary_tier",
                    "tiers": list(tiers),
                    **kvtier,
                }
            ],
        },
    }


def whole(tokens: int, chunk: int = BLOCK) -> int:
    return (tokens - 1) // chunk * chunk


@pytest.mark.vllm_core
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_an_engine_that_starts_again_answers_the_same(
    model: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    wanted = expected(model)
    given = tiering(f"disk:{tmp_path / 'kv'}?capacity=256MiB&reserve=0")
    first = start(model, given)
    cold = first.ask_in_turn(LONG, SHORT)
    assert first.external_hits() == 0
    first.close()
    second = start(model, given)
    warm = second.ask_in_turn(LONG, SHORT)
    assert second.external_hits() == whole(len(LONG)) + whole(len(SHORT))
    second.close()
    for answers in (cold, warm):
        assert is_same(model, answers[0], wanted["long"])
        assert is_same(model, answers[1], wanted["short"])
