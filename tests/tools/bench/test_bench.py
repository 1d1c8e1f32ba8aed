"""The benchmarks keep their JSON contract and check the bytes they time. No figure is tested."""

import json
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from tests.tools.charts.test_report import check_page

from kvtier.cli.main import run
from kvtier.config.loader import load as load_settings
from kvtier.errors import ConfigError, KvError
from kvtier.runtime.executor import Completion
from kvtier.tools.bench import io, repeats
from kvtier.tools.bench import io_harness as io_samples
from kvtier.tools.bench.io import Fio, FioResult, IoLatency, IoPair, has_fio, io_row
from kvtier.tools.bench.io_harness import FullTier, IoSample, layout_of
from kvtier.tools.bench.io_report import io_report, notes
from kvtier.tools.machine_facts import Facts
from kvtier.tools.probe.run import machine_warnings
from kvtier.types import Direction, Outcome


def test_core_gives_its_three_figures(capsys):
    assert run(["bench", "core", "--repeats", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"hash_ms", "lookup_ms", "decide_ms"} <= set(told)
    assert all(told[name] > 0 for name in ("hash_ms", "lookup_ms", "decide_ms"))
    assert (told["prompt_tokens"], told["chunks"]) == (131_072, 512)
    assert [len(values) for values in told["samples"].values()] == [2] * 5


needs_fio = pytest.mark.skipif(not has_fio(), reason="fio is not installed")
ONE = ["--size", "512KiB", "--threads", "1", "--repeats", "1", "--sample", "4MiB"]


@needs_fio
def test_a_run_that_is_cut_short_leaves_a_record_of_what_it_had(tmp_path, monkeypatch, capsys):
    real = io._tier_rows

    def rows(it, size, count, threads):
        if size == 8192:
            raise ConfigError("fio was taken away")
        return real(it, size, count, threads)

    monkeypatch.setattr(io, "_tier_rows", rows)
    record = tmp_path / "record.json"
    arguments = [*ONE, "--size", "8KiB", "--tier", "disk", "--record", str(record)]
    assert run(["bench", "io", "--dir", str(tmp_path), *arguments]) == 2
    assert "taken away" in capsys.readouterr().err
    told = json.loads(record.read_text())["results"]["results"]
    assert [(row["tier"], row["op"], row["chunk_bytes"]) for row in told] == [
        (tier, op, 524288) for tier in ("host", "disk") for op in ("store", "load")
    ]


@needs_fio
def test_io_gives_a_row_for_each_tier_op_and_size(tmp_path, capsys):
    record = tmp_path / "record.json"
    assert run(["bench", "io", "--dir", str(tmp_path), *ONE, "--record", str(record), "--json"]) == 0
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
    for row in rows[2:]:
        assert 0 < row["latency_us"]["p50"] <= row["latency_us"]["p95"] <= row["latency_us"]["p99"]
        assert row["ceiling_latency_us"]["p50"] > 0
        assert row["mix"] == ("0/100" if row["op"] == "store" else "100/0")
        assert (row["device_share"] is None) or row["op"] == "load"
    assert json.loads(record.read_text())["benchmark"] == "io"
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


@needs_fio
@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_where_stores_go_to_new_files_those_of_the_ceiling_do_too(tmp_path, monkeypatch, options):
    measure, found = Fio.measure, []

    def measured(fio, op, **given):
        found.append((op, any(fio._directory.glob("fio.*"))))
        return measure(fio, op, **given)

    monkeypatch.setattr(Fio, "measure", measured)
    assert run(["bench", "io", "--dir", str(tmp_path), *ONE, "--tier", "disk", *options]) == 0
    stores = [is_over for op, is_over in found if op == "store"]
    assert stores == ([False, False] if options else [False, True, True])
    assert all(is_there for op, is_there in found if op == "load")


@needs_fio
def test_io_measures_a_mix_of_interleaved_streams_and_writes_a_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = tmp_path / "io.html"
    arguments = [*ONE, "--mix", "75/25", "--streams", "3", "--tier", "disk", "--report", str(report)]
    assert run(["bench", "io", "--dir", str(tmp_path), *arguments]) == 0
    lines = [line.split()[:3] for line in capsys.readouterr().out.splitlines()]
    assert ["disk", "mix", "75/25"] in lines
    page = report.read_text()
    check_page(page)
    assert page.count("<figure>") == page.count("<svg") == 3
    assert page.count("<tr>") == 1 + 5
    assert [path.name for path in tmp_path.iterdir()] == ["io.html"]


class Mover:
    """In place of the real one: does nothing, or spoils what a load should have brought."""

    def __init__(self, runner, *, spoils, **_others):
        self.arena, self.tier, self.spoils = runner._arena, next(iter(runner.tiers.values())), spoils
        self.kept = {}

    def submit(self, *commands):
        for command in commands:
            self.move(command)

    def move(self, command):
        frame = self.arena.frame(0, command.slot)
        if command.direction is Direction.DEMOTE:
            self.kept[command.key] = bytes(frame)
        else:
            frame[:] = self.kept[command.key]
            if self.spoils:
                self.arena.payload(0, command.slot)[:8] = bytes(8)
        self.put(Completion(command, Outcome.DONE, seconds=0.001))

    def complete_to(self, put):
        self.put = put

    def close(self, _deadline_s):
        return True


def disk_with(monkeypatch, tmp_path, *, spoils, **more):
    monkeypatch.setattr(io_samples, "Mover", lambda runner, **given: Mover(runner, spoils=spoils, **given))
    return FullTier("directory", tmp_path / "store", 64 << 10, 24, 2, **more)


def test_loads_are_compared_with_what_was_stored(tmp_path, monkeypatch):
    disk = disk_with(monkeypatch, tmp_path, spoils=False, streams=3, read_percent=50)
    for _ in range(2):
        disk.store()
        assert len(disk.load().latencies_s) == 24
        assert len(disk.mix(50).latencies_s) == 12
    disk.close()


@pytest.mark.parametrize("read", [FullTier.load, lambda disk: disk.mix(90)], ids=["load", "mix"])
def test_io_notices_wrong_bytes(tmp_path, monkeypatch, read):
    disk = disk_with(monkeypatch, tmp_path, spoils=True, read_percent=90)
    disk.store()
    with pytest.raises(KvError, match="different bytes"):
        read(disk)
    disk.close()


def test_a_load_that_misses_ends_the_benchmark(tmp_path):
    disk = FullTier("directory", tmp_path / "store", 64 << 10, 8, 1)
    disk.store()
    for name, _ in list(disk.tier.scan())[:1]:
        disk.tier.delete(name)
    with pytest.raises(KvError, match="promote failed"):
        disk.load()
    disk.close()


@pytest.mark.parametrize("name", ["directory", "disk"])
def test_a_full_tier_keeps_what_a_mix_loads(tmp_path, name):
    disk = FullTier(name, tmp_path / name, 64 << 10, 40, 2, streams=4, read_percent=50)
    for _ in range(4):
        disk.store()
        disk.mix(50)  # would raise on a miss
        disk.load()
    disk.close()


def test_streams_take_turns_and_keep_their_own_order():
    order = io_samples.interleaved(100, 8, random.Random(1))
    assert sorted(order) == list(range(100))
    assert order != sorted(order)
    edges = [100 * stream // 8 for stream in range(9)]
    for first, last in pairwise(edges):
        mine = [number for number in order if first <= number < last]
        assert mine == sorted(mine)
    assert io_samples.interleaved(5, 1, random.Random(1)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [64 << 10, 96 << 10, 512 << 10, 3 << 20, (3 << 20) + (64 << 10), 64 << 20])
def test_a_chunk_of_any_size_has_a_layout(size):
    layers = layout_of(size).groups[0].layer_bytes
    assert sum(layers) == size
    assert all(layer % 16 == 0 for layer in layers)


@needs_fio
@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((["--mix", mix], f"--mix {mix} is not two percentages") for mix in ("92", "92/9", "0/100", "x/y", "100/0")),
        (["--size", "1000"], "a size must be a multiple of 4 KiB"),
        (["--size", "64 gigs"], "not a size"),
        (["--sample", "100TiB"], "a smaller --sample"),
    ],
)
def test_wrong_options_and_too_little_room_are_refused_before_anything_is_written(tmp_path, capsys, options, message):
    assert run(["bench", "io", "--dir", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def row(device_bytes=None):
    figures = ((1.0, 0.1, 2.0, 1.5), (1 / 3, 0.3, 3.0, 1.0), (0.5, 0.2, 2.5, 2.0))
    pairs = [IoPair(IoSample(took_s, cpu_s, [1.0], device_bytes), *gb_per_s) for took_s, cpu_s, *gb_per_s in figures]
    return io_row(pairs, "disk", "load", 50_000_000, 20, 2, frame=100, direct_io=True)


def test_a_row_has_the_medians_of_its_samples():
    it = row()
    assert (it.gb_per_s, it.ceiling_gb_per_s, it.plain_gb_per_s, it.cpu_s_per_gb) == (2.0, 2.5, 1.5, 0.2)
    assert it.ratio == 0.8


def test_loads_from_a_cache_are_told():
    told = [io.IoResult((row(count),), "fio", 1, 3, is_fresh=False) for count in (20, 100, None)]
    assert [len(list(notes(result))) for result in told] == [1, 0, 0]
    assert "only 20% of the bytes came from the device" in next(notes(told[0]))


def test_an_impossible_share_is_told_and_is_no_part_of_the_answer(capsys):
    for tier in ("host", "disk"):
        bad = replace(row(), tier=tier, ratio=8.73)
        result = io.IoResult((row(), bad), "fio", 1, 3, is_fresh=False)
        assert [f"{tier} load 47.68 MiB: 8.73 of the limit is impossible" in note for note in notes(result)] == [True]
        io_report(result).print()
        answer = capsys.readouterr().out.partition("\n\n")[0]
        assert "disk load 0.80 to 0.80, not counted: 1 of 2 figures" in " ".join(answer.split())
    fair = io.IoResult((row(), replace(row(), ratio=1.1)), "fio", 1, 3, is_fresh=False)
    assert list(notes(fair)) == []


@pytest.mark.parametrize(("load", "is_busy"), [(40.0, True), (2.0, False), (None, False)])
def test_a_busy_machine_is_told_as_the_probe_tells_it(tmp_path, monkeypatch, load, is_busy):
    facts = Facts(memory_bytes=1 << 34, cores=8, load=load)
    monkeypatch.setattr(io, "read_facts", lambda: facts)
    monkeypatch.setattr(io, "has_fio", lambda: True)
    monkeypatch.setattr(io, "_check_room", lambda *_: None)
    monkeypatch.setattr(io, "host_row", lambda *_: row())
    monkeypatch.setattr(io, "_tier_rows", lambda *_: [])
    result = io.run(tmp_path, sizes=(4096,))
    told = [note for note in notes(result) if "runnable processes on 8 cores" in note]
    assert len(told) == is_busy
    assert told == [it for it in machine_warnings(load_settings(environ={}).config, facts) if "runnable" in it]


def test_what_the_kernel_read_for_us(tmp_path):
    place = tmp_path / "io"
    place.write_text("rchar: 5\nread_bytes: 8192\nwrite_bytes: 0\n")
    assert io_samples.read_bytes(place) == 8192
    assert io_samples.read_bytes(tmp_path / "none") is None


def test_without_fio_there_is_no_ceiling(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install the package fio"):
        io.run(tmp_path)


class Drive:
    """In place of fio and of both tiers: moves bytes at a given speed, by a clock of its own."""

    def __init__(self, bytes_per_s):
        self.now_s, self.bytes_per_s = 0.0, bytes_per_s

    def moved(self, total_bytes):
        took_s = 0.5 + total_bytes / self.bytes_per_s  # fio needs half a second to start
        self.now_s += took_s
        return took_s

    def fio(self, _root, *, total_bytes, **_others):
        told = FioResult(1.0, IoLatency(1.0, 1.0, 1.0))
        return SimpleNamespace(
            measure=lambda *_a, **_k: self.moved(total_bytes) and told, close=lambda: None, total_bytes=total_bytes
        )

    def disk(self, name, root, size, count, _threads, **_others):
        def spent():
            return IoSample(self.moved(size * count), 1.0, [1.0])

        root.mkdir()
        return SimpleNamespace(
            name=name, root=root, direct_io=True, frame_bytes=size, store=spent, load=spent, close=lambda: None
        )

    def host_row(self, op, size, count, repeats, _advance):
        self.now_s += repeats
        return io_row([IoPair(IoSample(1.0, 1.0), 1.0, 1.0)], "host", op, size, count, 2)


@pytest.mark.parametrize(("bytes_per_s", "is_cut"), [(40e6, True), (200e6, True), (2e9, False)])
def test_io_without_options_ends_within_three_minutes_on_any_drive(bytes_per_s, is_cut, tmp_path, monkeypatch, capsys):
    drive = Drive(bytes_per_s)
    monkeypatch.setattr(io, "Fio", drive.fio)
    monkeypatch.setattr(io, "FullTier", drive.disk)
    monkeypatch.setattr(io, "host_row", drive.host_row)
    monkeypatch.setattr(io, "has_fio", lambda: True)
    for module in (io, repeats):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: drive.now_s))
    assert run(["bench", "io", "--dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert drive.now_s < 180
    assert ("Cut after 120 s" in told.out) is is_cut
    assert "--thorough also tries 1 and 2 threads, with samples of 1 GiB and medians of 5" in told.err
    assert "32 MiB" in told.out
    quick_s = drive.now_s
    assert run(["bench", "io", "--dir", str(tmp_path), "--thorough", "--sample", "256MiB", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cut_after_s"] is None
    assert {row["chunk_bytes"] for row in result["results"]} == set(io.SIZES)
    assert result["repeats"] == 5
    assert drive.now_s - quick_s > quick_s
