"""vLLM's other features go together with kvtier: guessed tokens, embeddings and images as prompts, several engines."""

import time
from pathlib import Path

import msgspec
import pytest
from engines import LONG, Start
from harness import Ask
from judge import TOLERANCE, apart, prompt
from record_events import published, publisher
from settings import CHUNK, connector, whole

pytestmark = pytest.mark.engine


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
