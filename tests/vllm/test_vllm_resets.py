"""Resets of vLLM's own cache and new weights, beside open stores and loads: as without kvtier."""

import random
from pathlib import Path

import pytest
import reset_flows
from engines import Start
from harness import EngineError, in_process
from judge import prompt
from models import make_checkpoint
from settings import connector

pytestmark = pytest.mark.engine

NEEDS = (
    "resets with running",
    "resets with REMOTE",
    "resets with pins",
    "loaded pages",
    "preemptions",
    "pages of earlier",
    "updates with running",
    "sleeps with loads",
)
OVERLAPPED = ("resets with deferred", "resets before a forward", "orders before a forward")


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint with one layer."""
    place = tmp_path_factory.mktemp("shallow") / "llama"
    in_process(make_checkpoint, "llama-shallow", place)
    return str(place)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.vllm_core), 2, 3, 4, 5])
def test_resets_in_any_order_do_what_they_do_without_kvtier(seed: int, depth: int, shallow: str) -> None:
    """In 1,500 flows no reset fails because of kvtier, and no KV of weights before it is used after it."""
    needs = (*NEEDS, *OVERLAPPED) if depth > 1 else NEEDS
    in_process(reset_flows.run, shallow, seed, 100, depth, needs, "")


@pytest.mark.parametrize(
    ("sabotage", "depth"),
    [
        *(pytest.param(it, 1, marks=pytest.mark.vllm_core) for it in ("keep_pins", "keep_loads", "unwatched")),
        pytest.param("free_at_once", 2, marks=pytest.mark.vllm_core),
        ("trust_launched_steps", 2),
        ("free_at_once", 3),
        ("forget_mixing", 1),
        ("undo_more", 1),
    ],
)
def test_the_control_what_is_broken_is_seen(sabotage: str, depth: int, shallow: str) -> None:
    """Pins and loads that stay make resets fail; blocks that go back unwatched are stored with another request's KV.

    So are those that a step under way writes, or has not written yet.
    """
    with pytest.raises(EngineError, match="run ended with exit code 1"):
        in_process(reset_flows.run, shallow, 7, 1000, depth, (), sabotage)


@pytest.mark.vllm_core
def test_after_new_weights_and_a_reset_no_answer_comes_from_the_old_ones(
    start: Start, tmp_path: Path, shallow: str
) -> None:
    """On the real model: requests run or load, the weights change, and the cache is reset at once."""
    other = tmp_path / "other"
    in_process(make_checkpoint, "llama-shallow", other, 8)
    prompts = [prompt(900, number) for number in range(3)]
    truth = {path: [it.tokens for it in start(Path(path)).ask(*prompts)] for path in (shallow, str(other))}
    engine = start(Path(shallow), connector(None), sabotage="sabotage:slow_copies", max_num_batched_tokens=512)
    draw, now = random.Random(3), shallow
    for _ in range(12):
        steps = draw.randrange(9)
        engine.do("changes:interrupt", prompts, steps, drains=False)
        if draw.random() < 0.6:
            now = str(other) if now == shallow else shallow
            engine.do("changes:reload", now, drains=False)
            assert engine.do("changes:reset", True, draw.random() < 0.5, drains=False)
        else:
            assert engine.do("changes:reset", True, False, drains=False)
        assert [it.tokens for it in engine.ask(*prompts)] == truth[now]
        engine.do("changes:reset", True, draw.random() < 0.5, drains=False)
