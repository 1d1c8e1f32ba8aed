"""Anonymized traces replay to the same figures, without names, ids or the time of day."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.cli.main import run
from kvtier.replay.single_cache import replay
from kvtier.trace.arrays import read_arrays
from kvtier.trace.formats.base import TraceRequest
from kvtier.trace.open import open_trace
from kvtier.trace.write import request_lines

TRACES = Path(__file__).parents[2] / "golden" / "traces"
BLOCK = 16


class Listed:
    """A trace from (pause, ids, session)."""

    name, block_tokens, has_blocks, notes = "list", BLOCK, True, ()

    def __init__(self, rows):
        self.rows = rows

    def requests(self):
        time_s = 1.7e9
        for line, (pause_s, ids, session) in enumerate(self.rows, 1):
            time_s += pause_s
            yield TraceRequest(time_s, len(ids) * BLOCK, 3, np.asarray(ids, np.int64), session, line)


class Lines(Listed):
    """A trace from request lines."""

    def requests(self):
        for number, row in enumerate(self.rows, 1):
            session = str(row["session_id"]) if "session_id" in row else None
            ids = np.asarray(row["hash_ids"], np.int64)
            yield TraceRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], ids, session, number)


ids = st.lists(st.integers(0, 12).map(lambda it: it * 10**11 - 7), max_size=6, unique=True)
rows = st.lists(st.tuples(st.floats(0, 50), ids, st.sampled_from([None, "eve", "bob"])), min_size=1, max_size=25)


@given(rows=rows, capacity=st.integers(1, 8), coarse_s=st.sampled_from([0.0, 0.5, 60.0]))
def test_any_trace_replays_to_the_same_figures(rows, capacity, coarse_s):
    numbers = {}
    small = [
        (pause, [numbers.setdefault(it, 100 + len(numbers)) for it in ids], session) for pause, ids, session in rows
    ]
    before = read_arrays(Listed(small))
    after = read_arrays(Lines(list(request_lines(before, as_runs=False, coarse_s=coarse_s))))
    for policy in ("plain-lru", "arc", "min"):
        for tokens in (capacity * BLOCK, None):
            assert replay(after, policy, tokens).hit_tokens == replay(before, policy, tokens).hit_tokens
    assert after.session.tolist() == before.session.tolist()
    assert after.time_s[0] == 0.0
    if coarse_s:
        assert all(time_s % coarse_s == 0 for time_s in after.time_s.tolist())


@pytest.mark.parametrize("name", ["lmcache_magagent_b64", "lmcache_miniswe_b64", "taubench_airline_b64"])
def test_public_traces_replay_to_the_same_figures(tmp_path, capsys, name):
    source, target = TRACES / f"{name}.jsonl.gz", tmp_path / "out.jsonl.gz"
    assert run(["trace", "anonymize", str(source), str(target), "--coarse-s", "10", "--no-sessions"]) == 0
    before, after = read_arrays(open_trace(source)), read_arrays(open_trace(target), is_strict=True)
    for policy in ("plain-lru", "arc", "min"):
        for capacity in (20_000, 120_000, None):
            assert replay(after, policy, capacity).hit_tokens == replay(before, policy, capacity).hit_tokens
    assert after.session.max() == -1
    assert not (after.time_s % 10).any()
    capsys.readouterr()


def test_names_ids_and_time_of_day_are_removed(tmp_path, capsys):
    lines = [
        {
            "timestamp": 1_760_428_258_000 + 12_345 * n,
            "input_length": 100,
            "output_length": 7,
            "session_id": f"alice-{n % 2}",
            "hash_ids": ["5ec3e7", f"0ff1ce{n}"],
            "prompt": "never write this anywhere",
        }
        for n in range(4)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    assert run(["trace", "anonymize", str(source), str(target), "--ids", "--coarse-s", "30"]) == 0
    written = target.read_text()
    assert not re.search("alice|5ec3e7|0ff1ce|176042|never", written)
    lines_written = [json.loads(it) for it in written.splitlines()]
    assert [it["timestamp"] for it in lines_written] == [0, 0, 0, 30_000]
    assert [it["session_id"] for it in lines_written] == [0, 1, 0, 1]
    assert [it["hash_ids"] for it in lines_written] == [[0, 1], [0, 2], [0, 3], [0, 4]]
    # Negative control: the source has the words.
    assert re.search("alice", source.read_text())
    capsys.readouterr()


def test_texts_and_bad_options_are_refused(tmp_path, capsys):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"timestamp": 1, "input": "secret " * 50, "output": "x", "session_id": "a"}))
    assert run(["trace", "anonymize", str(text), str(tmp_path / "out")]) == 2
    assert "holds texts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    source = str(TRACES / "lmcache_magagent_b64.jsonl.gz")
    assert run(["trace", "anonymize", source, str(tmp_path / "out"), "--coarse-s", "-1"]) == 2
    assert "-1: not a duration; allowed: seconds as a number" in capsys.readouterr().err
    assert run(["trace", "anonymize", source, source]) == 2
    assert "allowed: another file" in capsys.readouterr().err
