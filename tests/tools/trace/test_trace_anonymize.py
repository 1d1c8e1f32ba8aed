"""Anonymized traces replay to the same figures, without names, ids or the time of day."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.traces import listed, replay

from kvtier.cli.main import run
from kvtier.tools.trace.arrays import request_lines

BLOCK = 16


ids = st.lists(st.integers(100, 112), max_size=6, unique=True)
rows = st.lists(st.tuples(st.floats(0, 50), ids, st.sampled_from([None, "eve", "bob"])), min_size=1, max_size=25)


@given(rows=rows, capacity=st.integers(1, 8), coarse_s=st.sampled_from([0.0, 0.5, 60.0]))
def test_any_trace_replays_to_the_same_figures(rows, capacity, coarse_s):
    times_s = itertools.accumulate((pause_s for pause_s, _, _ in rows[1:]), initial=1.7e9)
    before = listed((time_s, len(ids) * BLOCK, ids, name) for time_s, (_, ids, name) in zip(times_s, rows, strict=True))
    lines = request_lines(before, as_runs=False, coarse_s=coarse_s)
    after = listed([(it["timestamp"] / 1000, it["input_length"], it["hash_ids"], it.get("session_id")) for it in lines])
    for policy in ("plain-lru", "arc", "min"):
        for tokens in (capacity * BLOCK, None):
            assert replay(after, policy, tokens).hit_tokens == replay(before, policy, tokens).hit_tokens
    assert after.session.tolist() == before.session.tolist()
    assert after.time_s[0] == 0.0
    if coarse_s:
        assert all(time_s % coarse_s == 0 for time_s in after.time_s.tolist())


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
    assert run(["trace", "anonymize", str(source), str(target), "--no-sessions"]) == 0
    assert "session" not in target.read_text()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text", ["OUT"], "holds texts"),
        ("tokens", ["OUT"], "holds texts"),
        ("chats", ["OUT"], "holds texts"),
        ("blocks", ["OUT", "--coarse-s", "-1"], "-1: not a duration; allowed: seconds as a number"),
        ("blocks", ["blocks"], "write to another file"),
    ],
)
def test_texts_and_bad_options_are_refused(tmp_path, capsys, monkeypatch, name, options, message):
    monkeypatch.chdir(tmp_path)
    text = {"timestamp": 1, "input": "secret " * 50, "output": "x", "session_id": "a"}
    Path("text").write_text(json.dumps(text))
    Path("tokens").write_text('{"prompt_token_ids": [1, 2]}')
    Path("chats").write_text('[{"conversations": []}]')
    Path("blocks").write_text(json.dumps({"timestamp": 1, "input_length": 16, "hash_ids": [1]}))
    assert run(["trace", "anonymize", name, *options]) == 2
    assert message in capsys.readouterr().err
    assert not Path("OUT").exists()
