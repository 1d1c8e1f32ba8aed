"""Recordings replay in the order of arrival, do not reveal keys, and never delay or fail a request."""

import errno
import json
import os
import subprocess
import sys
import threading
import time
from hashlib import sha256

import pytest
from tests.traces import arrays_of, replay

import kvtier.runtime.observers.trace_recorder as recording
from kvtier.config.loader import load
from kvtier.errors import ConfigError
from kvtier.keys.weights import home_cache
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.observers import line_file
from kvtier.runtime.observers.journal import Journal
from kvtier.runtime.observers.trace_recorder import Recorder, Served
from kvtier.tools.trace.arrays import read_arrays
from kvtier.tools.trace.formats.base import open_trace
from kvtier.types import NextTurn

CHUNK = 16
MIB = 1 << 20


def keys(*names):
    """Keys that name a whole prefix."""
    out, before = [], b""
    for name in names:
        before = sha256(before + str(name).encode()).digest()
        out.append(before)
    return tuple(out)


def counted(metrics):
    return {result: metrics.get(table.TRACE_REQUESTS, result=result) for result in ("recorded", "lost")}


@pytest.fixture
def metrics():
    return Metrics()


def recorded(folder, metrics, served, capacity_bytes=MIB):
    """Record (request, open since) pairs, at their own pace; the file."""
    recorder = Recorder(folder, capacity_bytes, CHUNK, metrics)
    for request, open_since_s in served:
        recorder.served(request, open_since_s)
    recorder.close()
    return recorder.path


def test_what_was_served_is_read_back_in_the_order_of_arrival(tmp_path, metrics):
    began = time.monotonic()
    long = Served(began + 1, keys("a", "b"), 40, 900, "alice")
    quick = [Served(began + 2 + n, keys("a", "b", n), 50 + n, n, "bob") for n in range(3)]
    # The long request ends last; later ones are written after it.
    path = recorded(tmp_path, metrics, [*((it, began + 1) for it in quick), (long, None)])
    trace = open_trace(path)
    assert trace.block_tokens == CHUNK
    requests = list(trace.requests())
    assert [(it.input_tokens, it.output_tokens) for it in requests] == [(40, 900), (50, 0), (51, 1), (52, 2)]
    assert [round(it.time_s - requests[0].time_s, 2) for it in requests] == [0, 1, 2, 3]
    packed = read_arrays(trace, is_strict=True)
    assert (packed.block_count, packed.session.tolist()) == (5, [0, 1, 1, 1])
    assert replay(packed, "lru", None).hit_tokens == 3 * 32
    assert counted(metrics) == {"recorded": 4, "lost": 0}
    assert path.stat().st_mode & 0o777 == 0o600


def test_next_turns_are_recorded(tmp_path, metrics):
    turns = [NextTurn.TOOL, None, NextTurn.USER, NextTurn.NOBODY]
    served = [(Served(float(n), keys(n), 20, 1, "alice", it), None) for n, it in enumerate(turns)]
    assert [it.next_turn for it in open_trace(recorded(tmp_path, metrics, served)).requests()] == turns


def test_two_recordings_of_the_same_requests_share_no_id_and_hold_nothing_of_the_keys(tmp_path, metrics):
    served = [(Served(time.monotonic(), keys("a", "b"), 40, 1, "alice"), None)]
    texts = [recorded(tmp_path, metrics, served).read_text() for _ in range(2)]
    ids = [set(json.loads(text)["hash_ids"]) for text in texts]
    assert len(ids[0]) == 2
    assert not ids[0] & ids[1]
    for text in texts:
        assert "alice" not in text
        assert set(json.loads(text)) == {
            *("block_size", "timestamp", "input_length", "output_length", "session_id", "hash_ids")
        }
        for key in keys("a", "b"):
            # Negative control: ids that were the keys' own bytes would be found here.
            assert str(int.from_bytes(key[: recording.ID_BYTES])) not in text


def test_a_recording_ends_at_its_cap_with_whole_lines_and_a_second_one_counts_the_first(tmp_path, metrics):
    served = [(Served(float(n), keys(n), 20, 1), None) for n in range(200)]
    path = recorded(tmp_path, metrics, served, capacity_bytes=4096)
    assert 3900 < path.stat().st_size <= 4096
    kept = len(path.read_text().splitlines())
    assert len(list(open_trace(path).requests())) == kept
    assert counted(metrics) == {"recorded": kept, "lost": 200 - kept}
    assert recorded(tmp_path, metrics, served, capacity_bytes=4096).stat().st_size <= 4096 - path.stat().st_size


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, metrics, monkeypatch):
    monkeypatch.setattr(line_file, "FLUSH_BYTES", 1)
    written = os.write
    left = [3]

    def failing(file, data):
        if left[0] == 0:
            written(file, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return written(file, data)

    monkeypatch.setattr(line_file.os, "write", failing)
    path = recorded(tmp_path, metrics, [(Served(float(n), keys(n), 20, 1), None) for n in range(9)])
    monkeypatch.undo()
    assert [it.input_tokens for it in open_trace(path).requests()] == [20] * 3
    assert counted(metrics) == {"recorded": 3, "lost": 6}


def test_serving_does_not_wait_for_a_hanging_file_system(tmp_path, metrics, monkeypatch):
    hangs, may_go_on = threading.Event(), threading.Event()

    def hanging(file, data):
        hangs.set()
        assert may_go_on.wait(60)
        return len(data)

    monkeypatch.setattr(line_file.os, "write", hanging)
    monkeypatch.setattr(line_file, "FLUSH_BYTES", 1)
    recorder = Recorder(tmp_path, MIB, CHUNK, metrics)
    request = Served(0.0, keys(1), 20, 1)
    recorder.served(request)
    assert hangs.wait(60)
    for _ in range(recording.WAITING_MAX + 50):
        recorder.served(request)
    assert counted(metrics)["lost"] == 50
    # Keys have their own limit.
    long = Served(0.0, keys(1) * recording.WAITING_KEYS_MAX, 20, 1)
    recorder.served(long)
    assert counted(metrics)["lost"] == 51
    may_go_on.set()
    recorder.close()
    assert counted(metrics)["recorded"] == recording.WAITING_MAX + 1
    recorder.served(request)  # after close: only counted
    recorder.close()


def test_lines_that_wait_for_an_earlier_request_are_bounded(tmp_path, metrics, monkeypatch):
    monkeypatch.setattr(recording, "HELD_MAX", 10)
    recorder = Recorder(tmp_path, MIB, CHUNK, metrics)
    for n in range(50):
        recorder.served(Served(100.0 + n, keys(n), 20, n), 1.0)
    recorder.served(Served(1.0, keys("late"), 20, 99), None)
    recorder.close()
    outputs = [it.output_tokens for it in open_trace(recorder.path).requests()]
    assert sorted(outputs) == [*range(50), 99]
    assert outputs[:40] == list(range(40))
    assert "go back" in arrays_of(recorder.path).warnings[0]


def test_a_directory_that_cannot_be_used_is_named(tmp_path, metrics):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trace\.path = .*no file can be created"):
        Recorder(tmp_path / "file" / "below", MIB, CHUNK, metrics)


def test_it_is_off_unless_a_directory_is_set(tmp_path):
    assert load(environ={}).config.trace.path is None
    config = load(environ={"KVTIER_TRACE__PATH": str(tmp_path), "KVTIER_TRACE__CAPACITY_BYTES": "1MiB"}).config
    assert (config.trace.path, config.trace.capacity_bytes) == (tmp_path, MIB)


PRINTING = "from kvtier.config.loader import load; it = load().config.trace; print(it.path.name, it.capacity_bytes)"
WRITING = "import os; open(os.environ['KVTIER_TRACE__PATH'] + '/requests-1.jsonl', 'w'); raise SystemExit(3)"


@pytest.mark.parametrize(
    ("folder", "program", "code", "out", "err"),
    [
        ("new/traces", [sys.executable, "-c", PRINTING], 0, f"traces {MIB}\n", "nothing was recorded"),
        ("new", ["--", sys.executable, "-c", "print(5)"], 0, "5\n", "nothing was recorded"),
        ("new", [sys.executable, "-c", WRITING], 3, "", ""),
        ("new", ["sh", "-c", "kill -9 $$"], 128 + 9, "", "nothing was recorded"),
        ("new", ["no-such-program"], 127, "", "no-such-program"),
        ("new", ["--"], 2, "", "PROGRAM is missing"),
        ("file", ["true"], 2, "", "allowed: a directory"),
    ],
)
def test_the_command_runs_a_program_with_recording_on(tmp_path, folder, program, code, out, err):
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "kvtier.cli.main", "trace", "record", "--capacity", "1MiB", tmp_path / folder]
    done = subprocess.run([*command, *program], timeout=250, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert err in done.stderr if err else not done.stderr
    assert (tmp_path / folder).is_dir() == (folder != "file" and program != ["--"])


@pytest.mark.parametrize("made", ["trace", "journal", "weights"])
def test_only_the_owner_may_enter_what_is_made_under_umask_0(tmp_path, monkeypatch, made):
    folder = tmp_path / "a" / "b"
    monkeypatch.setenv("HOME", str(tmp_path / "a"))
    before = os.umask(0)
    try:
        if made == "trace":
            Recorder(folder, MIB, CHUNK, Metrics()).close(10.0)
        elif made == "journal":
            layout = KvLayout(CHUNK, (GroupLayout(History(), (64,), "test"),))
            Journal(folder, MIB, [layout], bytes(32), Metrics()).close(10.0)
        else:
            (tmp_path / "a").mkdir(mode=0o700)
            home_cache()
    finally:
        os.umask(before)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(folders) >= 2
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
