"""docs/planning.md shows what `kvtier size` and `kvtier plan` print, and its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from kvtier.cli.main import run

TEXT = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("line", "shown"), re.findall(r"```console\n\$ kvtier (.*?)\n(.*?)```", TEXT, re.DOTALL))
def test_the_output_shown_is_the_beginning_of_the_output_printed(line, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert run(shlex.split(line)) == 0
    assert shown
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize("line", re.findall(r"^kvtier (size [^#\n]*)", TEXT, re.MULTILINE))
def test_every_command_runs(line, capsys, tmp_path, monkeypatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}'
    )
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(line)) == 0
    assert capsys.readouterr().out
