"""The limits and references of `kvtier bench quality`. `tests/engine/test_quality_on_a_model.py` has a real model."""

from dataclasses import replace

import pytest

from kvtier.cli.main import run

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtier.tools.bench.quality.forms import CHUNK_TOKENS, restored  # noqa: E402
from kvtier.tools.bench.quality.gates import gates  # noqa: E402
from kvtier.tools.bench.quality.measure import QualityResult, TaskRow, TextRow, TurnRow  # noqa: E402

ROW = TextRow(
    model="m", text="agent 1536", codec="int4", ratio=0.29, kl=3e-3, kl_p99=0.1, top1=0.98, perplexity_change=0.0,
    noise_kl=1e-3, noise_top1=0.99, samples=[3e-3],
)  # fmt: skip
TASKS = TaskRow("m", "int4", 390, 400)
TURNS = TurnRow(model="m", codec="int4", kl_by_turn=[1e-3, 1.5e-3], kl_once=1e-3, samples=[])


def missed(result):
    return [gate.what for gate in gates(result) if not gate.is_met]


def test_each_limit_is_missed_alone():
    assert missed(QualityResult([ROW], [TASKS], [TURNS])) == []
    texts = [replace(ROW, kl=6.1e-3), replace(ROW, text="code 1536", kl=1e-3)]
    assert missed(QualityResult(texts)) == ["KL in N, agent 1536"]
    assert missed(QualityResult([replace(ROW, kl=4.1e-3)])) == ["KL in N, geometric mean"]
    assert missed(QualityResult([replace(ROW, ratio=0.31)])) == ["of raw bytes, agent 1536"]
    assert missed(QualityResult([replace(ROW, top1=0.96)])) == ["top-1, agent 1536"]
    assert missed(QualityResult([replace(ROW, codec="k8v4")]))[0] == "KL in N, agent 1536"
    assert missed(QualityResult(tasks=[replace(TASKS, kept=387)])) == ["right answers kept"]
    assert missed(QualityResult(tasks=[replace(TASKS, kept=390, of=399)])) == ["right answers on exact KV"]
    assert missed(QualityResult(turns=[replace(TURNS, kl_by_turn=[1e-3, 1.6e-3])])) == [
        "KL of the last turn, of that of once"
    ]


def test_a_reference_that_looks_good_shows_that_the_measures_have_no_power():
    good, bad = replace(ROW, codec="int2"), replace(ROW, codec="int2", kl=0.1)
    assert missed(QualityResult([ROW, good])) == ["breaks a promise of int4"]
    assert missed(QualityResult([ROW, bad])) == []


def test_references_lose_what_their_bits_allow():
    kv = torch.randn(2, 2, 1, 2 * CHUNK_TOKENS, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = {name: restored(kv, name) for name in ("fp8", "rotation", "int2", "int4", "k8v4")}
    losses = {name: (it.kv.float() - kv.float()).pow(2).mean().item() for name, it in found.items()}
    assert losses["fp8"] < 1e-3 < losses["int4"] < losses["rotation"] < 0.02 < 0.1 < losses["int2"] < 0.2
    assert {name: round(found[name].ratio, 3) for name in ("fp8", "rotation", "int2")} == {
        "fp8": 0.5, "rotation": 0.266, "int2": 0.188,
    }  # fmt: skip
    # The prompt's first tokens stay exact in a codec, and only there.
    first = {name: torch.equal(it.kv[:, :, :, :4], kv[:, :, :, :4]) for name, it in found.items()}
    assert first == {"fp8": False, "rotation": False, "int2": False, "int4": True, "k8v4": True}
    assert not torch.equal(restored(kv, "int4", depth=1).kv[:, :, :, :4], kv[:, :, :, :4])


def test_what_is_no_checkpoint_is_refused(tmp_path, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "model.gguf", tmp_path):
        assert run(["bench", "quality", "--model", str(path)]) == 2
        assert f"--model {path}: cannot be a judge" in capsys.readouterr().err
