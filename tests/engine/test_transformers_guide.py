"""What the guide and the example say, works."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny_transformers import batch, llama, tokens

from kvtier.config.sections import Config
from kvtier.tier.directory.kind import DirectorySettings

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "transformers.md").read_text()


def test_the_guides_snippets_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    input_ids, mask = batch(tokens(600, 1))
    namespace = {"model": llama(), "input_ids": input_ids, "mask": mask}
    snippets = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    assert len(snippets) == 4
    try:
        for snippet in snippets:
            exec(compile(snippet, "guide", "exec"), namespace)
    finally:
        namespace["kv"].close()
    # 600 prompt tokens hold two whole chunks of the default 256.
    assert capsys.readouterr().out.startswith("512 tokens restored, 88 computed, ")


def test_the_guides_defaults_are_the_settings_defaults() -> None:
    config = Config()
    tier = DirectorySettings(path="kv")
    found = dict(re.findall(r"^\| `(\w+__\w+)` \| ([^|]+) \|", GUIDE, re.MULTILINE))
    assert len(found) == 8
    sizes = {"host__capacity_bytes": "4 GiB", "tiers__directory__capacity_bytes": "64 GiB"}
    for name, value in found.items():
        section, _, key = name.rpartition("__")
        actual = getattr(tier if section == "tiers__directory" else getattr(config, section), key)
        if name in sizes:
            assert value == sizes[name]
            assert actual == int(value.split()[0]) << 30
        elif name == "store__chunk_tokens":
            assert (value, actual) == ("256", 0), "0 stands for the smallest that fits, at least 256"
        else:
            assert value.strip("`") == (f"{actual:g}" if isinstance(actual, float) else str(actual).lower())


def test_the_example_restores_in_its_second_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["example", str(tmp_path / "kv")])
    runpy.run_path(str(ROOT / "examples" / "transformers_quickstart.py"), run_name="__main__")
    first, second = capsys.readouterr().out.splitlines()
    assert "1500 tokens computed, none restored" in first
    assert "220 tokens computed, 1280 from host restored" in second
