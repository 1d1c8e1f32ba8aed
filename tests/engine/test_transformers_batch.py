"""Rows of different lengths, padded on the left, resume together; and rows that end early are kept up to their end."""

from typing import Any

import pytest
import torch
from attaching import SMALL, Attach
from tiny_transformers import MODELS, batch, gemma3, llama, mistral, tokens
from transformers import GenerationConfig

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10}
CHUNK = SMALL["store__chunk_tokens"]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "bloom"])
def test_rows_resume_inside_chunks_and_give_the_tokens_of_a_full_computation(name: str, attached: Attach) -> None:
    model = MODELS[name]()
    kv = attached(model)
    for row in (tokens(110, 1), tokens(77, 2), tokens(30, 3)):
        kv.generate(batch(row)[0], **GREEDY)
    input_ids, mask = batch(tokens(110, 1), tokens(77, 2) + tokens(12, 8), tokens(30, 3) + tokens(40, 9))
    plain = model.generate(input_ids, attention_mask=mask, **GREEDY)
    output = kv.generate(input_ids, attention_mask=mask, **GREEDY)
    # In columns the rows reach 0 + 96, 21 + 64 and 40 + 16: all resume at column 56, which is inside a chunk of two.
    assert kv.last.restored_tokens == 56 + (56 - 21) + (56 - 40)
    assert torch.equal(plain, output)


@pytest.mark.parametrize("make", [llama, gemma3])
def test_kv_of_a_padded_row_serves_the_row_alone_and_the_other_way_round(make: Any, attached: Attach) -> None:
    model = make()
    kv = attached(model)
    rows = tokens(90, 1), tokens(50, 2)
    input_ids, mask = batch(*rows)
    kv.generate(input_ids, attention_mask=mask, **GREEDY)
    assert kv.last.restored_tokens == 0
    for row in rows:
        alone, _ = batch(row)
        assert torch.equal(kv.generate(alone, **GREEDY), model.generate(alone, **GREEDY))
        assert kv.last.restored_tokens == len(row) // CHUNK * CHUNK


def test_a_row_behind_the_common_column_restores_nothing_and_still_gives_its_tokens(attached: Attach) -> None:
    for make in (llama, mistral):
        model = make()
        kv = attached(model)
        kv.generate(batch(tokens(100, 1)[:40])[0], **GREEDY)
        input_ids, mask = batch(tokens(100, 1), tokens(20, 2))
        output = kv.generate(input_ids, attention_mask=mask, **GREEDY)
        assert torch.equal(output, model.generate(input_ids, attention_mask=mask, **GREEDY))
        assert kv.last.restored_tokens == 32, "the second row's first token is in column 80"


def test_a_row_without_a_hit_makes_the_batch_start_at_its_first_token(kv: Any) -> None:
    kv.generate(batch(tokens(100, 1))[0], **GREEDY)
    input_ids, mask = batch(tokens(100, 1), tokens(70, 2))
    output = kv.generate(input_ids, attention_mask=mask, **GREEDY)
    assert kv.last.restored_tokens == 30
    assert torch.equal(output, kv.model.generate(input_ids, attention_mask=mask, **GREEDY))


@pytest.mark.parametrize("make", [llama, gemma3])
def test_what_follows_a_rows_end_is_not_stored(make: Any, attached: Attach) -> None:
    model = make()
    rows = tokens(30, 1), tokens(45, 2)
    input_ids, mask = batch(*rows)
    free = model.generate(input_ids, attention_mask=mask, do_sample=False, max_new_tokens=60, min_new_tokens=60)
    # The tenth token that the first row generates shall end it; the second row goes on.
    end = int(free[0, 45 + 9])
    config = GenerationConfig(do_sample=False, max_new_tokens=60, eos_token_id=[end], pad_token_id=0)
    plain = model.generate(input_ids, attention_mask=mask, generation_config=config)
    kv = attached(model)
    output, report = kv.generate(input_ids, config, attention_mask=mask, return_report=True)
    assert torch.equal(plain, output)
    generated = [row[45:].tolist() for row in output]
    ends = [row.index(end) + 1 if end in row else len(row) for row in generated]
    assert report.generated_tokens == sum(ends)
    groups = len(kv._current().shape.groups)
    has_kv = [len(row) + count - (count == output.shape[1] - 45) for row, count in zip(rows, ends, strict=True)]
    assert report.stored_chunks == groups * sum(count // CHUNK for count in has_kv)
    # The next turn of the first row: its answer with the end token, then something new.
    follow = rows[0] + generated[0][: ends[0]] + tokens(20, 5)
    one, mask = batch(follow)
    output = kv.generate(one, attention_mask=mask, **GREEDY)
    assert torch.equal(output, model.generate(one, attention_mask=mask, **GREEDY))
    assert kv.last.restored_tokens == has_kv[0] // CHUNK * CHUNK


def test_a_window_that_is_not_known_before_the_place_to_resume_shortens_the_batch(
    attached: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gemma3()
    kv = attached(model)
    store = type(kv.session).store

    def without_chunk_3(self: Any, request: Any, prefix: Any, places: Any, session: Any) -> None:
        store(self, request, prefix, [place for place in places if (place.group, place.chunk) != (1, 3)], session)

    with monkeypatch.context() as patch:
        patch.setattr(type(kv.session), "store", without_chunk_3)
        kv.generate(batch(tokens(100, 1))[0], **GREEDY)
        kv.generate(batch(tokens(61, 2))[0], **GREEDY)
    kv.flush()
    # Alone the first row resumes at 96, whose window begins at 73. In the batch both would resume at column 87, whose
    # window begins at 64: inside chunk 4, but the boundary before it, 80, is valid only with chunk 3.
    input_ids, mask = batch(tokens(100, 1), tokens(61, 2))
    output = kv.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(output, model.generate(input_ids, attention_mask=mask, **GREEDY))
    assert kv.last.restored_tokens == 48 + 9
    assert kv.last.uncached_reason == ""


def test_padded_rows_of_a_model_that_takes_no_positions_are_not_cached(attached: Attach) -> None:
    kv = attached(MODELS["bloom"]())
    input_ids, mask = batch(tokens(60, 1), tokens(41, 2))
    kv.generate(input_ids, attention_mask=mask, **GREEDY)
    assert "takes no position_ids" in kv.last.uncached_reason
    kv.generate(batch(tokens(60, 1), tokens(60, 2))[0], **GREEDY)
    assert kv.last.uncached_reason == ""


def test_padding_is_inferred_from_the_tokens_as_the_library_infers_it(kv: Any) -> None:
    input_ids, mask = batch(tokens(60, 1), tokens(41, 2))
    plain = kv.model.generate(input_ids, attention_mask=mask, **GREEDY)
    assert torch.equal(kv.generate(input_ids, **GREEDY), plain)
    assert kv.last.prompt_tokens == 101
    assert torch.equal(kv.generate(input_ids, **GREEDY), plain)
    assert kv.last.restored_tokens
