"""KV that was computed outside `generate` and stored by `Attachment.store` is what `generate` restores."""

from typing import Any

import pytest
import torch
from attaching import SMALL, Attach
from tiny_transformers import llama, mistral, tokens
from transformers import DynamicCache

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
CHUNK = SMALL["store__chunk_tokens"]


def computed(model: Any, input_ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=input_ids, past_key_values=cache, use_cache=True)
    return cache


def prompt_of(count: int) -> torch.Tensor:
    return torch.tensor([tokens(count, 5)])


def test_what_was_stored_from_outside_is_restored(kv: Any) -> None:
    prompt = prompt_of(100)
    plain = kv.model.generate(prompt, **GREEDY)
    # 50 tokens: three whole chunks. The cache may be longer or shorter than the tokens that are named.
    assert kv.store(prompt[:, :60], computed(kv.model, prompt[:, :50])) == 3
    assert kv.flush()
    assert torch.equal(kv.generate(prompt, **GREEDY), plain)
    assert kv.last.restored_by_source == {"host": 48}


def test_known_tokens_are_left_out(kv: Any) -> None:
    prompt = prompt_of(100)
    cache = computed(kv.model, prompt)
    assert kv.store(prompt[:, :40], cache) == 2
    # A chunk of which only a part is known is stored.
    assert kv.store(prompt, cache, known_tokens=40) == 4
    assert kv.flush()
    assert kv.stored.held == 6
    kv.generate(prompt, **GREEDY)
    assert kv.last.restored_tokens == 96


def test_kv_of_other_tokens_is_noticed(kv: Any) -> None:
    """The negative control: what is stored under a name is what is restored, right or wrong."""
    prompt = prompt_of(100)
    plain = kv.model.generate(prompt, **GREEDY)
    assert kv.store(prompt, computed(kv.model, prompt.flip(1))) == 6
    kv.flush()
    assert not torch.equal(kv.generate(prompt, **GREEDY), plain)


def test_what_cannot_be_stored_is_said_and_fails_nothing(attached: Attach, caplog: pytest.LogCaptureFixture) -> None:
    window = mistral()
    prompt = prompt_of(100)
    kv = attached(window)
    assert kv.store(prompt, computed(window, prompt)) == 0
    plain = attached(llama())
    cache = computed(plain.model, prompt)
    assert plain.store(torch.tensor([1, 2, 3]), cache) == 0
    assert "not stored: the prompt is not a tensor" in caplog.text
    plain.close()
    assert plain.store(prompt, cache) == 0
    assert "not stored: the attachment is closed" in caplog.text
