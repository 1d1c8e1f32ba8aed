"""`kvtier probe` keeps its JSON contract and its bounds, and leaves no files. No figure is tested."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.cli.main import run
from kvtier.config.loader import load
from kvtier.errors import ConfigError, KvError
from kvtier.tier.base import Figures
from kvtier.tier.directory import tier as directory
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk import tier as disk
from kvtier.tools.machine_facts import Facts
from kvtier.tools.probe import links, tiers
from kvtier.tools.probe.links import LinkMeasures, MeasureLimits, measure
from kvtier.tools.probe.run import Effort, ProbeRun
from kvtier.types import ObjectName

SMALL = Effort(sizes=(64 << 10,), depths=(1, 2), seconds=0.005, write_bytes=2 << 20)
QUICK = ["--size", "64KiB", "--depth", "1", "--depth", "2", "--seconds", "5ms", "--bytes", "2MiB"]
NAME = ObjectName(bytes(range(32)))


@pytest.fixture(autouse=True)
def little_memory(monkeypatch):
    monkeypatch.setattr(links, "COPY_BYTES", 16 << 20)
    monkeypatch.setattr(links.registry, "names", lambda: ["raw"])


def small_probe(*tiers, directory=None, facts=None):
    return ProbeRun(load(environ={}, tiers=tiers), directory, SMALL, facts or Facts(memory_bytes=1 << 40))


def test_the_json_contract(tmp_path, capsys):
    record = tmp_path / "record.json"
    place = tmp_path / "place"
    place.mkdir()
    assert run(["probe", "--dir", str(place), *QUICK, "--record", str(record), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = {link["name"]: link["measures"] for link in told["links"]}
    assert {"host", "checksum", "codec raw", "directory", "disk"} <= set(found)
    for measures in found.values():
        assert measures
        for it in measures:
            assert {"op", "bytes", "depth", "gb_per_s", "latency_us_p50", "latency_us_p99"} <= set(it)
            assert it["gb_per_s"] > 0
            assert 0 < it["latency_us_p50"] <= it["latency_us_p99"]
    trips = {link["name"]: link["round_trip_us"] for link in told["links"]}
    assert trips["disk"] > 0 < trips["directory"]
    assert trips["host"] is None
    for name in ("directory", "disk"):
        seen = {(it["op"], it["bytes"], it["depth"]) for it in found[name]}
        assert seen == {(op, 65536, depth) for op in ("write", "read") for depth in (1, 2)}
    assert all(isinstance(text, str) for text in told["warnings"])
    assert list(place.iterdir()) == []
    kept = json.loads(record.read_text())
    assert kept["benchmark"] == "probe"
    assert kept["results"] == told
    assert kept["settings"]["sizes"] == {"value": [65536], "origin": "flag"}


def test_what_it_will_do_is_said_before_and_people_get_a_table(tmp_path, capsys):
    assert run(["probe", "--dir", str(tmp_path), *QUICK]) == 0
    out, err = capsys.readouterr()
    assert f"temporary stores, removed at the end (directory: in {tmp_path}" in err
    assert "measurements in at most about" in err
    assert out.startswith("At its best: ")
    assert ["link", "op", "size", "depth", "GB/s", "p50", "p99"] in [line.split() for line in out.splitlines()]
    assert re.search(r"^not measured +gpu", out, re.MULTILINE)


def test_without_a_tier_only_the_machine_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(["probe", *QUICK, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {link["name"] for link in told["links"]} >= {"host", "checksum"}
    assert any("none is configured" in text for text in told["skipped"])
    assert list(tmp_path.iterdir()) == []


def test_a_configured_store_is_neither_opened_nor_changed(tmp_path):
    root = tmp_path / "kv"
    tier = DirectoryTier(root, capacity_bytes=1 << 20)
    tier.write(NAME, memoryview(bytes(4096)))
    tier.close()
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()}
    result = small_probe(f"directory:{root}").run(lambda _: None)
    assert "directory" in {it.name for it in result.links}
    assert result.places[0].path == str(root)
    after = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_a_tier_whose_path_cannot_be_used_is_a_warning_and_the_rest_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("not a directory")
    path = tmp_path / "file" / "kv"
    flags = ["--tier", f"directory:{path}", "--tier", f"disk:{tmp_path / 'disk'}"]
    real = tiers.tier_measures

    def fail(target, *rest):
        if target.name == "directory":
            raise OSError(errno.EIO, "the drive is gone")
        return real(target, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "tier_measures", fail)
        assert run(["probe", *QUICK, *flags, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert any(text.startswith("directory (") and "could not be measured" in text for text in told["warnings"])
    assert "disk" in {link["name"] for link in told["links"]}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


class Counting:
    """A tier that counts what is written and how much it is asked to hold."""

    name = "counting"

    def __init__(self):
        self.written = 0
        self.lock = threading.Lock()
        self.kept = {}

    def write(self, name, frame):
        with self.lock:
            self.written += frame.nbytes
            self.kept[bytes(name)] = bytes(frame)
        return True

    def contains(self, names):
        return [bytes(name) in self.kept for name in names]

    def read(self, name, into):
        into[:] = self.kept[bytes(name)]
        return into.nbytes

    def figures(self):
        return Figures()

    def close(self):
        pass


def count_writes(monkeypatch, probe):
    tier = Counting()
    monkeypatch.setattr(directory, "DirectoryTier", lambda *_, **__: tier)
    monkeypatch.setattr(disk, "DiskTier", lambda *_, **__: tier)
    probe.run(lambda _: None)
    return tier


def test_no_more_is_written_than_was_said(tmp_path, monkeypatch):
    effort = Effort(sizes=(4096, 16384), depths=(1, 3), seconds=60.0, write_bytes=1 << 20)
    monkeypatch.setattr(links, "copies", lambda *_: LinkMeasures("host", ()))
    monkeypatch.setattr(links, "checksums", lambda *_: LinkMeasures("checksum", ()))
    monkeypatch.setattr(links, "codecs", lambda *_: ([], []))
    probe = ProbeRun(load(environ={}), tmp_path, effort, Facts(memory_bytes=1 << 40))
    tier = count_writes(monkeypatch, probe)
    # Sixty seconds a measure would be enough for any amount: only the bytes end it.
    assert 0.9 * probe.bounds.write_bytes < tier.written <= probe.bounds.write_bytes <= effort.write_bytes


def test_a_size_that_the_bytes_do_not_allow_is_left_out_and_said(tmp_path):
    effort = Effort(sizes=(64 << 10, 32 << 20), depths=(1,), seconds=0.001, write_bytes=4 << 20)
    result = ProbeRun(load(environ={}), tmp_path, effort, Facts(memory_bytes=1 << 40)).run(lambda _: None)
    link = next(it for it in result.links if it.name == "disk")
    assert {it.bytes for it in link.measures} == {64 << 10}
    assert any("32768 KiB at depth 1" in text for text in result.skipped)


def test_too_few_bytes_for_anything_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="too small for 2 measurements"):
        ProbeRun(load(environ={}), tmp_path, Effort(sizes=(65536,), depths=(1,), seconds=1, write_bytes=65536))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sizes": (1000,)}, "multiples of 4 KiB"),
        ({"depths": (0,)}, "1 to 256"),
        ({"seconds": 0.0}, "0.001 to 600"),
    ],
)
def test_impossible_efforts_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Effort(**{"sizes": (4096,), "depths": (1,), "seconds": 1.0, "write_bytes": 1 << 20, **wrong})


def test_a_file_system_with_too_little_room_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "free_bytes", lambda _place: (1 << 30, 1 << 20))
    result = small_probe(directory=tmp_path).run(lambda _: None)
    assert not result.is_complete
    assert sum("only 1 MiB is free" in text for text in result.warnings) == 2
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_come_back_changed_are_noticed(tmp_path, monkeypatch):
    tier = Counting()
    real = tier.read

    def spoil(name, into):
        count = real(name, into)
        into[-1] ^= 1
        return count

    tier.read = spoil
    monkeypatch.setattr(disk, "DiskTier", lambda *_, **__: tier)
    result = small_probe(directory=tmp_path).run(lambda _: None)
    assert any(text.startswith("disk (") and "different bytes" in text for text in result.warnings)
    assert "directory" in {it.name for it in result.links}


# ---- nothing is left behind ------------------------------------------------------------------------------------------


def test_a_probe_that_is_interrupted_leaves_nothing(tmp_path):
    ticks = []

    def stop(what):
        ticks.append(what)
        if what == "disk read":
            assert any(path.name.startswith(tiers.PREFIX) for path in tmp_path.iterdir())
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        small_probe(directory=tmp_path).run(stop)
    assert "disk read" in ticks
    assert list(tmp_path.iterdir()) == []
    assert not [it for it in threading.enumerate() if it.name.startswith("kvtier") and it not in before]


PROGRAM = """
import sys
from kvtier.cli.main import main
from kvtier.tools.probe import links
links.COPY_BYTES = 16 << 20
from kvtier.tools.probe.run import ProbeRun
real = ProbeRun.run
def traced(self, tick):
    def say(what):
        tick(what)
        if what.startswith("directory"):
            print("writing", flush=True)
    return real(self, say)
ProbeRun.run = traced
main(["probe", "--dir", sys.argv[1], "--seconds", "300", "--size", "64KiB", "--depth", "2", "--json",
      "--bytes", "1GiB"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_is_told_to_end_leaves_nothing(tmp_path, number):
    # The measures of memory are bounded by time alone: make them short in the program's own process.
    program = PROGRAM.replace(
        "real = ProbeRun.run",
        "ProbeRun._machine_links = lambda self, tick: ([], [], None)\nreal = ProbeRun.run",
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert process.wait(120) == 130
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_probe_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / f"{tiers.PREFIX}dead"
    left.mkdir()
    (left / tiers.LOCK_NAME).touch()
    (left / "disk").mkdir()
    (left / "disk" / "segment").write_bytes(bytes(4096))
    with tiers.temporary_store(tmp_path) as place:
        assert [path.name for path in tmp_path.iterdir()] == [place.name]
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_a_running_probe_and_of_others_stays(tmp_path):
    stranger = tmp_path / f"{tiers.PREFIX}of-another"
    stranger.mkdir()  # without our lock file
    with tiers.temporary_store(tmp_path) as first:
        (first / "data").write_text("x")
        with tiers.temporary_store(tmp_path) as second:
            assert (first / "data").exists()
            assert second != first
    assert [path.name for path in tmp_path.iterdir()] == [stranger.name]


def test_it_measures_beside_a_store_or_where_it_would_be_made_and_inside_a_mount_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "kv").mkdir()
    assert tiers.choose_parent(tmp_path / "kv") == tmp_path
    assert tiers.choose_parent(tmp_path / "new" / "kv") == tmp_path
    monkeypatch.setattr(tiers, "_is_same_file_system", lambda *_: False)
    assert tiers.choose_parent(tmp_path / "kv") == tmp_path / "kv"


# ---- the timed loop --------------------------------------------------------------------------------------------------


def test_a_measure_ends_with_its_bytes():
    done = []
    told = measure(lambda _w, n: done.append(n) or 100, op="x", size=100, depth=3, limits=MeasureLimits(3600.0, 1000))
    assert sorted(done) == list(range(10))
    assert told.count == 10


def test_a_measure_ends_with_its_time_and_every_thread_had_a_turn():
    workers = []
    both = threading.Barrier(4)

    def act(worker, _number):
        workers.append(worker)
        both.wait(60)
        return 1

    told = measure(act, op="x", size=1, depth=4, limits=MeasureLimits(0.0, 1 << 40))
    assert sorted(workers) == [0, 1, 2, 3]
    assert told.count == 4


def test_what_moves_nothing_is_no_measure():
    assert measure(lambda _w, _n: 0, op="x", size=1, depth=2, limits=MeasureLimits(60.0, 8)) is None


@pytest.mark.parametrize("error", [KvError("broken"), OSError(5, "broken"), ZeroDivisionError("broken")])
def test_an_error_of_any_kind_ends_the_measure_and_is_raised(error):
    def act(_worker, number):
        if number == 3:
            raise error
        return 1

    with pytest.raises(type(error), match="broken"):
        measure(act, op="x", size=1, depth=2, limits=MeasureLimits(3600.0, 1 << 40))


def test_an_operation_that_hangs_ends_the_probe(monkeypatch):
    monkeypatch.setattr("kvtier.tools.probe.links.GRACE_S", 0.05)
    let_go = threading.Event()
    with pytest.raises(KvError, match="did not return"):
        measure(lambda _w, _n: let_go.wait(60) and 1, op="x", size=1, depth=1, limits=MeasureLimits(0.0, 1))
    let_go.set()


def test_the_alignment_is_one_that_works_or_none(tmp_path, monkeypatch):
    found = tiers.direct_alignment(tmp_path)
    assert found is None or found in tiers.ALIGNMENTS
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tiers, "_accepts", lambda _descriptor, into, offset: offset >= 4096)
    if found is not None:
        assert tiers.direct_alignment(tmp_path) == 4096


def test_without_direct_io_there_is_no_alignment(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert tiers.direct_alignment(Path(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []
