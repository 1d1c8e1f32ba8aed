"""What was computed once is loaded, in this process and the next, and the answers stay what they were."""

from pathlib import Path

import pytest
from engines import EXACT, LONG, SHORT, Expected, Start
from judge import TOLERANCE, apart, furthest, is_same, prompt
from models import SMALL
from settings import CHUNK, connector, whole
from storage import corrupt, heads, objects
from tests.sealed_places import sealed_place
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

GROUPS = {"gemma3": 2, "qwen3-next": 2}
"""KV groups by rule, where there is more than one."""

SETTINGS = connector(None)["kv_connector_extra_config"]

STORED_S = 60.0
"""For what an idle engine still stores; far above what it takes."""


@pytest.mark.vllm_core
@pytest.mark.parametrize("model", SMALL)
def test_every_kind_of_model_answers_the_same_cold_warm_and_from_disk(
    model: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    wanted = expected(model)
    first = start(model, connector(tmp_path / "kv"))
    both = [whole(len(LONG), first.chunk_tokens), whole(len(SHORT), first.chunk_tokens)]
    cold = first.ask_in_turn(LONG, SHORT)
    assert first.external_hits() == 0
    # Nothing is changed by storing, not even the last bit.
    assert [apart(cold[0], wanted["long"]), apart(cold[1], wanted["short"])] == [0, 0]

    first.forget()
    warm = first.ask_in_turn(LONG, SHORT)
    assert [it.cached for it in warm] == both
    assert first.external_hits() == sum(both)
    first.close()
    assert {group for group, _, _ in heads(tmp_path / "kv")} == set(range(GROUPS.get(model, 1)))

    second = start(model, connector(tmp_path / "kv"))
    disk = second.ask_in_turn(LONG, SHORT)
    assert second.external_hits() == sum(both)
    second.close()
    for answers in (warm, disk):
        assert is_same(model, answers[0], wanted["long"])
        assert is_same(model, answers[1], wanted["short"])
    assert furthest(warm, disk) == 0, "the same KV gives the same bits, wherever it was"

    # The control of all tests here: KV of other tokens, under checksums that hold, would be noticed.
    assert corrupt(tmp_path / "kv")
    third = start(model, connector(tmp_path / "kv"))
    wrong = third.ask(LONG)[0]
    assert third.external_hits() == both[0]
    assert not is_same(model, wrong, wanted["long"])


@pytest.mark.parametrize("kind", ["disk", pytest.param("s3", marks=pytest.mark.vllm_core), "valkey"])
def test_the_answer_comes_back_through_split_and_a_seal(start: Start, kind: str, tmp_path: Path) -> None:
    with sealed_place(kind, tmp_path / kind) as (settings, heads):
        given = connector(None) | {"kv_connector_extra_config": SETTINGS | settings}
        first = start("llama", given, sabotage="sabotage:code_all")
        cold = first.ask(LONG)
        first.forget()
        warm = first.ask(LONG)
        first.close()
        assert len(heads()) == len(LONG) // CHUNK
        assert all(head.seal and 2 in head.codecs for head in heads())
        second = start("llama", given)
        below = second.ask(LONG)
        assert second.external_hits() == whole(len(LONG), second.chunk_tokens)
        assert furthest(warm, below) == 0, "the same KV gives the same bits"
        assert is_same("llama", cold[0], below[0])
        second.close()


@pytest.mark.parametrize("block", [32, 64, 96])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_any_block_size_will_do(model: str, block: int, start: Start, expected: Expected, tmp_path: Path) -> None:
    """128 is what all other tests have, but those of deepseek: 16."""
    hit = (len(LONG) - 1) // 288 * 288 if block == 96 else whole(len(LONG))
    for hits in (0, hit):
        engine = start(model, connector(tmp_path / "kv"), block_size=block)
        assert is_same(model, engine.ask(LONG)[0], expected(model)["long"])
        assert engine.external_hits() == hits
        engine.close()


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_without_vllms_own_prefix_cache(model: str, start: Start, expected: Expected, tmp_path: Path) -> None:
    engine = start(model, connector(tmp_path / "kv"), enable_prefix_caching=False)
    for _ in range(3):
        assert is_same(model, engine.ask(LONG)[0], expected(model)["long"])
    assert engine.external_hits() == 2 * whole(len(LONG))


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_prompts_that_are_computed_in_pieces_and_together(
    model: str, start: Start, expected: Expected, tmp_path: Path
) -> None:
    prompts = [LONG, SHORT, LONG[:900], [*SHORT, *LONG]]
    plain = start(model, max_num_batched_tokens=300).ask(*prompts)
    assert is_same(model, plain[0], expected(model)["long"])
    engine = start(model, connector(tmp_path / "kv"), max_num_batched_tokens=300)
    cold = engine.ask(*prompts)
    engine.forget()
    warm = engine.ask(*prompts)
    assert furthest(cold, plain) < TOLERANCE
    assert furthest(warm, plain) < TOLERANCE
    # What one of them has loaded is in vLLM's own prefix cache for the next.
    assert engine.external_hits() >= whole(len(LONG)) + whole(len(SHORT))
    assert all(answer.cached >= whole(len(tokens)) for answer, tokens in zip(warm, prompts, strict=True))


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.vllm_core), "gemma3", "qwen3-next"])
def test_generated_tokens_are_loaded_in_the_next_turn(model: str, start: Start, tmp_path: Path) -> None:
    answer = start(model, connector(tmp_path / "kv")).ask_and_close(SHORT, count=80)[0]
    turn = [*SHORT, *answer.tokens, *prompt(60, 9)]
    plain = start(model).ask(turn)[0]
    second = start(model, connector(tmp_path / "kv"))
    found = second.ask(turn)[0]
    # 768 tokens are whole chunks of any of these models, and 68 of them were generated. Of a recurrent state vLLM keeps
    # the one at the end of a prompt, and none that decoding comes across.
    assert second.external_hits() == (whole(len(SHORT), second.chunk_tokens) if model == "qwen3-next" else 768)
    # Computed one by one or all at once: with bfloat16 that shows.
    assert apart(found, plain) < TOLERANCE if model in EXACT else found.tokens[0] == plain.tokens[0]


@pytest.mark.vllm_core
def test_a_prompt_larger_than_host_memory_is_loaded_whole(start: Start, tmp_path: Path) -> None:
    tokens = prompt(3900, 3)
    plain = start().ask(tokens)[0]
    small = connector(tmp_path / "kv", host__capacity_bytes="2MiB")
    first = start("llama", small)
    assert apart(first.ask(tokens)[0], plain) == 0
    # Closing drops what still waits for a slot.
    wait_until(lambda: len(objects(tmp_path / "kv")) == 3900 // CHUNK, "the objects", STORED_S)
    first.close()
    assert sum(it.stat().st_size for it in objects(tmp_path / "kv")) > 2 * (2 << 20)
    second = start("llama", small)
    assert apart(second.ask(tokens)[0], plain) < TOLERANCE
    assert second.external_hits() == whole(len(tokens))


def test_a_prompt_of_whole_chunks_leaves_its_last_chunk_to_the_engine(start: Start, tmp_path: Path) -> None:
    engine = start("llama", connector(tmp_path / "kv"))
    tokens = LONG[: 4 * CHUNK]
    cold = engine.ask(tokens)[0]
    engine.forget()
    warm = engine.ask(tokens)[0]
    assert engine.external_hits() == 3 * CHUNK
    assert apart(cold, warm) < TOLERANCE
    assert engine.ask(tokens[:CHUNK])[0].cached < CHUNK


RETENTIONS = {"gemma3": (0, None, CHUNK), "qwen3-next": (0, None)}
"""vLLM's default, all, and every chunk: which windows and states vLLM's own cache keeps."""


@pytest.mark.parametrize("model", RETENTIONS)
def test_what_vllms_own_cache_keeps_of_windows_changes_no_hit(model: str, start: Start, tmp_path: Path) -> None:
    """The same prompt again, users of one system prompt, and the next turn: as many tokens from kvtier in each mode."""
    users = [[*prompt(1100, 3), *prompt(300, 10 + number)] for number in range(3)]
    hits: dict[int | None, list[int]] = {}
    for interval in RETENTIONS[model]:
        place = connector(tmp_path / f"kv{interval}")
        engine = start(model, place, prefix_cache_retention_interval=interval)
        found: list[int] = []
        for tokens in (LONG, *users):
            answer = engine.ask(tokens, count=60)[0]
            engine.forget()
            for again in (tokens, [*tokens, *answer.tokens, *prompt(60, 9)]):
                before = engine.external_hits()
                engine.ask(again)
                found.append(engine.external_hits() - before)
                engine.forget()
        hits[interval] = found
        engine.close()
    assert all(hits[0]), hits
    assert all(found == hits[0] for found in hits.values()), hits


@pytest.mark.vllm_core
def test_of_users_of_one_system_prompt_the_third_is_given_it(start: Start, tmp_path: Path) -> None:
    """Windows are kept where prompts part, although vLLM's own cache has forgotten the one before."""
    users = [[*prompt(1100, 3), *prompt(300, 10 + number)] for number in range(6)]
    plain = start("gemma3").ask_in_turn(*users)
    engine = start("gemma3", connector(tmp_path / "kv"))
    hits: list[int] = []
    for tokens, wanted in zip(users, plain, strict=True):
        before = engine.external_hits()
        assert is_same("gemma3", engine.ask(tokens)[0], wanted)
        hits.append(engine.external_hits() - before)
        engine.forget()
    assert hits == [0, 0, 1024, 1024, 1024, 1024]
