"""`kvtier trace advise` finds planted cuts, heads and orders, and nothing in traces that only append."""

import gzip
import json
import re
from pathlib import Path

import pytest
from tests.tools.charts.test_report import check_page
from tests.traces import MAGAGENT, MINISWE, TRACES

from kvtier.cli.main import run
from kvtier.tools.trace.formats.prompt_lines import _PIECES

CLAUDE_CODE = TRACES / "claude_code_17sessions.jsonl.gz"
COMPONENTS = TRACES / "components"
TEXTS = Path(__file__).parents[3] / "src/kvtier/tools/demo/data/lmcache_miniswe_text_12sessions.jsonl.gz"
BLOCK = 64


def written(path, rows):
    path.write_text("".join(f"{json.dumps(it)}\n" for it in rows))
    return path


def advised(capsys, *args):
    assert run(["trace", "advise", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def printed(capsys, *args):
    assert run(["trace", "advise", *map(str, args)]) == 0
    return capsys.readouterr().out


def requests(prompts, sessions=None):
    """Request lines of blocks, one second apart."""
    for number, ids in enumerate(prompts):
        line = {"timestamp": 1000 * number, "input_length": BLOCK * len(ids), "output_length": 9, "hash_ids": ids}
        line |= {"block_size": BLOCK} if number == 0 else {}
        yield line if sessions is None else line | {"session_id": sessions[number]}


def chained(prompts):
    """Return prompts of contents with ids that name whole prefixes."""
    numbers = {}
    return [
        [numbers.setdefault(tuple(it[: n + 1]), len(numbers)) for n in range(len(it))] for it in map(tuple, prompts)
    ]


def texts(is_stamped, has_sessions=True, place=50):
    with gzip.open(TEXTS, "rt") as file:
        for number, row in enumerate(map(json.loads, file)):
            tokens = _PIECES.findall(row["input"])
            stamp = f"\nIt is {number // 60 + 1:02}:{number % 60:02} now.\n" if is_stamped else ""
            row["input"] = "".join((*tokens[:place], stamp, *tokens[place:]))
            if not has_sessions:
                del row["session_id"]
            yield row


def expected_cuts(path):
    """Cuts and lost tokens of session lines, counted from the file alone: requests of one agent and one model."""
    cuts = lost = 0
    with gzip.open(path, "rt") as file:
        for session in map(json.loads, file):
            before, seen = None, set()
            for request in (it for it in session["requests"] if "requests" not in it):
                ids = [first + n for first, count in request["hash_runs"] for n in range(count)]
                if before is not None and request.get("model") == before[1]:
                    last = before[0]
                    shared = next((n for n, it in enumerate(zip(ids, last, strict=False)) if it[0] != it[1]), 0)
                    shared = shared or (min(len(ids), len(last)) if ids[:1] == last[:1] else 0)
                    hit = next((n for n, it in enumerate(ids) if it not in seen), len(ids))
                    is_similar = 0.8 <= len(ids) / len(last) <= 1.25
                    if len(last) - shared > 2 and is_similar and shared / len(last) < 0.5:
                        cuts += 1
                        lost += BLOCK * max(0, min(len(ids) - max(hit, shared), len(last) - shared))
                seen.update(ids)
                before = ids, request.get("model")
    return cuts, lost


def test_early_cuts_of_claude_code_are_those_that_the_file_has(capsys):
    cuts = advised(capsys, CLAUDE_CODE)["early_cuts"]
    assert (cuts["count"], cuts["tokens"]) == expected_cuts(CLAUDE_CODE) == (6, 213_952)
    assert cuts["share_of_misses"] == pytest.approx(0.0601, abs=1e-4)
    assert all(10_000 < it < 20_000 for it in cuts["at_tokens"])
    assert printed(capsys, CLAUDE_CODE).startswith(
        "Moving what changes near token 14,720 to the end would save up to 6.0%"
    )


@pytest.mark.parametrize("has_sessions", [True, False])
def test_a_time_stamp_near_the_start_of_prompts_is_found_first_with_its_line(tmp_path, capsys, has_sessions):
    path = written(tmp_path / "stamped.jsonl", texts(is_stamped=True, has_sessions=has_sessions))
    found = advised(capsys, path)
    cuts, rest = found["early_cuts"], (found["heads"], found["bound"])
    assert cuts["is_certain"]
    assert cuts["count"] > 100
    assert cuts["share_of_misses"] > 0.8 > 0.2 > max(it["share_of_misses"] for it in rest)
    assert 50 <= min(cuts["at_tokens"]) <= max(cuts["at_tokens"]) < 60
    for it in cuts["examples"]:
        assert re.fullmatch(r"It is \d\d:\d\d now\.", it["before"])
        assert it["before"] != it["after"]
    out = " ".join(printed(capsys, path).split())
    assert re.match(r"Moving what changes near token 5\d to the end would save up to 8\d\.\d% of all misses\.", out)
    assert cuts["examples"][0]["after"] in out


def test_a_time_stamp_at_the_first_token_is_found_without_sessions(tmp_path, capsys):
    path = written(tmp_path / "stamped.jsonl", texts(is_stamped=True, has_sessions=False, place=0))
    cuts = advised(capsys, path)["early_cuts"]
    assert cuts["share_of_misses"] > 0.8
    assert max(cuts["at_tokens"]) < 10


@pytest.mark.parametrize("has_sessions", [True, False])
def test_the_same_prompts_without_a_time_stamp_raise_no_alarm(tmp_path, capsys, has_sessions):
    path = written(tmp_path / "texts.jsonl", texts(is_stamped=False, has_sessions=has_sessions))
    found = advised(capsys, path)
    assert (found["early_cuts"]["count"], found["heads"]["count"]) == (0, 0)
    assert found["order"] == {"as_sent": None, "best_online": None, "moves": []}
    assert found["bound"]["is_measured"]
    assert found["bound"]["share_of_tokens"] == pytest.approx(0.040, abs=0.002)
    assert printed(capsys, path).startswith("No change of layout saves 1% of the misses. Reuse without a common prefix")


@pytest.mark.parametrize("path", [MINISWE, TRACES / "taubench_airline_b64.jsonl.gz"])
def test_agents_that_only_append_raise_no_alarm(path, capsys):
    found = advised(capsys, path)
    assert (found["early_cuts"]["count"], found["heads"]["count"]) == (0, 0)
    assert not found["bound"]["is_measured"]
    assert found["bound"]["share_of_misses"] == 1
    assert printed(capsys, path).startswith("No change of layout is known")


def test_a_cut_needs_the_same_model_a_similar_length_and_an_early_place(tmp_path, capsys):
    def cuts(first, second, models=("m", "m")):
        prompts = zip((first, second), models, strict=True)
        lines = [
            {"t": n, "type": "n", "model": model, "in": BLOCK * len(ids), "out": 1, "hash_ids": ids}
            for n, (ids, model) in enumerate(prompts)
        ]
        path = written(tmp_path / "t.jsonl", [{"id": "s", "block_size": BLOCK, "requests": lines}])
        return advised(capsys, path)["early_cuts"]

    found = cuts([*range(100)], [*range(10), *range(200, 300)])
    assert (found["count"], found["tokens"], found["sessions"]) == (1, 90 * BLOCK, 1)
    assert found["at_tokens"] == [10 * BLOCK] * 5
    assert cuts([*range(100)], [*range(10), *range(200, 300)], ("m", "another"))["count"] == 0
    assert cuts([*range(100)], [*range(10), *range(200, 320)])["count"] == 0  # longer
    assert cuts([*range(100)], [*range(10), *range(200, 260)])["count"] == 0  # shorter
    assert cuts([*range(100)], [*range(50), *range(200, 250)])["count"] == 0  # late


def test_a_prompt_of_the_same_length_with_another_text_is_no_cut(tmp_path, capsys):
    def cuts(second):
        first = "the same head of two prompts, " * 9 + " ".join(map(str, range(3000, 4000)))
        rows = [{"timestamp": n, "input": text, "session_id": 1} for n, text in enumerate((first, second(first)))]
        return advised(capsys, written(tmp_path / "t.jsonl", rows))["early_cuts"]["count"]

    assert cuts(lambda first: first.replace("two prompts, 3000", "two prompts, at ten, 3000")) == 1
    assert cuts(lambda first: first[:280] + " ".join(map(str, range(5000, 6000)))) == 0


def heads_of(turns=12, agents=3, sessions=4):
    """Prompts of agents that put heads of their own before one transcript of two blocks a turn, and their sessions."""
    for session in range(sessions):
        for turn in range(turns):
            transcript = [1000 * (session + 1) + it for it in range(2 * turn + 2)]
            yield [turn % agents, *transcript], f"s{session}"


def test_one_text_behind_several_heads_is_found_with_any_ids(tmp_path, capsys):
    prompts, sessions = zip(*heads_of(), strict=True)
    by_prefix = written(tmp_path / "prefixes.jsonl", requests(chained(prompts), sessions))
    by_content = written(tmp_path / "contents.jsonl", requests(prompts, sessions))
    for path, is_measured in ((by_prefix, False), (by_content, True)):
        found = advised(capsys, path)
        assert found["heads"]["heads"] == 3
        assert found["heads"]["is_measured"] is is_measured
        assert found["heads"]["share_of_misses"] > 0.5 > found["bound"]["share_of_misses"]
        assert found["early_cuts"]["share_of_misses"] < 0.1
    assert printed(capsys, by_prefix).startswith("Moving 3 heads behind the text that they share would save up to")
    # Negative control: one head.
    prompts, sessions = zip(*heads_of(agents=1), strict=True)
    found = advised(capsys, written(tmp_path / "one.jsonl", requests(chained(prompts), sessions)))
    assert (found["heads"]["heads"], found["heads"]["tokens"], found["early_cuts"]["count"]) == (0, 0, 0)


def test_magagent_has_one_transcript_behind_three_heads(capsys):
    found = advised(capsys, MAGAGENT)
    assert found["heads"]["heads"] == 3
    assert found["heads"]["share_of_misses"] == pytest.approx(0.491, abs=0.001)
    assert found["early_cuts"]["count"] == 3
    assert "The ids name whole prefixes" in " ".join(printed(capsys, MAGAGENT).split())


def test_components_that_change_go_last_and_frequent_passages_first(capsys):
    found = advised(capsys, COMPONENTS)["order"]
    total = 12 * 1480
    # A user's own part of the system prompt stands before the passages, so only its second use finds it: 692 tokens.
    assert found["as_sent"] == pytest.approx((5 * 7 + 6 * 10) * BLOCK / total)
    assert {it[0] for it in found["moves"]} == {"passages_ids by frequency", "sys_prompt 2 to the end"}
    # Two passages are in all prompts, which the first cannot know. With one of four others, 1,268 tokens are found.
    assert found["best_online"] == pytest.approx((7 + 3 * 15 + 7 * 19) * BLOCK / total)
    assert printed(capsys, COMPONENTS).startswith("Moving")


def test_the_parts_of_texts_stand_between_separators(tmp_path, capsys):
    words = "the quick brown fox jumps over a lazy dog while it rains "
    parts = [(f"It is {n:02} o'clock. ", words * 20, f"question {n} " * 5) for n in range(10)]
    rows = [{"timestamp": 1000 * n, "input": "\n--\n".join(it), "session_id": n} for n, it in enumerate(parts)]
    path = written(tmp_path / "parts.jsonl", rows)
    found = advised(capsys, path, "--separator", r"\n--\n", "--block", "16")["order"]
    assert found["as_sent"] == 0
    assert found["best_online"] == pytest.approx(0.9 * 0.93, abs=0.05)
    assert [it[0] for it in found["moves"]] == ["part 1 to the end"]
    # Negative control: the stamp is last already.
    rows = [
        it | {"input": f"{text}\n--\n{stamp}\n--\n{question}"}
        for it, (stamp, text, question) in zip(rows, parts, strict=True)
    ]
    found = advised(capsys, written(path, rows), "--separator", r"\n--\n", "--block", "16")["order"]
    assert found["moves"] == []
    assert found["as_sent"] == found["best_online"] > 0.7


def test_larger_chunks_lose_the_rest_of_each_hit(tmp_path, capsys):
    path = written(tmp_path / "t.jsonl", requests([[*range(7)], [*range(7), 8]]))
    hits = [7, 6, 4, 0, 0]
    expected = [[BLOCK << n, hit / 15] for n, hit in enumerate(hits)]
    assert advised(capsys, path)["chunks"] == [pytest.approx(it) for it in expected]


def test_without_sessions_prefix_ids_give_no_certain_cut(tmp_path, capsys):
    prompts = [[*range(10), *range(100 * n, 100 * n + 90)] for n in range(1, 9)]
    path = written(tmp_path / "t.jsonl", requests(chained(prompts)))
    found = advised(capsys, path)["early_cuts"]
    assert (found["count"], found["is_certain"]) == (7, False)
    out = printed(capsys, path)
    assert out.startswith("No change of layout is known")
    assert "may be other conversations" in " ".join(out.split())


def test_the_json_has_the_documented_fields_and_the_page_a_chart(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "advice.html"
    found = advised(capsys, CLAUDE_CODE, "--report", page)
    cost = {"count", "share_of_tokens", "share_of_misses"}
    assert cost <= found["early_cuts"].keys()
    assert cost | {"heads"} <= found["heads"].keys()
    assert {"as_sent", "best_online"} <= found["order"].keys()
    assert "share_of_tokens" in found["bound"]
    check_page(page.read_text())
    assert page.read_text().count("<svg") == 1
    assert "Where early cuts lie" in page.read_text()


def test_a_trace_without_blocks_is_refused(tmp_path, capsys):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert run(["trace", "advise", str(path)]) == 2
    assert "has no blocks" in capsys.readouterr().err


def planned(tmp_path, **fields):
    """Output of `kvtier plan --json`: a token costs a millisecond of a GPU, at 18 EUR an hour."""
    inputs = {"price.currency": {"value": "EUR", "from": "default", "help": ""}}
    plan = {"prefill_gpu_s_per_token": 0.001, "price_per_gpu_hour": 18, "inputs": inputs, "model": "m"}
    (tmp_path / "plan.json").write_text(json.dumps(plan | fields))
    return tmp_path / "plan.json"


def cut_trace(tmp_path):
    """Two requests of one session; the second is cut after 10 of 100 blocks, which costs 90 * 64 = 5,760 tokens."""
    return written(tmp_path / "t.jsonl", requests([[*range(100)], [*range(10), *range(200, 290)]], ["s", "s"]))


def test_with_a_plan_each_change_has_gpu_seconds_and_a_cost(tmp_path, capsys):
    trace = cut_trace(tmp_path)
    found = advised(capsys, trace, "--plan", planned(tmp_path))
    assert found["plan"] == {"gpu_s_per_token": 0.001, "price_per_gpu_hour": 18, "currency": "EUR"}
    cuts, rest = found["savings"]
    assert (cuts["change"], cuts["tokens"]) == ("early cuts", 5760)
    assert (cuts["gpu_s"], cuts["cost"]) == (pytest.approx(5.76), pytest.approx(5.76 / 3600 * 18))
    assert (rest["change"], rest["tokens"]) == ("no prefix", found["bound"]["tokens"])
    assert rest["gpu_s"] == pytest.approx(rest["tokens"] / 1000)
    out = printed(capsys, trace, "--plan", planned(tmp_path))
    assert re.search(r"of all misses  GPU seconds +cost\n.* 5\.76k .* 5\.76 +0\.0288\n", out)
    assert "Costs are in EUR." in out
    assert (
        run(["trace", "advise", str(trace), "--plan", str(planned(tmp_path)), "--report", str(tmp_path / "r.html")])
        == 0
    )
    assert "GPU seconds" in (tmp_path / "r.html").read_text()


def test_a_plan_without_prices_gives_gpu_seconds_and_no_plan_gives_neither(tmp_path, capsys):
    trace, plan = cut_trace(tmp_path), planned(tmp_path, price_per_gpu_hour=None)
    assert [it["cost"] for it in advised(capsys, trace, "--plan", plan)["savings"]] == [None, None]
    assert re.search(r" 5\.76 +-\n", printed(capsys, trace, "--plan", plan))
    found = advised(capsys, trace)
    assert found.keys().isdisjoint({"plan", "savings"})
    out = printed(capsys, trace)
    assert "GPU seconds" not in out
    assert "Costs are in" not in out


@pytest.mark.parametrize(
    "fields",
    [
        {"prefill_gpu_s_per_token": None},
        {"prefill_gpu_s_per_token": "0.001"},
        {"prefill_gpu_s_per_token": 0},
        {"prefill_gpu_s_per_token": float("nan")},
        {"price_per_gpu_hour": "1"},
        {"price_per_gpu_hour": -1},
        {"inputs": {}},
        {"inputs": []},
        {"inputs": {"price.currency": {"value": 1}}},
    ],
)
def test_a_plan_with_other_values_is_refused_before_the_trace_is_read(tmp_path, capsys, fields):
    assert run(["trace", "advise", "none.jsonl", "--plan", str(planned(tmp_path, **fields))]) == 2
    assert "plan.json': is not a plan; allowed: the output of `kvtier plan MODEL --json`" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"[]", b"3", b"{}", b"\xff", b"# a text", b"[" * 100_000, None])
def test_a_file_that_is_no_plan_is_refused(tmp_path, capsys, content):
    path = tmp_path / "plan"
    if content is not None:
        path.write_bytes(content)
    assert run(["trace", "advise", str(cut_trace(tmp_path)), "--plan", str(path)]) == 2
    assert "--plan" in capsys.readouterr().err


def test_the_directory_of_a_plan_is_refused(tmp_path, capsys):
    assert run(["trace", "advise", str(cut_trace(tmp_path)), "--plan", str(tmp_path)]) == 2
    assert "is not a plan" in capsys.readouterr().err
