"""Traces: measurements equal a slow count and do not depend on the format; errors name the line."""

import gzip
import json
import random
import re
from collections import Counter

import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.plan.plan import make_plan
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.resolve import resolve
from kvtier.tools.plan.trace import read_trace

BLOCK = 64
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    *(f"2023-11-16 18:15:{second:02}.6805900,{1000 + second},100" for second in range(60)),
)


def conversations(seed, sessions=40):
    """Requests by time, as (seconds, prompt tokens, answer tokens, ids), with growing prefixes."""
    rng = random.Random(seed)
    requests, next_id = [], 1000
    for _ in range(sessions):
        time = rng.uniform(0, 600)
        ids = list(range(2)) if rng.random() < 0.7 else []  # a shared prefix
        for _ in range(rng.randint(1, 8)):
            grown = rng.randint(1, 12)
            ids = [*ids, *range(next_id, next_id + grown)]
            next_id += grown
            tokens = (len(ids) - 1) * BLOCK + rng.randint(1, BLOCK)
            requests.append((round(time, 3), tokens, rng.randint(1, 50), list(ids)))
            time += rng.lognormvariate(2, 1)
    return sorted(requests)


def as_lines(requests, *, runs=False):
    for time, tokens, answer, ids in requests:
        line = {"timestamp": time * 1000, "input_length": tokens, "output_length": answer}
        if runs:
            line["hash_runs"] = [[it, 1] for it in ids]
        else:
            line["hash_ids"] = ids
        yield json.dumps(line)


def written(path, lines):
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def slow_count(requests, residence_s):
    """Hits in tokens when each block stays for `residence_s` after its last use, and token-seconds held."""
    last, found, reused, held = {}, 0, 0, 0.0
    for time, tokens, _, ids in requests:
        for place, block in enumerate(ids):
            size = min(BLOCK, tokens - place * BLOCK)
            if block in last:
                pause = time - last[block]
                reused += size
                found += size if pause <= residence_s else 0
                held += size * min(pause, residence_s)
            else:
                held += size * residence_s  # after the last use of the block, see below
            last[block] = time
    return found, reused, held


@pytest.fixture(params=[1, 2, 3])
def requests(request):
    return conversations(request.param)


def test_hits_and_occupation_equal_a_slow_count(tmp_path, requests):
    summary = read_trace(written(tmp_path / "trace.jsonl", as_lines(requests)), 1.0)
    assert summary.requests == len(requests)
    assert summary.input_tokens == pytest.approx(sum(it[1] for it in requests) / len(requests))
    assert summary.output_tokens == pytest.approx(sum(it[2] for it in requests) / len(requests))
    assert "blocks of 64 tokens" in summary.notes[0]
    assert summary.longest_tokens == max(it[1] + it[2] for it in requests)
    uses = Counter(block for it in requests for block in it[3])
    assert summary.kept_share == pytest.approx(sum(count > 1 for count in uses.values()) / len(uses))
    for residence_s in summary.curve.residence_s[20:200:15]:  # at the edges of its buckets the curve is exact
        found, reused, held = slow_count(requests, residence_s)
        assert summary.reusable_tokens * len(requests) == pytest.approx(reused)
        assert summary.curve.found_within(residence_s) == pytest.approx(found / reused)
        assert summary.curve.tokens_held(residence_s, 1.0) == pytest.approx(held / len(requests))


def test_runs_and_ids_plain_and_gzip_give_the_same_summary(tmp_path, requests):
    plain = read_trace(written(tmp_path / "plain.jsonl", as_lines(requests)), 1.0)
    packed = read_trace(written(tmp_path / "packed.jsonl.gz", as_lines(requests, runs=True)), 1.0)
    assert packed.curve == plain.curve
    assert (packed.burst, packed.first_share, packed.duration_s) == (plain.burst, plain.first_share, plain.duration_s)


def test_sessions_have_ids_of_their_own_and_sub_agents_their_own_clock(tmp_path):
    session = {
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 128, "out": 5, "hash_runs": [[1, 2]]},
            {"t": 50.0, "requests": [{"t": 10.0, "in": 192, "out": 5, "hash_runs": [[1, 3]]}]},
        ],
    }
    lines = [json.dumps(session)] * 3
    summary = read_trace(written(tmp_path / "sessions.jsonl", lines), 900.0)
    assert (summary.requests, summary.duration_s) == (6, 900.0)
    assert summary.first_share == 0.5  # the second and third session find nothing of the first
    assert summary.reusable_tokens == 128 * 3 / 6
    assert summary.curve.found_within(58.0) == 0.0
    assert summary.curve.found_within(65.0) == 1.0  # 60 s, in the bucket from 58.7 to 64


def test_a_csv_has_arrivals_and_lengths_and_needs_the_reuse(tmp_path):
    path = written(tmp_path / "trace.csv", AZURE)
    summary = read_trace(path, 1.0)
    assert (summary.requests, summary.input_tokens, summary.duration_s) == (60, 1029.5, 59.0)
    assert summary.curve is None
    with pytest.raises(ConfigError, match=r"no block ids, so its reuse is unknown; set traffic\.reuse"):
        make_plan(load(options={"model.name": "llama-3.1-8b", "traffic.trace": str(path)}))
    assert any("--time-unit has no effect" in note for note in read_trace(path, 1.0, "s").notes)
    inputs = load(options={"model.name": "llama-3.1-8b", "traffic.trace": str(path), "traffic.reuse": "0.5"})
    demand = make_plan(inputs, with_sensitivities=False).deployment.workload
    assert (demand.reuse, demand.requests_per_s) == (pytest.approx(0.5), pytest.approx(60 / 59))


@pytest.mark.parametrize("traffic", ["blocks", "lengths"])
def test_an_option_of_other_traffic_is_refused_by_name_but_not_in_a_file(tmp_path, traffic):
    """A trace without block ids needs turns and pauses, one with them has its own."""
    trace = {
        "blocks": written(tmp_path / "trace.jsonl", as_lines(conversations(1))),
        "lengths": written(tmp_path / "trace.csv", AZURE),
    }[traffic]
    options = {"model.name": "llama-3.1-8b", "traffic.trace": str(trace), "traffic.reuse": "0.5"}
    kinds = {"users": [], "history_tokens": [], "answer_tokens": [], "turns": ["lengths"], "interval_s": ["lengths"]}
    kinds |= {key: ["blocks", "lengths"] for key in ("arrivals_cv2", "load", "trace_window_s")}
    for key, used in kinds.items():
        site = written(tmp_path / "site.toml", ["[traffic]", f"{key} = 3"])
        resolve(load(options=options, file=site))
        given = load(options=options, sets=[f"traffic.{key}=3"])
        if traffic in used:
            resolve(given)
        else:
            with pytest.raises(
                ConfigError, match=rf"^--set traffic\.{key} has no effect, because trace .* gives the traffic"
            ):
                resolve(given)


@pytest.mark.parametrize(("traffic", "advice"), [("blocks", "a trace of shorter prompts"), ("inputs", "fewer turns")])
def test_what_a_prompt_beyond_the_context_is_told_can_be_done(tmp_path, traffic, advice):
    lines = as_lines([(time, 200_000, 5, list(range(3125))) for time in (0, 10)])
    trace = str(written(tmp_path / "trace.jsonl", lines)) if traffic == "blocks" else ""
    inputs = load(
        options={"model.name": "llama-3.1-8b", "traffic.trace": trace},
        file=written(tmp_path / "site.toml", ["[traffic]", "history_tokens = 200_000"]),
    )
    with pytest.raises(ConfigError, match=f"llama-3.1-8b allows at most 131,072; use {advice}"):
        resolve(inputs)


def test_a_plan_of_a_trace_is_in_queries_and_grows_with_its_load(tmp_path, requests):
    path = written(tmp_path / "trace.jsonl", as_lines(requests))
    once, twice = (
        make_plan(
            load(options={"model.name": "llama-3.1-8b", "traffic.trace": str(path), "traffic.load": times}),
            with_sensitivities=False,
        )
        for times in (1.0, 2.0)
    )
    assert twice.requested_users == pytest.approx(2 * once.requested_users)
    assert twice.tiered.users_at_ttft == pytest.approx(once.tiered.users_at_ttft)
    assert once.deployment.workload.reuse == pytest.approx(
        slow_count(requests, 1e9)[1] / sum(tokens for _, tokens, _, _ in requests)
    )


def test_plan_and_replay_have_one_rule_for_times(tmp_path, capsys):
    times = [(place * 0.355, 141, 20, [place]) for place in range(2000)]
    lines = list(as_lines([(time / 1000, *rest) for time, *rest in times]))  # in seconds
    path, plan = written(tmp_path / "seconds.jsonl", lines), ["plan", "llama-3.1-8b", "--trace"]
    told = []
    for command in ([*plan, str(path)], ["replay", "describe", str(path)]):
        assert run(command) == 0
        told.append(capsys.readouterr().err)
    assert told[0] == told[1]
    assert f"kvtier: trace {path}: timestamps look like seconds, not milliseconds" in told[0]
    assert run([*plan, str(path), "--time-unit", "s"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("2.82 queries/s fit on 8 x h100-sxm")
    parents = [json.dumps(json.loads(line) | {"chat_id": n, "parent_chat_id": -1}) for n, line in enumerate(lines)]
    assert run([*plan, str(written(tmp_path / "chats.jsonl", parents))]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.startswith("2.82 queries/s fit on 8 x h100-sxm")
    assert run([*plan, str(path), "--time-unit", "h"]) == 2
    assert "'h' (from --time-unit)" in capsys.readouterr().err


GOOD = {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "is empty"),
        (["[1, 2]"], "batch 1: events is 2"),
        (["{"], "line 1: not JSON: Expecting"),
        (['{"a": 1}'], "line 1: unknown form"),
        ([json.dumps(GOOD)], "1 requests; allowed: at least 2"),
        ([json.dumps(GOOD), json.dumps(GOOD)], "at different times"),
        ([json.dumps(GOOD), '{"timestamp": 1, "hash_ids": [1]}'], "line 2: 'input_length' is missing"),
        ([json.dumps(GOOD), "not json"], "line 2"),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"timestamp": 5, "hash_ids": [1.5]})],
            "line 2: hash_ids holds 1.5",
        ),
        (
            [json.dumps(GOOD), json.dumps(GOOD | {"timestamp": "soon"})],
            "line 2: timestamp is 'soon'; allowed: a number",
        ),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, lines, why):
    with pytest.raises(ConfigError, match=why):
        read_trace(written(tmp_path / "bad.jsonl", lines), 1.0)


def test_decreasing_times_are_noted_and_ids_may_be_any_integers(tmp_path):
    names = [{"hash_ids": [10**12, "a"]}, {"hash_ids": [10**12, "b"], "timestamp": 9000}, {"timestamp": 5}]
    summary = read_trace(written(tmp_path / "trace", [json.dumps(GOOD | it) for it in names]), 1.0)
    assert any("1 timestamps go back, first in line 3" in note for note in summary.notes)
    assert summary.reusable_tokens > 0


def test_a_missing_or_truncated_file_is_refused(tmp_path, requests):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nosuch.jsonl", 1.0)
    whole = written(tmp_path / "whole.jsonl.gz", as_lines(requests)).read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="not a trace"):
        read_trace(tmp_path / "cut.jsonl.gz", 1.0)


@pytest.mark.parametrize("example", [[], ["--example", "prices"]])
def test_a_page_of_queries_names_no_users(capsys, tmp_path, example):
    """It had the power and the price of a user, and a table of users by size."""
    path = written(tmp_path / "trace.jsonl", as_lines(conversations(5)))
    assert run(["plan", "llama-3.1-8b", "--gpu", "2xh100-sxm", "--trace", str(path), *example]) == 0
    text = capsys.readouterr().out.partition("Settings of kvtier")[0].replace(str(path), "")
    assert "queries/s by size" in text.lower()
    assert re.findall(r"\w*\W*\busers?\b", text) == []
    assert "power of a query/s, W" in text
    assert ("price of a query/s" in text) == bool(example)
