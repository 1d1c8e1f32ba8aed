"""The codecs on keys and values of a real model."""

import json

import pytest

from kvtier.cli.main import run
from kvtier.tools.demo import model
from kvtier.tools.demo.model import PRETRAINED, missing_packages

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing_packages()), reason=f"{PRETRAINED} needs the packages {missing_packages()}"),
]


def test_exponents_of_a_real_model_are_few(capsys, monkeypatch, pretrained):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("zstandard", reason="the extra 'zstd' is not installed")
    read = model.read_pretrained(pretrained), transformers.AutoTokenizer.from_pretrained(pretrained)
    monkeypatch.setattr(model, "_read_package", lambda: read)
    assert run(["bench", "codec", "--model", "smollm2", "--repeats", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    lossy = {row["codec"] for row in rows if not row["bit_exact"]}
    assert {name.split(",")[0] for name in lossy} == {"k8v4", "int4"}
    assert not any(row["is_wrong"] for row in rows)
    of = {(row["model"].split()[1], row["codec"]): row["ratio"] for row in rows}
    assert of["bf16", "split2"] < 0.69 < of["bf16", "split"] < 0.76 < of["bf16", "zstd"]
    for element in ("fp16", "fp8e4m3", "fp8e5m2"):
        assert of[element, "split2"] < 1.01 * of[element, "zstd"]
        assert of[element, "split"] < 1
