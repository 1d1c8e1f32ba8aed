"""The demo's sums, words and report: right numbers, and a page that needs nothing else."""

import json
from dataclasses import replace

import pytest
from tests.tools.charts.test_report import check_page

from kvtier.tools.demo.report import demo_report, table
from kvtier.tools.demo.result import DemoResult, PassResult, RequestResult

HOSTILE = "<b>yes</b>\x1b[31m\x9b31m\u202e\nand so on"


def sample(
    turn, prompt_tokens, ttft_ms, restored=(), restorable_tokens=0, answer=(1, 2), margins=(0.5, 0.25), session=0
):
    return RequestResult(
        session=session,
        turn=turn,
        prompt_tokens=prompt_tokens,
        answer=answer,
        text=HOSTILE,
        ttft_ms=ttft_ms,
        total_ms=ttft_ms + 100,
        restored=dict(restored),
        restorable_tokens=restorable_tokens,
        margins=margins,
    )


NONE = PassResult(
    "none", (sample(0, 1000, 400.0), sample(1, 1500, 600.0), sample(0, 500, 200.0, session=1)), 1.0, 3.0, 0.0
)
COLD = PassResult(
    "cold",
    (sample(0, 1000, 440.0), sample(1, 1500, 100.0, {"host": 768}, 768), sample(0, 500, 220.0, session=1)),
    1.0,
    2.0,
    0.1,
    disk_bytes=2_500_000,
    written_bytes=2_500_000,
)
WARM = PassResult(
    "warm",
    (
        sample(0, 1000, 50.0, {"directory": 768}, 768, margins=(0.5, 0.2500001)),
        sample(1, 1500, 60.0, {"host": 768, "directory": 512}, 1280),
        sample(0, 500, 40.0, {"directory": 256}, 256, session=1),
    ),
    1.0,
    1.0,
    0.0,
    disk_bytes=2_500_000,
)
RESULT = DemoResult(
    model="a <small> model & more",
    why="it is small",
    weights="random",
    conversations="three requests",
    questions=("What is <this>?", "And that?", "exit code 0: no output"),
    shape={"hidden": 64},
    parameters=600_000,
    kv_bytes_per_token=512,
    seed=3,
    threads=2,
    chunk_tokens=256,
    new_tokens=2,
    passes=(NONE, COLD, WARM),
    elapsed_s=9.0,
    prepare_s=0.5,
    directory=None,
    machine={"processor": "a processor", "cores": 2, "memory_bytes": 8 * 10**9, "file_system": "ext4"},
    software={"python": "CPython 3.11", "kvtier": "0.1.0"},
)


def test_the_report_is_self_contained_escapes_text_and_lists_every_request():
    pytest.importorskip("matplotlib")
    text = demo_report(RESULT).html()
    check_page(text)
    assert text.count("<svg") == 2
    assert "a &lt;small&gt; model &amp; more" in text
    assert '<td class="name">1.2</td><td class="number">1,500</td><td class="number">600.0</td>' in text


def test_answers_in_words_are_shown_for_a_pretrained_model_only_and_cannot_control_a_terminal(capsys):
    assert "Questions and answers" not in demo_report(RESULT).html()
    result = replace(RESULT, weights="pretrained", seed=None)
    text = demo_report(result).html()
    check_page(text)
    assert "What is &lt;this&gt;?" in text
    assert "&lt;b&gt;yes&lt;/b&gt; [31m 31m and so on" in text
    demo_report(result).print()
    shown = capsys.readouterr().out
    assert "What is <this>? <b>yes</b> [31m 31m and so on 400 ms 440 ms 50 ms yes" in " ".join(shown.split())
    assert all(it.isprintable() or it == "\n" for it in shown)


def test_without_matplotlib_the_report_has_no_charts(monkeypatch):
    monkeypatch.setattr("kvtier.report.output.find_spec", lambda _name: None)
    text = demo_report(RESULT).html()
    check_page(text)
    assert "<svg" not in text
    assert "Charts need matplotlib" in text


def test_the_json_has_the_names_of_the_contract():
    plain = json.loads(json.dumps(RESULT.as_dict()))
    assert plain["identical"] is True
    assert RESULT.problems == []
    assert plain["weights"] == "random"
    assert plain["answers"][1] == {
        "session": 0, "turn": 1, "question": "And that?", "answer": HOSTILE, "identical": True,
        "ttft_ms": {"none": 600.0, "cold": 100.0, "warm": 60.0},
    }  # fmt: skip
    assert [it["name"] for it in plain["passes"]] == ["none", "cold", "warm"]
    assert plain["passes"][2].items() >= {
        "requests": 3, "input_tokens": 3000, "restored_tokens": 2304, "restorable_tokens": 2304,
        "computed_tokens": 696, "restored_by_tier": {"directory": 1536, "host": 768},
        "ttft_ms": {"p50": 50.0, "p95": 59.0}, "wall_s": 1.0,
    }.items()  # fmt: skip
    assert plain["speed_up_ttft_p50"] == {"cold": 1.82, "warm": 8.0}
    assert plain["miss_cost"] == {"ttft_ratio_p50": 1.1, "requests": 2}
    assert (plain["closest_choice"], plain["rounding"]) == (0.25, pytest.approx(1e-7))


def with_second(**fields):
    """The result with another second request in the warm pass."""
    first, second, *others = WARM.samples
    return replace(RESULT, passes=(NONE, COLD, replace(WARM, samples=(first, replace(second, **fields), *others))))


def test_a_different_answer_is_found_and_named():
    result = with_second(answer=(1, 3))
    assert result.difference.margin == 0.25
    assert (
        "the answers of passes none and warm in turn 2 of conversation 1 differ from token 1 on" in result.problems[0]
    )
    assert 'class="bad">not identical' in demo_report(result).html()
    assert "NO" in table(result).rows[-1]
    assert [it["identical"] for it in result.as_dict()["answers"]] == [True, False, True]
    assert with_second(answer=(1,)).difference.token == 1  # it was cut short


def test_too_little_restored_is_a_problem_even_with_the_same_answers():
    result = with_second(restored={"host": 512})
    assert result.difference is None
    assert "restored 1,536 of 2,304 restorable tokens (66.7%)" in result.problems[0]


def test_the_table_has_a_column_for_each_pass_and_a_row_for_each_tier():
    shown = table(RESULT)
    assert shown.columns == ("", "none", "cold", "warm")
    assert {row[0]: list(row[1:]) for row in shown.rows}.items() >= {
        "tokens from disk": ["0", "0", "1,536"],
        "tokens from host memory": ["0", "768", "768"],
        "hit rate, of tokens": ["0.0%", "25.6%", "76.8%"],
        "bytes on disk": ["0 B", "2.5 MB", "2.5 MB"],
        "same tokens as the first pass": ["-", "yes", "yes"],
    }.items()
