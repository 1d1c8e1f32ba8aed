"""On a GPU: a restored model goes on with the tokens that it would have computed."""

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


@pytest.mark.parametrize("host", ["64MiB", "1MiB"])
def test_restored_from_each_place(host: str, tmp_path: Path) -> None:
    model = build("tiny", DEVICE, "float32", 3)
    prompt = torch.randint(1, 500, (1, 1001), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    arguments = LOGITS | {"attention_mask": torch.ones_like(prompt)}
    plain = model.generate(prompt, **arguments)
    options = {"host__capacity_bytes": host, "store__chunk_tokens": 16}
    restored = 0
    for _ in range(10):  # a store that finds no free slot while others are written is dropped; the next call repeats it
        with attach(model, tmp_path / "kv", **options) as kv:
            kv.generate(prompt, **arguments)
            restored = kv.last.restored_tokens
        if restored >= 992:
            break
    with attach(model, tmp_path / "kv", **options) as kv:
        disk = kv.generate(prompt, **arguments)
        assert kv.last.restored_by_source == {"directory": 992}
        assert torch.equal(disk.sequences, plain.sequences)
        for _ in range(3):
            warm = kv.generate(prompt, **arguments)
            assert kv.last.restored_tokens >= 992, kv.last
            assert torch.equal(warm.sequences, plain.sequences)
            torch.testing.assert_close(torch.stack(warm.logits), torch.stack(plain.logits), rtol=1e-3, atol=1e-3)
