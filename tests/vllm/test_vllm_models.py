"""The checkpoints are good for something: every token of a prompt counts, and the engine itself is repeatable."""

from pathlib import Path

import pytest
from engines import EXACT, Start
from harness import EngineError
from judge import TOLERANCE, apart, prompt
from models import SMALL
from settings import connector

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", SMALL)
def test_the_beginning_of_a_prompt_decides_what_follows_it(model: str, start: Start) -> None:
    engine = start(model, enable_prefix_caching=False)
    tokens = prompt(1400, 1)
    first, again = engine.ask_in_turn(tokens, tokens)
    assert apart(first, again) == 0
    turned, shifted = engine.ask_in_turn([*reversed(tokens[:512]), *tokens[512:]], [tokens[-1], *tokens[:-1]])
    assert apart(first, turned) > 100 * TOLERANCE
    assert apart(first, shifted) > 100 * TOLERANCE


@pytest.mark.parametrize("model", EXACT)
def test_with_float32_neither_batches_nor_cached_blocks_change_an_answer(model: str, start: Start) -> None:
    """So where a test sees a difference, it is ours."""
    engine = start(model)
    prompts = [prompt(400 + 77 * number, number) for number in range(6)]
    alone = engine.ask_in_turn(*prompts)
    cached = engine.ask_in_turn(*prompts)
    # On the CPU vLLM caches no prefix of a model with latent attention.
    assert all(it.cached for it in cached) == (model != "deepseek")
    engine.forget()
    together = engine.ask(*prompts)
    for one, two, three in zip(alone, cached, together, strict=True):
        assert apart(one, two) < TOLERANCE
        assert apart(one, three) < TOLERANCE


@pytest.mark.vllm_core
def test_latents_made_by_vllms_own_rotary_kernel_on_a_cpu_are_refused(start: Start, tmp_path: Path) -> None:
    """With that kernel even the same prompt gets other numbers in another batch."""
    own = {"compilation_config": {"custom_ops": ["all"]}}
    with start("deepseek", **own) as engine:
        prompts = [prompt(400 + 77 * number, number) for number in range(6)]
        alone, together = engine.ask_in_turn(*prompts), engine.ask(*prompts)
        assert max(map(apart, alone, together)) > TOLERANCE
    with pytest.raises(EngineError, match="-rotary_embedding"):
        start("deepseek", connector(tmp_path / "kv"), **own)
