"""Engines of several classes on one directory: the exact ones answer as without kvtier, and each finds its own KV."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attaching import SMALL, Attach
from tests.refusals import refuses
from tiny_transformers import llama, mistral, tokens

from kvtier.codec.registry import lossy_names
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.connect.transformers.support import inspect_cache
from kvtier.layout import ALIGNMENT
from kvtier.runtime.arena import chunk_bytes

pytestmark = pytest.mark.engine

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
WANTED = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
CHUNK = 64
PROMPT = torch.tensor([tokens(200, 5)])


def answered(attached: Attach, loss: str, **settings: Any) -> tuple[torch.Tensor, int]:
    """The logits of a new engine with this class, of shape [tokens, vocabulary], and the restored tokens."""
    settings = SMALL | {"store__chunk_tokens": CHUNK, "store__loss": loss} | settings
    with attached(wide(), **settings) as kv:
        logits = torch.cat(kv.generate(PROMPT, **WANTED).logits)
        assert kv.flush()
        return logits, kv.last.restored_tokens


def wide() -> Any:
    """A model with heads of 32 channels."""
    return llama(hidden_size=128, num_attention_heads=4, num_key_value_heads=4)


def test_exact_and_lossy_engines_share_a_directory_and_no_kv(attached: Attach) -> None:
    plain = torch.cat(wide().generate(PROMPT, **WANTED).logits)
    classes = ["int4", "none", "k8v4"]
    restored = {loss: [answered(attached, loss) for _ in range(2)] for loss in classes}
    for loss in [*classes, "none"]:
        restored[loss].append(answered(attached, loss))  # after the other classes have written
    for loss, answers in restored.items():
        assert [tokens for _, tokens in answers] == [0, *[PROMPT.shape[1] // CHUNK * CHUNK] * (len(answers) - 1)]
        for logits, count in answers:
            assert torch.equal(logits, plain) == (loss == "none" or not count)


@pytest.mark.parametrize(("loss", "share"), [("k8v4", 0.28), ("int4", 0.23)])
def test_a_class_restores_numbers_near_the_exact_ones(
    loss: str, share: float, attached: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers have 32 bits here, so the shares are half of those of bf16."""
    model = llama(head_dim=64, initializer_range=0.1)
    settings = {"store__chunk_tokens": CHUNK, "store__loss": loss}
    plain = torch.cat(model.generate(PROMPT, **WANTED).logits)
    with attached(model, **settings) as kv:
        for _ in range(2):
            torch.testing.assert_close(torch.cat(kv.generate(PROMPT, **WANTED).logits), plain, rtol=1e-4, atol=1e-4)
        assert kv.last.restored_by_source == {"host": 192}, "host memory is exact"
    stored = [path.stat().st_size for path in (tmp_path / "kv").rglob("*") if path.stat().st_size > ALIGNMENT]
    assert len(stored) == 3
    assert sum(stored) < share * 3 * chunk_bytes(inspect_cache(model).layout(CHUNK))

    with attached(model, **settings) as kv:
        near = torch.cat(kv.generate(PROMPT, **WANTED).logits)
        assert kv.last.restored_by_source == {"directory": 192}
    assert torch.equal(near.argmax(-1), plain.argmax(-1))
    assert 1e-7 < divergence(plain, near) < 1e-3
    scatter = CacheCopier.scatter
    monkeypatch.setattr(
        CacheCopier, "scatter", lambda *given: scatter(*given[:-1], memoryview(bytearray(len(given[-1]))))
    )
    with attached(model, **settings) as kv:
        wrong = torch.cat(kv.generate(PROMPT, **WANTED).logits)
    assert divergence(plain, wrong) > 0.1, "the control: other numbers are noticed"


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence of the distributions of the next tokens, in nats."""
    p, q = exact.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_a_class_without_a_lossy_tier_is_exact(attached: Attach) -> None:
    """The negative control: what changes answers is the codec of the tier, and not the class."""
    plain = torch.cat(wide().generate(PROMPT, **WANTED).logits)
    for _ in range(2):
        logits, _ = answered(attached, "int4", store__codec="raw")
        assert torch.equal(logits, plain)
    logits, count = answered(attached, "int4", store__codec="int4")
    assert count, "a tier finds what another codec of the class has written"
    assert torch.equal(logits, plain)


@pytest.mark.parametrize("loss", lossy_names())
def test_a_model_of_which_nothing_may_be_lossy_is_refused(attached: Attach, loss: str) -> None:
    with refuses("store.loss", "no keys and values that may be stored with loss", value=loss, allowed="none"):
        attached(mistral(), store__loss=loss).generate(PROMPT, max_new_tokens=1)
