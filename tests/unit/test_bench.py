"""The benchmarks keep their JSON contract and check the bytes they time. No figure is tested."""

import json

import pytest

from kvtier.bench import core, io
from kvtier.bench.fio import has_fio
from kvtier.cli.main import run
from kvtier.errors import ConfigError, KvError


def test_core_gives_its_three_figures(capsys):
    assert run(["bench", "core", "--repeats", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"hash_ms", "lookup_ms", "decide_ms"} <= set(told)
    assert all(told[name] > 0 for name in ("hash_ms", "lookup_ms", "decide_ms"))
    assert (told["prompt_tokens"], told["chunks"]) == (131_072, 512)


def test_core_repeats_are_all_kept():
    assert [len(values) for values in core.run(2).samples.values()] == [2] * 5


@pytest.mark.skipif(not has_fio(), reason="fio is not installed")
def test_io_gives_a_row_for_each_tier_op_and_size(tmp_path, capsys):
    record = tmp_path / "record.json"
    arguments = ["bench", "io", "--dir", str(tmp_path), "--size", "512KiB", "--threads", "1", "--repeats", "1"]
    assert run([*arguments, "--sample", "4MiB", "--record", str(record), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["tier"], row["op"]) for row in rows] == [
        ("host", "store"),
        ("host", "load"),
        ("directory", "store"),
        ("directory", "load"),
        ("disk", "store"),
        ("disk", "load"),
    ]
    fields = {"chunk_bytes", "gb_per_s", "ceiling_gb_per_s", "ratio", "cpu_s_per_gb", "threads", "mix", "samples"}
    assert all(fields <= set(row) for row in rows)
    assert json.loads(record.read_text())["benchmark"] == "io"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.skipif(not has_fio(), reason="fio is not installed")
def test_io_notices_wrong_bytes(tmp_path, monkeypatch):
    def promote_nothing(self, link):
        if link is io.Link.PROMOTE:
            for slot in range(self.slots):
                self.arena.payload(0, slot)[:8] = bytes(8)
        return list(range(self.slots))

    monkeypatch.setattr(io._Disk, "_move", promote_nothing)
    with pytest.raises(KvError, match="other bytes"):
        io.run(tmp_path, sizes=(512 << 10,), threads=(1,), repeats=1, sample_bytes=2 << 20)


def test_without_fio_there_is_no_ceiling(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install the package fio"):
        io.run(tmp_path)
