"""On a GPU: a restored model goes on with the tokens that it would have computed, layer by layer."""

import time
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench.parts.models import build  # noqa: E402 - after the check for torch

from kvtier.connect.transformers import attach  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""On the CPU as a dry run."""
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
LOGITS: dict[str, Any] = GREEDY | {"output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("host", ["64MiB", "1MiB"])
def test_restored_from_each_place(layerwise: bool, host: str, tmp_path: Path) -> None:
    model = build("tiny", DEVICE, "float32", 3)
    prompt = torch.randint(1, 500, (1, 1001), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    arguments = LOGITS | {"attention_mask": torch.ones_like(prompt)}
    plain = model.generate(prompt, **arguments)
    with attach(model, tmp_path / "kv", host__capacity_bytes=host, store__chunk_tokens=16, layerwise=layerwise) as kv:
        kv.generate(prompt, **arguments)
        kv.flush()
        restored: list[int] = []
        # A store that finds no free slot while others are written is dropped; the next call repeats it.
        for _ in range(30):
            warm = kv.generate(prompt, **arguments)
            kv.flush()
            restored.append(kv.last.restored_tokens)
            assert torch.equal(warm.sequences, plain.sequences)
            torch.testing.assert_close(torch.stack(warm.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)
            if len(restored) >= 3 and restored[-1] >= 992:
                break
            time.sleep(0.1)
        assert restored[-1] >= 992, restored
    with attach(model, tmp_path / "kv", host__capacity_bytes=host, store__chunk_tokens=16, layerwise=layerwise) as kv:
        disk = kv.generate(prompt, **arguments)
        assert set(kv.last.restored_by_source) == {"directory"}
        assert kv.last.restored_tokens > 0
        assert torch.equal(disk.sequences, plain.sequences)
