"""Trace readers: plain and compressed files give the same requests, and errors name line and field."""

import gzip
import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.traces import TRACES, arrays_of

from kvtier.errors import ConfigError
from kvtier.tools.trace import arrays as arrays_module
from kvtier.tools.trace import trace_files as io_module
from kvtier.tools.trace.arrays import TraceArrays, read_arrays, without_sessions, write_requests
from kvtier.tools.trace.formats import base, kv_cache_tester
from kvtier.tools.trace.formats.base import ReadOptions, merge_blocks, open_trace
from kvtier.types import NextTurn

LINES = [
    {"timestamp": 0, "input_length": 150, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 256, "output_length": 9, "hash_ids": [0, 1, 3, 4], "session_id": "a"},
    {"timestamp": 2500, "input_length": 64, "output_length": 1, "hash_ids": [9], "session_id": 7},
]


def written(path: Path, lines, compress=bytes):
    path.parent.mkdir(exist_ok=True)
    text = "\n".join(it if isinstance(it, str) else json.dumps(it) for it in lines) + "\n"
    path.write_bytes(compress(text.encode()))
    return path


def read(path, **reading):
    return [it._replace(blocks=it.blocks.tolist()) for it in open_trace(path, ReadOptions(**reading)).requests()]


def test_request_lines_plain_gzip_and_zstd_give_the_same(tmp_path):
    plain = read(written(tmp_path / "trace", LINES))
    assert [(it.time_s, it.input_tokens, it.output_tokens, it.blocks, it.session) for it in plain] == [
        (0.0, 150, 7, [0, 1, 2], None),
        (2.5, 256, 9, [0, 1, 3, 4], "a"),
        (2.5, 64, 1, [9], "7"),
    ]
    # The first bytes decide, not the name.
    assert read(written(tmp_path / "a.jsonl", LINES, gzip.compress)) == plain
    assert read(written(tmp_path / "b.gz", LINES, zstandard.compress)) == plain


def test_runs_equal_ids_and_the_block_size_is_inferred(tmp_path):
    runs = [{**it, "hash_runs": [[block, 1] for block in it["hash_ids"]]} for it in LINES]
    for it in runs:
        del it["hash_ids"]
    runs[1]["hash_runs"] = [[0, 2], [3, 2]]
    path = written(tmp_path / "runs", runs)
    assert read(path) == read(written(tmp_path / "ids", LINES))
    assert open_trace(path).block_tokens == 64


@pytest.mark.parametrize(
    ("blocks_of", "tokens", "note"),
    [
        (
            lambda tokens: tokens // 16,
            16,
            "blocks of 16 tokens, derived from the numbers of ids, which only whole blocks have",
        ),
        (lambda tokens: -(-tokens // 16), 16, "blocks of 16 tokens, derived from the numbers of ids"),
        (lambda tokens: tokens % 7 + 1, 322, "blocks of about 322 tokens: the numbers of ids fit no single size"),
        (lambda _: 0, 1, "none of the first 30 requests has an id, so reuse is unknown"),
    ],
)
def test_the_block_size_is_inferred_from_the_numbers_of_ids(tmp_path, blocks_of, tokens, note):
    lines = [{"timestamp": n, "input_length": n, "hash_ids": [*range(blocks_of(n))]} for n in range(10, 400, 13)]
    found = open_trace(written(tmp_path / "trace", lines))
    assert (found.block_tokens, found.notes[0]) == (tokens, note)


def test_hashes_and_strings_as_ids(tmp_path):
    names = {0: "ff00", 1: 1 << 63, 2: -5, 3: 1 << 40, 4: "x", 9: 12}
    lines = [{**it, "hash_ids": [names[block] for block in it["hash_ids"]]} for it in LINES]
    ids = [it.blocks for it in read(written(tmp_path / "trace", lines))]
    assert ids[0][:2] == ids[1][:2]
    assert len({*ids[0], *ids[1], *ids[2]}) == 6
    assert ids[2] == [12]


def test_larger_blocks_are_named_by_their_last_id(tmp_path):
    path = written(tmp_path / "trace", LINES)
    assert [it.blocks for it in read(path, block_tokens=128)] == [[1, 2], [1, 4], [9]]
    assert merge_blocks(np.arange(5), 4).tolist() == [3, 4]
    with pytest.raises(ConfigError, match=r"--block 100 .*allowed: a multiple of its 64 tokens"):
        read(path, block_tokens=100)


def test_sessions_start_by_one_draw_each_and_sub_agents_at_their_parents_time(tmp_path):
    def request(t, blocks):
        return {"t": t, "in": 64 * blocks, "out": 5, "hash_runs": [[1, blocks]]}

    session = {
        "id": "s",
        "block_size": 64,
        "requests": [request(0.0, 8), {"t": 50.0, "requests": [request(10.0, 9)]}, request(55.0, 12)],
    }
    path = written(tmp_path / "sessions", [session, {**session, "id": "u"}])
    draw = np.random.default_rng(7)
    starts = [draw.uniform(0, 7200.0), draw.uniform(0, 7200.0)]
    expected = sorted(
        [(start + 0.0, 512, name) for start, name in zip(starts, "su", strict=True)]
        + [(start + 60.0, 576, f"{name}/1") for start, name in zip(starts, "su", strict=True)]
        + [(start + 55.0, 768, name) for start, name in zip(starts, "su", strict=True)]
    )
    requests = read(path, window_h=2.0, seed=7)
    assert [(it.time_s, it.input_tokens, it.session) for it in requests] == expected
    assert open_trace(path).block_tokens == 256
    by_session = {name: [it.blocks for it in requests if it.session == name] for name in ("s", "s/1", "u")}
    first = by_session["s"][0]
    assert [len(it) for it in by_session["s"]] == [2, 3]
    assert by_session["s"][1][:2] == first == by_session["s/1"][0][:2]
    assert not {*first} & {*by_session["u"][0]}  # ids are local to a session


def scoped(blocks, **more):
    requests = [{"t": float(n), "in": 64 * len(it), "out": 1, "hash_ids": it} for n, it in enumerate(blocks)]
    return {"block_size": 64, "requests": requests, **more}


def test_stop_reasons_give_next_turns(tmp_path):
    def request(time_s, **more):
        return {"t": time_s, "in": 64, "out": 1, "hash_runs": [[1, 1]], **more}

    stops = [{"stop": "tool_use"}, {"stop": "end_turn"}, {"stop": ""}, {"stop": "max_tokens"}, {}]
    agent = {"t": 9, "requests": [request(0, stop="tool_use"), request(1, stop="end_turn")]}
    line = {"id": "s", "block_size": 64, "requests": [*(request(n, **it) for n, it in enumerate(stops)), agent]}
    requests = list(open_trace(written(tmp_path / "sessions", [line])).requests())
    found = {session: [it.next_turn for it in requests if it.session == session] for session in ("s", "s/5")}
    assert found["s"] == [NextTurn.TOOL, NextTurn.USER, None, None, None]
    assert found["s/5"] == [NextTurn.TOOL, NextTurn.NOBODY]


def test_next_turns_are_read_and_written(tmp_path):
    turns = ["tool", None, "user", "nobody"]
    line = {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [0], "session_id": 1}
    path = written(tmp_path / "turns", [{**line, "timestamp": n, "next_turn": it} for n, it in enumerate(turns)])
    packed = arrays_of(path)
    assert packed.next_turn.tolist() == [0, -1, 1, 2]
    packed.save(tmp_path)
    assert TraceArrays.load(tmp_path).next_turn.tolist() == [0, -1, 1, 2]
    write_requests(tmp_path / "again", packed, as_runs=True)
    assert arrays_of(tmp_path / "again").next_turn.tolist() == [0, -1, 1, 2]
    write_requests(tmp_path / "silent", without_sessions(packed), as_runs=True)
    assert "next_turn" not in (tmp_path / "silent").read_text()


@pytest.mark.parametrize("name", [int, "block {}".format, lambda it: it + (1 << 60), lambda it: it * 30_000_000])
def test_any_ids_of_sessions(tmp_path, name):
    first, second = [[1, 2], [1, 2, 3], [4]], [[1, 2], [1, 5]]
    named = [[[name(block) for block in blocks] for blocks in it] for it in (first, second)]
    path = written(tmp_path / "local", [scoped(it, id=n) for n, it in zip("ab", named, strict=True)])
    requests = read(path, block_tokens=64)
    found = {session: [it.blocks for it in requests if it.session == session] for session in "ab"}
    a, b = found["a"], found["b"]
    assert a[1][:2] == a[0]
    assert b[1][:1] == b[0][:1]
    assert len({*a[1], *a[2], *b[0], *b[1]}) == 7  # all other ids are distinct

    lines = [scoped(it, id=n, hash_id_scope="global") for n, it in zip("ab", named, strict=True)]
    requests = read(written(tmp_path / "global", lines), block_tokens=64)
    found = {session: [it.blocks for it in requests if it.session == session] for session in "ab"}
    assert found["b"][0] == found["a"][0]
    assert len({*found["a"][1], *found["a"][2], *found["b"][1]}) == 5


def test_lengths_have_no_blocks_and_text_is_cut_into_chains(tmp_path):
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:47,3,4"]
    path = written(tmp_path / "azure.csv", rows, gzip.compress)
    assert not open_trace(path).has_blocks
    assert [(round(it.time_s, 2), it.input_tokens, it.output_tokens) for it in read(path)] == [
        (0, 374, 44),
        (0.32, 3, 4),
    ]

    zoned = [rows[0], "2024-05-10 00:00:00.0099300+00:00,1,2", "", "2024-05-10 00:00:01+00:00,3,4"]
    assert [round(it.time_s, 2) for it in read(written(tmp_path / "later.csv", zoned))] == [0, 0.99]
    with pytest.raises(ConfigError, match="line 5: ContextTokens is 'x'"):
        read(written(tmp_path / "bad.csv", [*zoned, "2024-05-10 00:00:01+00:00,x,4"]))

    shared = "the same words again " * 20
    lines = [
        {
            "timestamp": 1760428258635837 + 1_500_000,
            "input": shared + "and then more",
            "output": "yes",
            "session_id": "b",
        },
        {"timestamp": 1760428258635837, "input": shared, "output": "no", "session_id": "a"},
    ]
    earlier, later = read(written(tmp_path / "text", lines), block_tokens=16)
    assert (earlier.session, earlier.time_s, round(later.time_s, 3)) == ("a", 0.0, 1.5)
    whole = earlier.input_tokens // 16
    assert later.blocks[:whole] == earlier.blocks[:whole]
    assert later.blocks[whole:] != earlier.blocks[whole:]


PARQUET = [
    {"timestamp": 0, "input_length": 150, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 256, "output_length": 9, "hash_ids": [0, 1, 3, 4], "session_id": "a"},
]
"""Rows of golden/traces/requests.parquet."""


def test_parquet_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"requests.parquet is parquet, and pyarrow is not installed: pip install"):
        open_trace(TRACES / "requests.parquet")


def test_parquet_is_read_as_the_same_lines(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra 'parquet' is not installed")
    lines = read(written(tmp_path / "lines", PARQUET))
    assert read(TRACES / "requests.parquet") == lines
    # Nulls are left out, and times are since 1970.
    begin = datetime(2025, 1, 1, tzinfo=UTC)
    chats = [{"messages": [{"role": "user", "content": f"hello {n}", "name": None}]} for n in range(100)]
    rows = [{**it, "timestamp": begin + timedelta(seconds=n), "input": None} for n, it in enumerate(chats)]
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "chats.parquet")
    timed = [{**it, "timestamp": 1000 * n} for n, it in enumerate(chats)]
    assert read(folder) == read(written(tmp_path / "chats", timed))
    dated = [{**it, "timestamp": begin + timedelta(milliseconds=it["timestamp"])} for it in PARQUET]
    parquet.write_table(pyarrow.Table.from_pylist(dated), tmp_path / "dated")
    first, second = read(tmp_path / "dated")
    assert second.time_s - first.time_s == 2.5
    bad = [*PARQUET, {**PARQUET[0], "input_length": None}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "bad")
    with pytest.raises(ConfigError, match="bad, row 3: 'input_length' is missing"):
        read(tmp_path / "bad")
    with monkeypatch.context() as patch:
        patch.setattr(io_module, "EXPANDED_BYTES_FREE", 100)
        patch.setattr(io_module, "EXPANSION_MAX", 0)
        with pytest.raises(ConfigError, match="expands to more than 100 bytes"):
            read(folder)
    whole = (folder / "chats.parquet").read_bytes()
    (folder / "chats.parquet").write_bytes(whole[:-20])
    with pytest.raises(ConfigError, match=r"chats.parquet: not a trace: "):
        read(folder)


def test_burstgpt_has_lengths_and_sessions(tmp_path):
    """The columns of README.md of HPMLL/BurstGPT, release 1.2, and those of release 1.0."""
    rows = [
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5,,3.5,ChatGPT,472,18,490,API log",
        "45.5,7,8,GPT-4,1087,230,1317,Conversation log",
        "118,7,1,GPT-4,1400,0,1400,Conversation log",
    ]
    path = written(tmp_path / "BurstGPT_1.csv", rows)
    assert not open_trace(path).has_blocks
    expected = [(0.0, 472, 18, None), (40.5, 1087, 230, "7"), (113.0, 1400, 0, "7")]
    assert [(it.time_s, it.input_tokens, it.output_tokens, it.session) for it in read(path)] == expected
    older = [",".join(it for n, it in enumerate(row.split(",")) if n not in (1, 2)) for row in rows]
    assert read(written(path, older)) == [it._replace(session=None) for it in read(written(tmp_path / "b", rows))]
    for bad, message in (
        ([*rows, "x,7,1,GPT-4,1,1,2,API log"], "line 5: Timestamp is 'x'; allowed: a number of seconds"),
        ([*rows, "5,7,1,GPT-4,1,many,2,API log"], "line 5: Response tokens is 'many'; allowed: a whole number"),
        ([rows[0].replace("Request", "Prompt"), rows[1]], "line 1: column Request tokens is missing"),
        (["time,tokens", "1,2"], "line 1: unknown CSV; allowed: columns TIMESTAMP, ContextTokens, .*, or Timestamp, "),
    ):
        with pytest.raises(ConfigError, match=message):
            read(written(path, bad))


def test_bailian_is_in_seconds_with_blocks_of_16_and_sessions_by_parents(tmp_path):
    """The line of README.md of alibaba-edu/qwen-bailian-usagetraces-anon, and a root before it."""
    line = {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132}
    line |= {"type": "text", "turn": 2, "hash_ids": [*range(1089, 1122)]}
    root = {**line, "chat_id": 55, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 480, "turn": 1}
    path = written(tmp_path / "qwen_traceA_blksz_16.jsonl", [{**root, "hash_ids": line["hash_ids"][:30]}, line])
    first, second = read(path)
    assert open_trace(path).block_tokens == 16
    assert (first.session, second.session) == ("55", "55")
    assert (first.time_s, second.time_s, second.blocks[:30]) == (1.5, 61.114, first.blocks)


MANY = [json.dumps({**LINES[0], "timestamp": n}) + "\n" for n in range(3000)]
DATA = "".join(MANY).encode()
GZIP = gzip.compress(DATA, mtime=0)
FRAMES = b"".join(zstandard.compress("".join(MANY[at : at + 1000]).encode()) for at in (0, 1000, 2000))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (DATA + b'{"timestamp": \xff', "line 3001: not a trace: not UTF-8: invalid start byte at byte 15"),
        (DATA + b"[" * 100_000, "line 3001: "),
        (DATA + b'{"timestamp": 5,', "line 3001: not JSON: .*; allowed: a JSON value on each line"),
        (json.dumps(LINES[0], indent=1).encode(), "line 1: not JSON: .*; allowed: a JSON value on each line"),
        (json.dumps({"lines": LINES}).encode(), "line 1: unknown format"),
        (GZIP[:10] + b"\x07" + GZIP[11:], "not a trace: .* invalid block type"),
        (GZIP[:3000] + bytes([GZIP[3000] ^ 255]) + GZIP[3001:], ": not "),
        # The last of three frames is cut: an error, not two thousand lines.
        (FRAMES[:-1], "not a trace: truncated zstd frame"),
        (FRAMES[:-200] + b"?" * 200, "not a trace: "),
    ],
    ids=range(9),
)
def test_damage_is_reported_with_its_line(tmp_path, content, message):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"trace {path}.*{message}"):
        read(path)


@pytest.mark.parametrize(
    "content",
    [DATA, b"\xef\xbb\xbf" + DATA, DATA.replace(b"\n", b"\r\n"), DATA[:-1], FRAMES, GZIP],
    ids=["plain", "mark", "returns", "no last end", "zstd frames", "gzip"],
)
def test_ends_of_lines_marks_and_frames_change_nothing(tmp_path, content):
    (tmp_path / "trace").write_bytes(content)
    assert [round(it.time_s * 1000) for it in read(tmp_path / "trace")] == list(range(3000))


def test_seconds_read_as_milliseconds_are_warned_of(tmp_path):
    lines = [{"timestamp": it, "input_length": 9000, "hash_ids": [it]} for it in range(50)]
    path = written(tmp_path / "trace", lines)
    assert any("look like seconds" in note and "--time-unit s" in note for note in open_trace(path).notes)
    found = open_trace(path, ReadOptions(time_unit="s"))
    assert not any("look like" in note for note in found.notes)
    assert [it.time_s for it in found.requests()][-1] == 49.0


@pytest.mark.parametrize(
    ("step", "count", "tokens", "unit", "meant"),
    [
        (0.355, 2000, 140, "", "s"),  # a service's small prompts, 2.8 a second
        (20, 3, 20_000, "", "s"),  # three requests are enough
        (20_000, 3, 20_000, "", ""),  # the same, written in milliseconds
        (355, 2000, 140, "s", "ms"),
        (355_000, 2000, 140, "ms", "us"),
        (355_000, 2000, 140, "us", ""),
        (355_000, 2000, 140, "", ""),  # a service that is idle most of the time
        (0.355, 2000, 140, "s", ""),
        (1, 2, 20_000, "", ""),  # two may come together
        (0.001, 2000, 140, "s", "?"),  # no longer unit would do
        (10**9, 3, 140, "us", "?"),
    ],
)
def test_an_implausible_rate_names_the_likely_unit(tmp_path, step, count, tokens, unit, meant):
    lines = [{"timestamp": it * step, "input_length": tokens, "hash_ids": [it]} for it in range(count)]
    trace = open_trace(written(tmp_path / "trace", lines), ReadOptions(time_unit=unit))
    found = [note for note in trace.notes if "timestamps look" in note]
    assert len(found) == bool(meant)
    end = "no single service has such a rate" if meant == "?" else f"use --time-unit {meant}"
    assert all(note.endswith(end) for note in found)


def test_a_unit_that_is_given_is_doubted_and_not_refused(tmp_path):
    """A service may have 200 requests a second; then no other unit is right."""
    lines = [{"timestamp": it * 0.005, "input_length": 64, "hash_ids": [it]} for it in range(50)]
    path = written(tmp_path / "trace", lines)
    (told,) = read_arrays(open_trace(path, ReadOptions(time_unit="s")), is_strict=True).warnings
    assert "200 requests" in told
    with pytest.raises(ConfigError, match=r"look like seconds.* because of --strict"):
        read_arrays(open_trace(path), is_strict=True)
    with pytest.raises(ConfigError, match="1 timestamps go back"):
        read_arrays(open_trace(written(path, [*lines, lines[0]]), ReadOptions(time_unit="s")), is_strict=True)


def test_a_session_is_the_chat_that_its_chain_of_parents_begins_with(tmp_path):
    chats = [(1, -1), (2, 1), (7, -1), (3, 2), (9, 2), (8, 7), (21, 20), (22, 20), (30, None)]
    lines = [
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": place * 1.5, "input_length": 64, "hash_ids": [chat]}
        for place, (chat, parent) in enumerate(chats)
    ]
    path = written(tmp_path / "trace", lines)
    found = list(open_trace(path).requests())
    assert [it.session for it in found] == ["1", "1", "7", "1", "1", "7", "20", "20", "30"]
    assert [it.time_s for it in found] == [place * 1.5 for place in range(len(chats))]  # such traces are in seconds
    assert any("are seconds" in note for note in open_trace(path).notes)
    assert next(open_trace(path, ReadOptions(time_unit="us")).requests()).time_s == 0.0
    own = [{**line, "session_id": "mine"} for line in lines]
    assert {it.session for it in open_trace(written(path, own)).requests()} == {"mine"}
    alone = [{name: value for name, value in line.items() if name != "parent_chat_id"} for line in lines]
    assert [it.session for it in open_trace(written(path, alone)).requests()] == [str(chat) for chat, _ in chats]


# Shaped as docs/traces/inference-day-2026/dataset.jsonl of ai-dynamo/aiperf: the file is sorted by session.
AIPERF = [
    {"session_id": "a", "input_length": 1200, "output_length": 100, "hash_ids": [0, 1, 9], "timestamp": 0.0},
    {"session_id": "a", "input_length": 300, "output_length": 500, "hash_ids": [10], "delay": 1500.5},
    {"session_id": "a", "input_length": 36, "output_length": 7, "hash_ids": [11], "delay": 250},
    {"session_id": "b", "input_length": 1100, "output_length": 3, "hash_ids": [0, 1, 20], "timestamp": 1000.0},
    {"session_id": "b", "input_length": 433, "output_length": 3, "hash_ids": [21], "delay": 1.0},
]


def test_later_turns_of_aiperf_add_to_the_prompt_and_answer_before_them(tmp_path):
    path = written(tmp_path / "trace", AIPERF)
    trace = open_trace(path)
    assert (trace.block_tokens, len(trace.notes)) == (512, 2)
    requests = read(path)
    assert [(it.time_s, it.session, it.input_tokens) for it in requests] == [
        (0.0, "a", 1200),
        (1.0, "b", 1100),
        (1.001, "b", 1536),
        (1.5005, "a", 1600),
        (1.7505, "a", 2136),
    ]
    one, two, three = (it.blocks for it in requests if it.session == "a")
    first, second = (it.blocks for it in requests if it.session == "b")
    assert (one, first) == ([0, 1, 9], [0, 1, 20])
    # Whole blocks stay, the partial last one becomes another, and no session shares what follows its first answer.
    assert two[:2] == one[:2]
    assert three[:3] == two[:3]
    assert [len(it) for it in (two, three, second)] == [4, 5, 3]
    assert len({*one, *two, *three, *first, *second}) == 9
    assert read(path, block_tokens=1024)[-1].blocks == three[1::2] + three[-1:]

    whole = [{**it, "context_mode": "message_array_with_responses"} for it in AIPERF]
    assert [(it.input_tokens, it.blocks) for it in read(written(path, whole)) if it.session == "b"] == [
        (1100, [0, 1, 20]),
        (433, [21]),
    ]
    for lines, message in (
        ([*AIPERF, whole[0]], "line 6: context_mode is 'message_array_with_responses'; allowed: None, as in the first"),
        ([*AIPERF, {**AIPERF[1], "delay": "x"}], "line 6: delay is 'x'; allowed: a number"),
        ([*AIPERF, {**AIPERF[1], "session_id": "c"}], "line 6: 'timestamp' is missing"),
        ([AIPERF[0]] * 2000 + AIPERF, "line 2002: the line has a delay, but the first 2000 lines have none"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(written(path, lines))


def end(received_ms, tokens, hashes, session=None, **more):
    """A record of https://docs.nvidia.com/dynamo/dev/observability/request-traces."""
    replay = {"trace_block_size": 64, "input_length": tokens, "input_sequence_hashes": hashes}
    request = {"request_id": "r", "output_tokens": 8, "request_received_ms": received_ms, "replay": replay, **more}
    record = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}
    return {**record, "event_time_unix_ms": 9, "agent_context": session and {"session_id": session}}


def test_dynamos_request_trace_is_sorted_and_its_other_records_are_skipped(tmp_path):
    begin_ms = 1_700_000_000_000
    long, short = end(begin_ms, 128, [1 << 63, 7], "s"), end(begin_ms + 8000, 130, [1 << 63, 7, 9])
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1, "tool": {}}
    path = written(tmp_path / "trace", [tool, short, {"timestamp": 1, "event": long}])
    first, second = read(path)
    assert (open_trace(path).block_tokens, second.time_s - first.time_s) == (64, 8.0)
    assert (first.session, first.input_tokens, first.output_tokens, second.session) == ("s", 128, 8, None)
    assert second.blocks[:2] == first.blocks
    for bad, message in (
        ({**short, "schema": "other"}, "line 2: schema is 'other'; allowed: dynamo.request.trace.v1"),
        (end(1, 1, [1], replay=None), "line 2: 'replay' is missing"),
        (end("x", 1, [1]), "line 2: request_received_ms is 'x'; allowed: a number"),
        (end(1, 1, [1.5]), "line 2: input_sequence_hashes holds 1.5; allowed: whole numbers"),
        (
            end(1, 1, [1], replay={**short["request"]["replay"], "trace_block_size": 16}),
            "line 2: trace_block_size is 16",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            read(written(path, [short, bad]))
    with pytest.raises(ConfigError, match="has no request; allowed: at least one"):
        read(written(path, [tool]))


def test_lmcaches_lookups_have_whole_chunks(tmp_path):
    """The line of lookup_hash.py of LMCache 0.5."""
    line = {"timestamp": 1711929600.123, "request_id": "req-abc", "model_name": "DeepSeek-V3", "chunk_size": 256}
    line |= {"seq_len": 1030, "dtypes": ["float8_e4m3fn"], "shapes": [[32, 256, 128]]}
    line |= {"chunk_hashes": ["0xab", "0xcd", "0x1", "0x2"]}
    later = {**line, "timestamp": 1711929601.623, "seq_len": 520, "chunk_hashes": ["0xab", "0xcd"]}
    written(tmp_path / "log" / "lookup_hashes_20240401_000001_000001.jsonl", [later])
    written(tmp_path / "log" / "lookup_hashes_20240401_000000_000000.jsonl", [line])
    first, second = read(tmp_path / "log")
    assert open_trace(tmp_path / "log").block_tokens == 256
    assert (first.input_tokens, second.input_tokens, round(second.time_s - first.time_s, 6)) == (1030, 520, 1.5)
    assert (len(first.blocks), second.blocks) == (4, first.blocks[:2])
    for bad, message in (
        ({"model_name": "other"}, "line 2: model_name is 'other'; allowed: 'DeepSeek-V3', as in the first line"),
        ({"chunk_size": 16}, "line 2: chunk_size is 16; allowed: 256, as in the first line"),
        ({"seq_len": -1}, "line 2: seq_len is -1; allowed: a whole number"),
        ({"chunk_hashes": "0xab"}, "line 2: chunk_hashes is '0xab'; allowed: a list of ids"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(written(tmp_path / "bad", [line, {**line, **bad}]))


def test_texts_may_have_times_of_their_own_unit_or_since_1970(tmp_path):
    for unit, scale in (("s", 1), ("ms", 1000), ("us", 1_000_000)):
        for start in (0, 1_760_428_258 * scale):
            lines = [{**TEXT, "timestamp": start + n * scale, "input": "word " * 3000} for n in range(12)]
            trace = open_trace(written(tmp_path / "text", lines), ReadOptions(time_unit=unit))
            assert [round(it.time_s, 3) for it in trace.requests()] == list(range(12)), (unit, start)
            assert not any("look like" in note for note in trace.notes)


def session(*times, **more):
    return {"block_size": 64, "requests": [{"t": t, "in": 64, "out": 1, "hash_runs": [[1, 1]]} for t in times], **more}


TEXT = {"timestamp": 1760428258635837, "input": "a b c", "output": "d", "session_id": "s"}
ROW = "2023-11-16 18:15:46.6805900,374,44"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*LINES[:2], {"timestamp": 1, "output_length": 1, "hash_ids": [1]}], "line 3: 'input_length' is missing"),
        (
            [*LINES[:2], {"timestamp": "x", "input_length": 1, "hash_ids": [1]}],
            "line 3: timestamp is 'x'; allowed: a number",
        ),
        (
            [*LINES[:2], {"timestamp": 1, "input_length": 1, "hash_ids": [1], "next_turn": "me"}],
            "line 3: next_turn is 'me'; allowed: tool, user, nobody",
        ),
        (
            [*LINES[:2], {"timestamp": 1, "input_length": -4, "hash_ids": [1]}],
            "line 3: input_length is -4; allowed: a whole number",
        ),
        ([*LINES[:2], {"timestamp": 1, "input_length": 1, "hash_ids": 5}], "line 3: hash_ids is 5; allowed: a list"),
        (
            [*LINES[:2], {"timestamp": 1, "input_length": 1, "hash_ids": [1.5]}],
            "line 3: hash_ids holds 1.5; allowed: whole numbers",
        ),
        ([*LINES[:2], {"timestamp": 1, "input_length": 1}], "line 3: 'hash_ids' is missing"),
        ([*LINES[:2], {"timestamp": 1, "input_length": 1, "hash_runs": [[1, 0]]}], r"line 3: hash_runs holds \[1, 0\]"),
        ([*LINES[:2], "[1, 2]"], "line 3: .* is not a JSON object"),
        ([*LINES[:2], '{"timestamp": '], "line 3: "),
        (
            [*LINES[:2], '{"timestamp": 1, "input_length": NaN, "hash_ids": [1]}'],
            "line 3: input_length is nan; allowed",
        ),
        (
            [*LINES[:2], {"timestamp": 1, "input_length": 1 << 31, "hash_ids": [1]}],
            "line 3: input_length is 2147483648; allowed",
        ),
        ([session(0), {**session(0), "requests": [{"t": 0, "out": 1, "hash_runs": []}]}], "line 2: 'in' is missing"),
        ([session(0), {**session(0), "requests": [{"t": "x"}]}], "line 2: t is 'x'; allowed: a number"),
        ([session(0), {**session(0), "requests": 5}], "line 2: 'requests' is missing or not a list"),
        ([session(0), {**session(0), "block_size": 16}], "line 2: block_size 16; allowed: 64, as in the first line"),
        ([session(0), "{"], "line 2: "),
        ([session()], "has no request; allowed: at least one"),
        (
            [scoped([[1]], hash_id_scope="global"), scoped([[1]])],
            "line 2: hash_id_scope is None; use the same scope in all lines",
        ),
        (
            [scoped([[1]], hash_id_scope="local"), scoped([[1]], hash_id_scope="user")],
            "line 2: hash_id_scope is 'user'; allowed: local, global",
        ),
        ([TEXT, {**TEXT, "input": 5}], "line 2: input is 5; allowed: a string"),
        ([TEXT, {**TEXT, "timestamp": None}], "line 2: timestamp is None; allowed: a number"),
        ([TEXT, "[]"], "line 2: .* is not a JSON object"),
        ([HEADER, ROW, "yesterday,1,2"], "line 3: TIMESTAMP is 'yesterday'; allowed: a time such as"),
        ([HEADER, ROW, "2023-11-16 18:15:47,many,2"], "line 3: ContextTokens is 'many'; allowed: a whole number"),
        ([HEADER, ROW, "2023-11-16 18:15:47"], "line 3: ContextTokens is None; allowed: a whole number"),
        ([HEADER.replace(",Gen", ",Degen"), ROW], "line 1: column GeneratedTokens is missing"),
        ([HEADER], "has no request; allowed: at least one"),
    ],
)
def test_every_reader_names_file_line_and_field(tmp_path, lines, message):
    path = written(tmp_path / "trace", lines)
    with pytest.raises(ConfigError, match=message) as found:
        arrays_of(path)
    assert str(path) in str(found.value)
    if len(lines) > 2 or (len(lines) == 2 and not isinstance(lines[0], str)):
        arrays_of(written(path, lines[:-1]))  # negative control


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([session(0, 9, 5)], "1 requests come before the previous one"),
        (
            [session(0, 3_600_000)],
            "times look like milliseconds, not seconds: read as seconds, a ses",
        ),
        (
            [{**TEXT, "timestamp": n, "input": "word " * 3000} for n in range(12)],
            "timestamps look like seconds",
        ),
        ([HEADER, ROW, ROW.replace(":46.", ":12.")], "1 timestamps go back, first in line 3"),
    ],
)
def test_every_reader_warns_of_implausible_times(tmp_path, lines, message):
    path = written(tmp_path / "trace", lines)
    assert any(message in it for it in arrays_of(path).warnings)
    with pytest.raises(ConfigError, match="because of --strict"):
        arrays_of(path, is_strict=True)
    well = arrays_of(written(path, [session(0, 5, 9)]), is_strict=True)
    assert well.warnings == ()


PACKED = gzip.compress(("\n".join(json.dumps(it) for it in LINES) * 50).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((it, "is empty; allowed: at least one request") for it in (b"", b"\n\n", zstandard.compress(b""))),
        (gzip.compress(b"", mtime=0), "is empty; allowed: at least one request"),
        (b'{"question": "?"}', "unknown format; allowed: JSON lines with hash_ids"),
        (PACKED[: len(PACKED) // 2], "not a trace"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path, content, message):
    (tmp_path / "trace").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "trace")


def test_ids_far_apart_take_no_table(tmp_path):
    lines = [{"timestamp": n, "input_length": 9, "hash_runs": [[n * 500_000_000, 2]]} for n in (0, 1, 2, 1)]
    packed = arrays_of(written(tmp_path / "trace", lines))
    assert packed.ids.tolist() == [0, 1, 2, 3, 4, 5, 2, 3]
    with pytest.raises(ConfigError, match=r"hash_runs holds .*ids below 1073741824"):
        arrays_of(written(tmp_path / "trace", [{**lines[0], "hash_runs": [[1 << 30, 1]]}]))


def requests_at(*times_s):
    return [{"timestamp": it * 1000, "input_length": 128, "hash_ids": [it, it + 1]} for it in times_s]


def test_a_directory_is_one_trace_in_the_order_of_names_and_of_time(tmp_path):
    folder = tmp_path / "trace"
    written(folder / "b.jsonl.gz", requests_at(1, 4), gzip.compress)
    written(folder / "a.json", requests_at(2, 3))
    (folder / "README.md").write_text("no trace")
    (folder / "c.jsonl").mkdir()
    assert [(it.time_s, it.blocks) for it in read(folder)] == [(n, [n, n + 1]) for n in (1, 2, 3, 4)]
    assert open_trace(folder).block_tokens == 64

    # One draw for each session in any file; ids are local to a session.
    sessions = [scoped([[1, 2, 3], [1, 2, 3, 4]], id=name) for name in "xyz"]
    together = read(written(tmp_path / "together", sessions), block_tokens=64)
    apart = tmp_path / "apart"
    for number, session in enumerate(sessions):
        written(apart / f"{number}.json", [session])
    assert [it._replace(line=0) for it in read(apart, block_tokens=64)] == [it._replace(line=0) for it in together]

    texts = tmp_path / "texts"
    for number, words in enumerate(("one two", "one two three")):
        written(texts / f"{number}.jsonl", [{"timestamp": 10 - number, "input": words}])
    first, second = read(texts, block_tokens=1)
    assert (first.input_tokens, second.blocks) == (3, first.blocks[:2])


def test_errors_in_a_directory_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"0 files of this directory are traces; allowed: 1 to \d+, named \*\.json,"):
        open_trace(tmp_path)
    written(tmp_path / "a.jsonl", requests_at(1))
    written(tmp_path / "b.jsonl", [*requests_at(2), {"timestamp": 3, "hash_ids": [1]}])
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 2: 'input_length' is missing"):
        read(tmp_path)
    written(tmp_path / "a.jsonl", [{"ts": 1.0, "events": []}])
    with pytest.raises(ConfigError, match="a directory of KV events; allowed: one file of that format"):
        open_trace(tmp_path)


@pytest.mark.parametrize("packing", [zstandard.compress, gzip.compress])
def test_compressed_traces_are_read_in_linear_time_with_a_limit(tmp_path, monkeypatch, packing):
    content = b"".join(f"{number:0127}\n".encode() * (1 << 12) for number in range(16))
    packed = packing(content * 8)
    path = tmp_path / "trace"
    path.write_bytes(packed)
    began_s = time.monotonic()
    with io_module.open_binary(path) as stream:
        assert sum(map(len, iter(lambda: stream.read(1 << 16), b""))) == 8 * len(content)
    # 0.05 s; it was 30 s when each part copied the rest of the file.
    assert time.monotonic() - began_s < 15

    monkeypatch.setattr(io_module, "EXPANDED_BYTES_FREE", 8 * len(content))
    monkeypatch.setattr(io_module, "EXPANSION_MAX", 10)
    assert sum(1 for _ in io_module.text_lines(path)) == 8 * content.count(b"\n")
    monkeypatch.setattr(io_module, "EXPANDED_BYTES_FREE", 8 * len(content) - 1)
    with pytest.raises(
        ConfigError, match=r"trace expands to more than \d+ bytes; allowed: \d+ bytes or 10 times its size"
    ):
        sum(1 for _ in io_module.text_lines(path))


FOUR = {
    # Four requests of ten blocks each.
    "lines": [{"timestamp": n, "input_length": 640, "hash_runs": [[0, 10]]} for n in range(4)],
    "sessions": [
        {"block_size": 64, "requests": [{"t": n, "in": 640, "out": 1, "hash_runs": [[0, 10]]} for n in range(4)]}
    ],
    "texts": [{"timestamp": n, "input": "a b c d e f g h i j"} for n in range(4)],
}


@pytest.mark.parametrize(
    ("form", "module", "limit"),
    [
        *((form, base, "HELD_BLOCKS_MAX") for form in FOUR),
        *((form, arrays_module, "ACCESSES_MAX") for form in FOUR),
        ("sessions", kv_cache_tester, "SESSION_BLOCKS_MAX"),
    ],
)
def test_held_and_written_blocks_are_limited(tmp_path, monkeypatch, form, module, limit):
    written(tmp_path / "a.jsonl", FOUR[form])
    block_tokens = 1 if form == "texts" else 64
    monkeypatch.setattr(module, limit, 40)
    assert len(arrays_of(tmp_path, block_tokens=block_tokens)) == 4
    monkeypatch.setattr(module, limit, 39)
    with pytest.raises(ConfigError, match=r"40 blocks .*; allowed: (at most )?39"):
        arrays_of(tmp_path, block_tokens=block_tokens)


def test_blocks_and_tokens_of_a_request_are_limited(tmp_path):
    most = base.REQUEST_BLOCKS_MAX
    line = {"timestamp": 0, "input_length": 1 << 30, "output_length": 1}
    for blocks in ({"hash_runs": [[0, most], [0, 1]]}, {"hash_ids": [0] * (most + 1)}):
        with pytest.raises(
            ConfigError, match=f"line 1: hash_(runs|ids) has {most + 1} blocks; allowed: at most {most}"
        ):
            open_trace(written(tmp_path / "trace", [{**line, **blocks}]))
    assert len(arrays_of(written(tmp_path / "trace", [{**line, "hash_runs": [[0, most]]}])).ids) == most
    stored = {"type": "BlockStored", "token_ids": [], "block_size": (1 << 31) - 1, "parent_block_hash": None}
    events = written(tmp_path / "events", [{"ts": 1.0, "events": [{**stored, "block_hashes": [1, 2]}]}])
    with pytest.raises(ConfigError, match="line 1: prompt of 4294967294 tokens; allowed: at most 2147483647"):
        arrays_of(events)


def test_components_are_cut_into_blocks_that_name_whole_prefixes(tmp_path):
    components = TRACES / "components"
    first, second, *_ = read(components)
    assert (first.input_tokens, first.session, second.time_s) == (1480, "user-0-0", 60.0)
    assert len(first.blocks) == 24  # 23 of 64 tokens, and 8 tokens
    # Both begin with the same 500 tokens.
    assert [one == other for one, other in zip(first.blocks, second.blocks, strict=True)] == [True] * 7 + [False] * 17
    assert read(components / "0_trace.jsonl") == read(components)
    assert len(read(components, block_tokens=256)[0].blocks) == 6


@pytest.mark.parametrize(
    ("lengths", "ids", "error"),
    [
        ([{"passage_id": 1, "token_length": 9}], {"passages": [1, 2]}, "0.jsonl, line 2: component 2 has no length"),
        ([{"passage_id": 1, "token_length": 9}], {"passages": 1}, "0.jsonl, line 2: .*not iterable"),
        ([{"passage_id": 1, "token_length": 9}], [1], "0.jsonl, line 2: hash_ids is .1.; allowed: ids by kind"),
        ([{"passage_id": 1, "token_length": 0}], {}, "1.jsonl, line 1: token_length is 0"),
    ],
)
def test_malformed_components_name_file_and_line(tmp_path, lengths, ids, error):
    good = {"timestamp": "0", "output_length": 1, "hash_ids": {"passages": [1]}}
    written(tmp_path / "0.jsonl", [good, {**good, "hash_ids": ids}])
    written(tmp_path / "1.jsonl", lengths)
    with pytest.raises(ConfigError, match=error):
        read(tmp_path)
