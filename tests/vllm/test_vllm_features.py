"""vLLM's other features go together with kvtier: guessed tokens, embeddings and images as prompts, several engines."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import LONG, SHORT, Start
from harness import Ask, in_process
from judge import TOLERANCE, apart, prompt
from models import IMAGE, make_llava
from record_events import published, publisher
from settings import CHUNK, connector, whole
from test_vllm_sleep import SLEEPY

pytestmark = pytest.mark.engine

SGLANG = Path(__file__).parents[1] / "sglang"
PICTURED = [*SHORT[:40], IMAGE, *SHORT[40:640]]


def test_tokens_that_were_only_guessed_are_never_stored(start: Start, tmp_path: Path) -> None:
    """Most guesses are wrong here: their KV lies in the blocks for a step, and is written over."""
    guessing = {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 2,
        }
    }
    refrain = prompt(40, 1)
    tokens = [*refrain * 10, *prompt(100, 2), *refrain]
    plain = start("llama")
    wanted = plain.ask(tokens, count=300)[0]
    turn = [*tokens, *wanted.tokens, *prompt(30, 3)]
    wanted_turn = plain.ask(turn)[0]

    first = start("llama", connector(tmp_path / "kv"), **guessing)
    assert first.ask(tokens, count=300)[0].tokens == wanted.tokens
    metrics = first.metrics()
    guesses, accepted = (metrics[f"vllm:spec_decode_num_{it}_tokens"] for it in ("draft", "accepted"))
    assert guesses > 100
    assert 0 < accepted < guesses / 2
    first.close()
    second = start("llama", connector(tmp_path / "kv"), **guessing)
    assert apart(second.ask(turn)[0], wanted_turn) < TOLERANCE
    assert second.external_hits() == 3 * CHUNK


def test_prompts_of_embeddings_are_told_apart(start: Start, tmp_path: Path) -> None:
    """Their token ids are all the same: none. They are not cached."""
    asked = [Ask([0] * 600, embedding_seed=seed) for seed in (1, 2, 1)]
    plain = [start("llama", enable_prompt_embeds=True).ask(it)[0] for it in asked[:2]]
    assert apart(plain[0], plain[1]) > 1.0
    for _ in range(2):
        engine = start("llama", connector(tmp_path / "kv"), enable_prompt_embeds=True)
        for it, wanted in zip(asked, [*plain, plain[0]], strict=True):
            assert apart(engine.ask(it)[0], wanted) < TOLERANCE
            engine.forget()
        engine.close()


def test_two_images_of_one_name_are_told_apart(start: Start, tmp_path: Path) -> None:
    """A client calls them as it likes, and engines share a store. Each engine sees one of them under the name."""
    in_process(make_llava, tmp_path / "llava")
    answers = []
    for seed in (1, 2, 1):
        engine = start(tmp_path / "llava", connector(tmp_path / "kv"), **_seeing())
        answers.append(engine.ask(Ask(PICTURED, image_seed=seed, image_name="logo"))[0])
        wanted = 0 if len(answers) < 3 else 2 * CHUNK
        assert engine.external_hits() == wanted
        if seed == 2:
            engine.forget()
            named = engine.ask(Ask(PICTURED, image_seed=1, image_name="another"))[0]
            assert apart(named, answers[0]) < TOLERANCE
        engine.close()
    assert apart(answers[0], answers[1]) > 1.0
    assert apart(answers[0], answers[2]) < TOLERANCE


def test_images_that_other_weights_have_encoded_are_not_stored(start: Start, tmp_path: Path) -> None:
    """vLLM keeps what its encoder has made of them, whatever its weights are, until it is told to forget it."""
    for seed in (7, 8):
        in_process(make_llava, tmp_path / f"llava{seed}", seed)
    engine = start(tmp_path / "llava7", connector(tmp_path / "kv"), **_seeing(), **SLEEPY)
    asked = Ask(PICTURED, image_seed=1)
    engine.ask(asked)
    engine.do("sleepers:transfer", str(tmp_path / "llava8"))
    assert [engine.forget(), engine.hits_of(asked), engine.forget(), engine.hits_of(asked)] == [True, 0, True, 0]
    assert engine.printed().count("that other weights encoded") == 1
    engine.do("sleepers:reset_encoder")
    assert [engine.forget(), engine.hits_of(asked), engine.forget(), engine.hits_of(asked)] == [
        True,
        0,
        True,
        2 * CHUNK,
    ]


def _seeing() -> dict[str, Any]:
    """Settings of an engine whose model sees images."""
    # vLLM looks at the model's class in a process of its own, which needs torchvision or its stand-in, too.
    paths = [str(SGLANG / "cpu_engine"), os.environ.get("PYTHONPATH", "")]
    return {
        "environment": {"PYTHONPATH": os.pathsep.join(paths)},
        "sabotage": "tests.sglang.torchvision_shim:install",
        "limit_mm_per_prompt": {"image": 1},
        "skip_tokenizer_init": False,
        "skip_mm_profiling": True,
    }


def test_routers_are_told_what_can_be_had_from_host_memory_and_from_disk(start: Start, tmp_path: Path) -> None:
    """As vLLM publishes it, though idle: under its own hashes, next to what the engine itself holds."""
    events, port = publisher()
    engine = start("llama", connector(tmp_path / "kv"), kv_events_config=events)
    engine.ask(LONG)
    wanted, until_s = LONG[: whole(len(LONG))], time.monotonic() + 120
    while True:
        engine.drain()  # steps are taken only for events
        result = stored_events(port)
        if all(sum(map(len, result.get(medium, {}).values())) == len(wanted) for medium in ("CPU", "STORAGE")):
            break
        assert time.monotonic() < until_s, result
        time.sleep(0.2)
    for medium in ("CPU", "STORAGE"):
        assert sorted(token for tokens in result[medium].values() for token in tokens) == sorted(wanted)
        hashes = {block for blocks in result[medium] for block in blocks}
        assert hashes <= {block for blocks in result["GPU"] for block in blocks}


def stored_events(port: int) -> dict[str, dict[tuple[bytes, ...], list[int]]]:
    """By medium: the tokens of the blocks that were stored, by their hashes."""
    found: dict[str, dict[tuple[bytes, ...], list[int]]] = {}
    for batch in published(port):
        for event in msgspec.msgpack.decode(batch)[1]:
            if event["type"] == "BlockStored":
                hashes, tokens, medium = (event[it] for it in ("block_hashes", "token_ids", "medium"))
                found.setdefault(medium, {})[tuple(hashes)] = tokens
    return found
