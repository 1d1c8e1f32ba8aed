"""`kvtier replay`: JSON fields, the report, and errors for impossible options."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.tools.charts.test_report import check_page
from tests.traces import MINISWE, TRACES

from kvtier.cli.main import run
from kvtier.report.format import short_count


def replay(capsys, *arguments):
    code = run(["replay", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_its_contract(capsys):
    code, out, _ = replay(
        capsys, MINISWE, "--capacity-tokens", "100000,0.02M", "--policy", "default,min", "--json", "--jobs", "1"
    )
    result = json.loads(out)
    assert code == 0
    assert (result["requests"], result["input_tokens"]) == (402, 2_539_560)
    assert round(result["infinite_hit_rate"], 4) == 0.9304
    fields = {"policy", "capacity_tokens", "hit_rate", "hit_tokens", "evictions", "written_tokens"}
    assert [(it["policy"], it["capacity_tokens"]) for it in result["results"]] == [
        ("default", 100_000),
        ("default", 20_000),
        ("min", 100_000),
        ("min", 20_000),
    ]
    for it in result["results"]:
        assert fields <= it.keys()
        assert it["hit_rate"] == pytest.approx(it["hit_tokens"] / result["input_tokens"])
    _, out, _ = replay(capsys, MINISWE, MINISWE, "--capacity-tokens", "inf", "--policy", "lru", "--json", "--jobs", "1")
    assert [it["results"][0]["capacity_tokens"] for it in json.loads(out)] == [None, None]


def test_capacities_are_shares_of_the_unique_tokens(capsys, tmp_path):
    _, out, _ = replay(capsys, MINISWE, "--policy", "lru", "--json", "--jobs", "1")
    result = json.loads(out)
    blocks = result["unique_tokens"] // 64
    described = json.loads(replay(capsys, "describe", MINISWE, "--json")[1])
    assert blocks * 64 == result["unique_tokens"] == described["unique_tokens"]
    found = [it["capacity_tokens"] for it in result["results"]]
    assert found == [blocks * percent // 100 * 64 for percent in (3, 10, 30)]
    capacities = ("--capacity-tokens", "100%, 2.5%,20k,inf")
    _, out, _ = replay(capsys, MINISWE, "--policy", "lru", "--jobs", "1", *capacities)
    assert {"100.0%", "2.5%"} < set(out.split())
    # In a trace of one block, all shares are that block.
    path = tmp_path / "small.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 40, "hash_ids": [1]}) + "\n")
    _, out, _ = replay(capsys, str(path), "--policy", "lru,min", "--json", "--jobs", "1")
    assert [(it["policy"], it["capacity_tokens"]) for it in json.loads(out)["results"]] == [("lru", 64), ("min", 64)]


def test_start_times_are_drawn_several_times_and_the_spread_is_shown(capsys):
    path = str(TRACES / "claude_code_17sessions.jsonl.gz")
    common = (path, "--capacity-tokens", "3%", "--policy", "lru", "--jobs", "1")
    drawn = json.loads(replay(capsys, *common, "--json")[1])
    single = [
        json.loads(replay(capsys, *common, "--seed", seed, "--draws", "1", "--json")[1])["results"][0] for seed in "123"
    ]
    rates = [it["hit_rate"] for it in single]
    assert max(rates) - min(rates) > 0.02
    assert drawn["seeds"] == [1, 2, 3]
    (row,) = drawn["results"]
    assert row["hit_rates"] == rates
    assert row["hit_rate"] == pytest.approx(sum(rates) / 3)
    assert row["evictions"] == round(sum(it["evictions"] for it in single) / 3)
    assert row["cpu_s"] > 0
    assert f"{min(rates):.4f} to {max(rates):.4f}" in replay(capsys, *common)[1]


def test_a_trace_with_start_times_of_its_own_is_replayed_once(capsys):
    found = json.loads(replay(capsys, MINISWE, "--policy", "lru", "--jobs", "1", "--json")[1])
    assert (found["seeds"], found["results"][0]["hit_rates"]) == ([], [])


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_ctrl_c_ends_at_once_with_the_finished_replays(tmp_path, jobs):
    """The prompts are so long that one replay of `default` takes many seconds."""
    lines = [
        {
            "timestamp": 1000 * turn,
            "input_length": 3000 * 16,
            "output_length": 1,
            "hash_ids": [*range(7 * turn, 7 * turn + 3000)],
        }
        for turn in range(500)
    ]
    path, journal = tmp_path / "long.jsonl", tmp_path / "journal"
    path.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "kvtier.cli.main", "replay", str(path), "--policy", "lru,default"]
    command += ["--capacity-tokens", "50%", "--jobs", jobs, "--keep", str(journal), "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as process:
        while process.poll() is None and not (journal.exists() and journal.read_text().endswith("\n")):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes of the command
        begun_s = time.monotonic()
        out, err = process.communicate(timeout=60)
        took_s = time.monotonic() - begun_s
    assert (process.returncode, took_s < 3) == (130, True), (took_s, err)
    found = json.loads(out)
    assert found["is_complete"] is False
    assert [it["policy"] for it in found["results"]] == ["lru"]
    assert "Interrupted: 1 of 2 replays" in err


def test_tables_and_describe(capsys):
    _, out, _ = replay(capsys, MINISWE, "--capacity-tokens", "20k", "--policy", "lru", "--jobs", "1")
    assert "hits 0.9304 of" in out
    assert "2,539,560" in replay(capsys, "describe", MINISWE)[1]
    assert json.loads(replay(capsys, "describe", MINISWE, "--json")[1])["sessions"] == 20
    lines = [line.split() for line in replay(capsys, MINISWE, "--policy", "help")[1].splitlines()]
    assert {"min", "adaptive-turns", "adaptive-hints"} < {words[0] for words in lines}


@pytest.mark.parametrize(
    ("model", "token_bytes", "omits"),
    [
        ("llama-3.1-8b", 131_072, ""),
        # 18 layers keep all tokens, and 18 keep 128 of every 256.
        ("gpt-oss-120b", 1.5 * 18 * 2 * 8 * 64 * 2, "Loads count all stored tokens of layers with a window."),
        # 7 layers of 576 elements; 20 of 32 heads x 128 x 128 in 4 bytes, and 3 tokens of 3 x 4096 in 2 bytes.
        ("kimi-linear-48b-a3b", 7 * 576 * 2, "States, 43.42 MB for each conversation, are not counted."),
    ],
)
def test_a_replay_counts_a_token_as_tiers_store_it_and_says_what_it_omits(capsys, tmp_path, model, token_bytes, omits):
    """GPT-OSS had 73,728 bytes a token, of which a plan stores 55,296. States of 43 MB were left out without a word."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}) + "\n")
    options = (path, "--tier", "host=1GiB", "--model", model, "--jobs", "1")
    _, out, _ = replay(capsys, *options, "--json")
    result = json.loads(out)
    assert (result["token_bytes"], result["warnings"]) == (token_bytes, [omits] if omits else [])
    _, out, _ = replay(capsys, *options)
    assert f" {token_bytes:,.0f} bytes a token" in " ".join(out.split())
    assert f"every hit is a load. {omits}".strip() in " ".join(out.split())
    assert run(["plan", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token_stored"] == token_bytes


def test_the_report_has_charts_and_all_rows(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.html"
    picture = tmp_path / "charts.svg"
    arguments = ("--capacity-tokens", "6400,20k", "--policy", "lru,arc,min", "--jobs", "1")
    code, _, err = replay(capsys, MINISWE, *arguments, "--report", str(path), "--picture", str(picture))
    assert code == 0
    assert [line.rpartition("/")[2] for line in err.splitlines() if line.startswith("Written")] == [
        path.name,
        picture.name,
    ]
    assert "Hit rate against capacity" in picture.read_text()
    assert all(f">{short_count(it)}</text>" in picture.read_text() for it in (6400, 20_000))  # what was replayed
    page = path.read_text()
    assert page.count("<svg") == 4
    check_page(page)
    assert "0.9304" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((MINISWE, "--policy", "nobody"), "unknown policy 'nobody'; allowed: default, "),
        ((MINISWE, "--capacity-tokens", "some"), "--capacity-tokens 'some': not a whole number"),
        (
            (MINISWE, "--capacity-tokens", "1M,0%"),
            "--capacity-tokens '0%': not a share; allowed: more than 0%, up to 100%",
        ),
        ((MINISWE, "--capacity-tokens", "101%"), "allowed: more than 0%, up to 100%"),
        ((MINISWE, "--capacity-tokens", "nan%"), "allowed: more than 0%, up to 100%"),
        ((MINISWE, "--capacity-tokens", "10"), "is less than a block; allowed: at least 64 tokens"),
        ((MINISWE, "--block", "100"), "allowed: a multiple of its 64 tokens"),
        ((MINISWE, "--window-h", "0"), "--window-h 0; allowed: above 0"),
        ((MINISWE, "--time-unit", "h"), "--time-unit 'h'; allowed: s, ms, us"),
        (("nowhere.jsonl",), "No such file"),
        ((MINISWE, "--nodes", "4"), "--nodes needs --tier"),
        ((MINISWE, "--no-planner"), "--planner needs --tier"),
        ((MINISWE, "--tier", "host=1GiB", "--capacity-tokens", "1M"), "--capacity-tokens is not available with --tier"),
        (
            (MINISWE, MINISWE, "--picture", "a.svg"),
            "--picture shows one replay, but there are 2 traces; use one, or --report",
        ),
        ((MINISWE, "--picture", "a.gif"), "has an unknown picture format; allowed: .svg or .png"),
        (
            (MINISWE, "--tier", "host=1GiB", "--policy", "lru,fifo", "--picture", "a.png"),
            "but there are 2 combinations of policies, nodes and routers; use one",
        ),
        (
            (MINISWE, "--tier", "host=1GiB", "--nodes", "1,x"),
            "--nodes '1,x' is not a list of numbers; allowed: whole numbers",
        ),
        (
            (MINISWE, "--tier", "host=1GiB", "--model", "falcon-mamba-7b"),
            "it keeps only states, which a replay does not",
        ),
        (
            (MINISWE, "--tier", "host=1GiB", "--policy", "lru,min"),
            "unknown eviction policy 'min'; allowed: adaptive, ",
        ),
    ],
)
def test_wrong_options_are_explained(capsys, arguments, message):
    code, out, err = replay(capsys, *arguments, "--jobs", "1")
    assert (code, out) == (2, "")
    assert message in err


def test_bad_traces_are_warned_of_and_refused_with_strict(capsys, tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    lines = [{"timestamp": it * 1000, "input_length": 128, "hash_ids": [it, 1]} for it in (5, 6, 4)]
    path.write_bytes(gzip.compress("\n".join(json.dumps(it) for it in lines).encode()))
    options = ("--capacity-tokens", "1k", "--policy", "lru", "--jobs", "1")
    _, out, err = replay(capsys, str(path), *options, "--json")
    assert json.loads(out)["prefix_violations"] == 2
    assert "2 blocks follow a different parent than before" in err
    code, out, err = replay(capsys, str(path), *options, "--strict")
    assert (code, out, "because of --strict" in err) == (2, "", True)
    csv = tmp_path / "azure.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert "has no blocks" in replay(capsys, str(csv), "--policy", "lru")[2]
    assert replay(capsys, "describe", str(csv))[0] == 0


@pytest.mark.slow
def test_a_class_makes_the_same_drive_larger(capsys):
    """`--loss` divides capacities, and the sizes and speeds of tiers below host memory, by the stored share."""
    given = (MINISWE, "--policy", "lru", "--jobs", "1", "--json")
    raw, int4 = (
        json.loads(replay(capsys, *given, "--capacity-tokens", "90k", "--loss", loss, "--model", "llama-3.1-8b")[1])
        for loss in ("none", "int4")
    )
    assert (raw["stored_share"], int4["stored_share"]) == (1, 0.294921875)
    assert [it["results"][0]["capacity_tokens"] for it in (raw, int4)] == [90_000, 305_165]
    assert int4["results"][0]["hit_tokens"] > raw["results"][0]["hit_tokens"]
    tiers = ("--tier", "host=4GiB", "--tier", "disk=9GB?read=3GB/s")
    raw, int4 = (json.loads(replay(capsys, *given, *tiers, "--loss", loss)[1]) for loss in ("none", "int4"))
    (host, disk), (same, larger) = raw["tiers"], int4["tiers"]
    assert (same["capacity_bytes"], larger["capacity_bytes"]) == (host["capacity_bytes"], 30_516_556_291)
    assert larger["hit_tokens"] + same["hit_tokens"] > disk["hit_tokens"] + host["hit_tokens"]
    assert {it["value"] for it in int4["inputs"] if it["what"] == "disk, reads"} == {"10.17 GB/s"}
    shown = replay(capsys, MINISWE, "--policy", "lru", "--loss", "int4", *tiers, "--jobs", "1")[1]
    assert "Bytes below host memory are those of raw KV." in " ".join(shown.split())
    assert replay(capsys, MINISWE, "--loss", "int3")[0] == 2
