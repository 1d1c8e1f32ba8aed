"""`bench/peer.py` reads the output of LMCache's command and refuses an unknown format; the raw socket returns bytes."""

import json
import threading

import pytest
from bench.parts.loopback import Loopback
from bench.peer import durations_ms, peer, rates
from click.testing import CliRunner
from tests.programs import program

from kvtier.errors import ConfigError
from kvtier.tools.bench.io import has_fio
from kvtier.types import ObjectName


def output(store_ms=64.0, load_ms=32.0, found=8):
    def op(name, duration_ms):
        counts = {"keys_per_round": 8, "total_keys": 8, "total_success": found}
        return {"operation": name, "duration_p50_ms": duration_ms, **counts}

    operations = {"op_0": op("Store", store_ms), "op_1": op("Lookup", 1.0), "op_2": op("Load", load_ms)}
    return json.dumps({"title": "L2", "metrics": {"config": {"num_keys": 8}, **operations}})


def test_rates_are_objects_over_time():
    assert rates(output(), 1_000_000) == pytest.approx({"store": 0.125, "load": 0.25})


def test_durations_are_of_one_round():
    assert durations_ms(output(), ("lookup",)) == {"lookup": (8, 1.0)}


def in_a_thread(act, buffer):
    thread = threading.Thread(target=act, args=(ObjectName(bytes(32)), buffer))
    thread.start()
    thread.join()


def test_the_loopback_socket_returns_the_last_object_of_a_connection():
    link = Loopback(1 << 20)
    try:
        for size in (0, 1, 300_000, 1 << 20):
            stored = bytes(range(256)) * (size // 256) + bytes(size % 256)
            into = bytearray(size)
            in_a_thread(link.put, memoryview(stored))
            in_a_thread(link.get, memoryview(into))
            assert into == stored
    finally:
        link.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (output(found=7), "failed for some"),
        *((it, "unknown format") for it in ("", "[]", "{}", '{"metrics": {}}', '{"metrics": {"a": {"operation": 1}}}')),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        rates(text, 1)


PEER = """#!/usr/bin/env python3
import json, pathlib, sys
at = lambda name: sys.argv[sys.argv.index(name) + 1]
adapter = json.loads(at("--l2-adapter"))
pathlib.Path(adapter["base_path"]).mkdir()
pathlib.Path(at("--output")).write_text('''OUTPUT''')
sys.exit(0 if adapter["type"] in {"fs", "fs_native"} else 1)
"""


@pytest.mark.skipif(not has_fio(), reason="fio is not installed")
def test_all_systems_are_measured_in_one_run_and_nothing_is_left(tmp_path):
    command = program(tmp_path / "lmcache", PEER.replace("OUTPUT", output()))
    place = tmp_path / "place"
    place.mkdir()
    arguments = ["--size", "256KiB", "--threads", "1", "--repeats", "2", "--sample", "2MiB", "--json"]
    done = CliRunner().invoke(peer, ["--lmcache", str(command), "--dir", str(place), *arguments])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["results"]
    systems = ("fio", "kvtier directory", "kvtier disk", "lmcache fs", "lmcache fs_native")
    assert {(row["system"], row["op"]) for row in rows} == {(it, op) for it in systems for op in ("store", "load")}
    assert all(len(row["samples"]) == 2 for row in rows)
    assert all(row["ratio"] == 1.0 for row in rows if row["system"] == "fio")
    assert list(place.iterdir()) == []


@pytest.mark.skipif(not has_fio(), reason="fio is not installed")
def test_a_command_that_fails_ends_the_run_with_its_words(tmp_path):
    command = program(tmp_path / "lmcache", "#!/bin/sh\necho it is broken >&2\nexit 3\n")
    arguments = ["--size", "64KiB", "--threads", "1", "--repeats", "1", "--sample", "128KiB"]
    done = CliRunner().invoke(peer, ["--lmcache", str(command), "--dir", str(tmp_path), *arguments])
    assert isinstance(done.exception, ConfigError)
    assert "it is broken" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["lmcache"]
