"""Asynchronous steps, as every GPU has them: the engine is a step ahead of what has been computed (`asynchronous`).

The scenarios are those of synchronous engines, and answers equal those of a synchronous engine without kvtier.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engines import Start, small_engine
from harness import SEED, Answer, Ask, Engine, EngineError
from judge import TOLERANCE, furthest, prompt
from models import DRAFTED
from settings import connector

pytestmark = pytest.mark.engine

STORM: dict[str, Any] = {"max_model_len": 1060, "max_num_seqs": 8}
BLOCKS = {"llama": 26, "gemma3": 72, "eagle": 26}
"""Too few for eight requests that grow."""
MANY, FEW = 2048, 320
"""Tokens of a step: for several prompts, or for a part of one."""
SHARED = [prompt(520, number) for number in range(4)]
POOL = [Ask([*SHARED[number % 4], *prompt(100 + 17 * number, 50 + number)], 20 + 9 * number) for number in range(16)]
"""Each text is shared by four requests."""
Calm = Callable[[str], list[Answer]]
STORMS = [("llama", 2), ("gemma3", 3), ("gemma3", 4), ("eagle", 5), ("eagle", 6)]
TURNS = 4
LIMIT_S = 60.0
"""A mutant is found in this much processor time, in seconds."""
MUTANTS = [
    pytest.param("sabotage:trust_launched_steps", FEW, marks=pytest.mark.vllm_core),
    ("sabotage:confirm_early", MANY),
    ("sabotage:watch_no_reuse", MANY),
    ("sabotage:free_at_once", MANY),
    ("sabotage:load_late", MANY),
    ("asynchronous:read_early", MANY),
]


@pytest.fixture(autouse=True)
def asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are asynchronous wherever there is kvtier."""
    monkeypatch.setenv(SEED, "1")


@pytest.fixture(scope="module")
def calm(checkpoints: Path, drafts: Path, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """What a model answers to the pool in a synchronous engine with room for all, without a draft model."""

    @cache
    def of(model: str) -> list[Answer]:
        log, path = tmp_path_factory.mktemp("calm") / "log", drafts / DRAFTED["eagle"] if model == "eagle" else model
        with small_engine(checkpoints, path, log, None, max_num_seqs=8) as engine:
            return engine.ask(*POOL)

    return of


def turn(engine: Engine, calm: list[Answer], draw: random.Random, number: int) -> float:
    """Ask for most of the pool at drawn steps, and abort some; the largest distance of the answers of the others.

    Every other turn has KV of its own, which the next one loads.
    """
    chosen = draw.sample(range(len(POOL)), 12)
    asked = []
    for at in chosen:
        fields = vars(POOL[at]) | {"at_step": draw.choice((0, 0, 3, 9, 20)), "salt": str(number // 2)}
        if draw.random() < 0.4:
            fields["abort_at_step"] = fields["at_step"] + draw.randrange(1, 30)
        asked.append(Ask(**fields))
    answers = engine.ask(*asked)
    ended = [(it, calm[at]) for it, at in zip(answers, chosen, strict=True) if it.reason != "abort"]
    assert ended
    if draw.random() < 0.7:
        engine.forget()
    return furthest(*zip(*ended, strict=True))


@pytest.fixture
def begin(start: Start, drafts: Path, tmp_path: Path) -> Callable[..., Engine]:
    """Starts engines with too few blocks, and one store."""

    def began(model: str, sabotage: str = "", *, seed: int = 1, most: int = MANY, **fields: Any) -> Engine:
        given = STORM | {"num_gpu_blocks_override": BLOCKS[model], "max_num_batched_tokens": most} | fields
        if model == "eagle":
            draft = {"method": "eagle", "num_speculative_tokens": 3, "model": str(drafts / "eagle")}
            given["speculative_config"] = draft
        path = drafts / DRAFTED["eagle"] if model == "eagle" else model
        transfer = given.pop("transfer", lambda it: it)(connector(tmp_path / "kv"))
        return start(path, transfer, sabotage=sabotage, environment={SEED: str(seed)}, **given)

    return began


@pytest.mark.parametrize(
    ("model", "seed", "most"),
    [
        pytest.param("llama", 1, FEW, marks=pytest.mark.vllm_core),
        ("llama", 1, MANY),
        *((model, seed, most) for model, seed in STORMS for most in (MANY, FEW)),
    ],
)
def test_a_storm_of_asynchronous_steps_changes_no_answer(
    model: str, seed: int, most: int, begin: Callable[..., Engine], calm: Calm
) -> None:
    """Requests share prefixes, are preempted and aborted, and load, while two steps are under way."""
    engine, draw = begin(model, seed=seed, most=most), random.Random(seed)
    distances = [turn(engine, calm(model), draw, number) for number in range(TURNS)]
    assert max(distances) < TOLERANCE, distances
    # With windows vLLM admits no more requests than it has blocks for.
    assert engine.metrics()["vllm:num_preemptions"] > 0 or model == "gemma3"
    assert engine.external_hits() > 0
    engine.drain()
    assert engine.metrics()["vllm:kv_cache_usage_perc"] == 0
    was_asynchronous(engine, seed)
    engine.close()
    after = begin(model, num_gpu_blocks_override=None)
    again = [replace(it, salt=str((TURNS - 1) // 2)) for it in POOL]
    assert furthest(after.ask_in_turn(*again), calm(model)) < TOLERANCE, "what was stored on the way is right as well"
    assert after.external_hits() > 0


def several(given: dict[str, Any], role: str) -> dict[str, Any]:
    """kvtier in a `MultiConnector`, whose role is the one that vLLM's scheduler reads."""
    connectors = {"connectors": [given | {"kv_role": role}]}
    fields = {"kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": connectors}
    return {"kv_connector": "MultiConnector", **fields}


@pytest.mark.parametrize("is_alone", [True, pytest.param(False, marks=pytest.mark.vllm_core)])
def test_a_prefill_engine_loads_into_no_block_that_a_step_still_writes(
    is_alone: bool, begin: Callable[..., Engine], calm: Calm
) -> None:
    """vLLM delays the reuse of such blocks only in an engine whose role says that it loads."""
    role = "kv_producer"
    engine = begin("llama", transfer=lambda it: it | {"kv_role": role} if is_alone else several(it, role))
    draw = random.Random(1)
    distances = [turn(engine, calm("llama"), draw, number) for number in range(TURNS)]
    assert max(distances) < TOLERANCE, distances
    assert engine.external_hits() > 0
    was_asynchronous(engine)


def was_asynchronous(engine: Engine, seed: int = 1) -> None:
    """vLLM has chosen asynchronous steps, and what they need was late and out of order."""
    calls = "connector calls before the forward" if seed % 2 else "late connector calls"
    told = engine.do("asynchronous:told")
    print(told)
    assert (told["scheduler"], told["batches"], told["defers"]) == ("AsyncScheduler", 2, True)
    assert told["steps launched before the forward before them"] > told["steps"] / 3
    for what in (calls, "results that were not there", "waits for copies"):
        assert told[what] > 10, what
    assert told["steps that overtook a copy"] > 0


@pytest.mark.parametrize(("sabotage", "most"), MUTANTS)
def test_the_control_what_is_broken_changes_an_answer(
    sabotage: str, most: int, begin: Callable[..., Engine], calm: Calm
) -> None:
    """Or it ends the engine, where no token is what was waited for."""
    engine, draw, distances = begin("llama", sabotage, most=most), random.Random(1), [0.0]
    with suppress(EngineError):
        while max(distances) < 100 * TOLERANCE:
            assert engine.cpu_s() < LIMIT_S, f"not seen in {len(distances)} turns"
            distances.append(turn(engine, calm("llama"), draw, len(distances) - 1))
    print(sabotage, len(distances), "turns", distances)
    engine.kill()
