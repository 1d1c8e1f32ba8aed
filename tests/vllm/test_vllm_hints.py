"""Hints of requests on the real engine: what is stored, loaded, kept and brought back. Each with its control."""

import time
from pathlib import Path
from typing import Any

import pytest
from engines import LONG, SHORT, Expected, Start
from harness import Ask, Engine
from judge import is_same, prompt
from settings import CHUNK, connector, whole
from storage import objects
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.fleet]

SMALL = {"host__capacity_bytes": "8MiB"}
OTHERS = [prompt(1400, 100 + number) for number in range(8)]
"""More than a small host memory holds."""


def hinted(tokens: list[int], **hints: Any) -> Ask:
    return Ask(tokens, transfer=hints or None)


def envelope(**hints: Any) -> dict[str, Any]:
    """Hints as an orchestrator sends them."""
    action = {"action_id": "1", "action_type": "kvtier.hints", "action_version": "1.0", "payload": hints}
    other = {"action_id": "2", "action_type": "kv.fetch", "action_version": "1.0", "payload": {}}
    return {"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": [other, action]}}


def hits(engine: Engine, ask: Ask) -> int:
    """Tokens of a prompt that kvtier has, and the engine has not."""
    engine.forget()
    found = engine.hits_of(ask)
    engine.forget()
    return found


@pytest.mark.vllm_core
@pytest.mark.parametrize(
    "hints", [{"store": False}, {"max_offload_tokens": 0}, envelope(store=False), {"store": True}, {}]
)
def test_a_request_that_is_not_to_be_stored_is_not(hints: dict[str, Any], start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(hinted(LONG, **hints))
    assert hits(engine, hinted(LONG, store=False)) == (whole(len(LONG)) if hints in ({"store": True}, {}) else 0)
    engine.close()
    assert bool(objects(tmp_path / "kv")) is (hints in ({"store": True}, {}))


@pytest.mark.vllm_core
@pytest.mark.parametrize("hints", [{"load": False}, {"max_load_tokens": 0}, {"max_load_tokens": 300}, {}])
def test_a_request_that_is_not_to_load_is_computed(
    hints: dict[str, Any], start: Start, expected: Expected, tmp_path: Path
) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    engine.ask(LONG)
    found = {"load": 0, "max_load_tokens": 256 if hints.get("max_load_tokens") else 0}
    assert hits(engine, hinted(LONG, **hints)) == found.get(next(iter(hints), ""), whole(len(LONG)))
    assert is_same("llama", engine.ask(hinted(LONG, **hints))[0], expected("llama")["long"])


@pytest.mark.vllm_core
@pytest.mark.parametrize("hints", [{"retain_s": 600}, {"priority": "high"}, envelope(retain_s=600), {}])
def test_what_is_retained_survives_others(hints: dict[str, Any], start: Start, expected: Expected) -> None:
    engine = start("llama", connector(None, **SMALL, vllm__allow_high_priority=True))
    engine.ask(hinted(SHORT, **hints))
    for other in OTHERS:
        engine.ask(other, count=1)
    assert hits(engine, hinted(SHORT)) == (whole(len(SHORT)) if hints else 0)
    assert is_same("llama", engine.ask(SHORT)[0], expected("llama")["short"])


@pytest.mark.parametrize("hints", [{"priority": "low"}, {}])
def test_what_has_ended_leaves_before_others(hints: dict[str, Any], start: Start) -> None:
    """One that is asked later leaves earlier."""
    engine = start("llama", connector(None, host__evictor="lru", host__capacity_bytes="4MiB"))
    engine.ask(hinted(SHORT, session="main"))
    engine.ask(hinted(OTHERS[0], session="sub", **hints))
    # Host memory has ten slots: two chunks, five and five.
    engine.ask(OTHERS[1], count=1)
    assert (hits(engine, hinted(SHORT)) == whole(len(SHORT))) is bool(hints)


def loaded(engine: Any) -> dict[str, float]:
    """Tokens that kvtier has loaded, by place; called in the engine's process, with vLLM's engine."""
    from kvtier.observe.metric_definitions import LOAD_TOKENS

    side = engine.engine_core.engine_core.scheduler.connector._scheduler_side
    return {place: side.stats._metrics.get(LOAD_TOKENS, place=place) for place in ("host", "directory")}


def promoted(engine: Any) -> float:
    """Chunks that have come from the tier into host memory; as `loaded`."""
    from kvtier.observe.metric_definitions import TRANSFERS

    side = engine.engine_core.engine_core.scheduler.connector._scheduler_side
    return side.stats._metrics.get(TRANSFERS, link="promote", outcome="done")


@pytest.mark.vllm_core
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_prompt_is_back_in_host_memory_at_its_time(is_asked: bool, start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv", host__capacity_bytes="4MiB"))
    began_s = time.monotonic()
    for other in OTHERS[:4]:
        engine.ask(other, count=1)
    in_s = 1.0 + 3 * (time.monotonic() - began_s)  # others take its place before that, on any machine
    engine.ask(hinted(SHORT, prefetch_in_s=in_s) if is_asked else hinted(SHORT))
    for other in OTHERS[4:]:
        engine.ask(other, count=1)
    if is_asked:
        wait_until(lambda: engine.do("test_vllm_hints:promoted") == len(SHORT) // CHUNK, "the prefetch", in_s + 60)
    assert hits(engine, hinted(SHORT)) == whole(len(SHORT))
    place = "host" if is_asked else "directory"
    tokens = float(whole(len(SHORT)))
    assert engine.do("test_vllm_hints:loaded") == {"host": 0.0, "directory": 0.0} | {place: tokens}


def test_wrong_and_unknown_hints_are_named_once(start: Start, expected: Expected, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    for _ in range(2):
        answer = engine.ask(hinted(SHORT, retain_s="long", priority=7, **envelope(store=True)))[0]
        assert is_same("llama", answer, expected("llama")["short"])
    lines = [line for line in engine.printed().splitlines() if "logged once" in line]
    assert len(lines) == 3
    assert all(any(what in line for line in lines) for what in ("retain_s = 'long'", "priority = 7", "'kv.fetch'"))
