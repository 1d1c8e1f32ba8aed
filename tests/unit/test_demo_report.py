"""The demo's sums, words and report: right numbers, and a page that needs nothing else."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from kvtier.bench.demo_chart import round_step, ttft_by_turn
from kvtier.bench.demo_report import render_report, write_report
from kvtier.bench.demo_result import DemoResult, Pass, Sample
from kvtier.bench.demo_summary import conditions, gigabytes, headline, milliseconds, problems, table
from kvtier.errors import ConfigError

WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def sample(
    turn, prompt_tokens, ttft_ms, restored=(), restorable_tokens=0, answer=(1, 2), margins=(0.5, 0.25), session=0
):
    return Sample(
        session=session,
        turn=turn,
        prompt_tokens=prompt_tokens,
        answer=answer,
        ttft_ms=ttft_ms,
        total_ms=ttft_ms + 100,
        restored=dict(restored),
        restorable_tokens=restorable_tokens,
        margins=margins,
    )


NONE = Pass("none", (sample(0, 1000, 400.0), sample(1, 1500, 600.0), sample(0, 500, 200.0, session=1)), 1.0, 3.0, 0.0)
COLD = Pass(
    "cold",
    (sample(0, 1000, 440.0), sample(1, 1500, 100.0, {"host": 768}, 768), sample(0, 500, 220.0, session=1)),
    1.0,
    2.0,
    0.1,
    disk_bytes=2_500_000,
    written_bytes=2_500_000,
)
WARM = Pass(
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
    conversations="three requests",
    shape={"hidden": 64},
    parameters=600_000,
    kv_bytes_per_token=512,
    seed=3,
    threads=2,
    chunk_tokens=256,
    new_tokens=2,
    passes=(NONE, COLD, WARM),
    elapsed_s=9.0,
    tokenizer_s=0.5,
    directory=None,
    machine={"processor": "a processor", "cores": 2, "memory_bytes": 8 * 10**9, "file_system": "ext4"},
    software={"python": "CPython 3.11", "kvtier": "0.1.0"},
)


class Page(HTMLParser):
    """Collects what a browser would fetch or run, and whether every element is closed."""

    EMPTY = ("meta", "br", "img", "link", "hr", "input")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.addresses, self.handlers = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_self_contained_and_well_formed():
    text = render_report(RESULT, WHEN)
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.addresses == []
    assert page.handlers == []
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert page.tags.count("svg") == 3


def test_the_report_escapes_what_it_is_told():
    text = render_report(RESULT, WHEN)
    assert "a &lt;small&gt; model &amp; more" in text
    assert "<small>" not in text


def test_the_report_has_colours_for_both_kinds_of_screen():
    assert "prefers-color-scheme:dark" in render_report(RESULT, WHEN)


def test_the_report_shows_every_request_of_every_pass():
    text = render_report(RESULT, WHEN)
    assert text.count("<circle ") == 9
    assert len(re.findall(r"<rect [^>]*><title>(none|cold|warm): conversation", text)) == 9
    assert text.count("<title>none: conversation 1, turn 2: 600 ms; 1,500 prompt tokens, 0 restored</title>") == 2
    assert "<td>1.2</td><td>1,500</td><td>600.0</td>" in text


def test_the_report_is_written_whole_or_refused(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, RESULT)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [it.name for it in path.parent.iterdir()] == ["report.html"]
    with pytest.raises(ConfigError, match=r"--report .* cannot be written"):
        write_report(path / "below-a-file.html", RESULT)


def test_the_curve_goes_through_the_median_of_each_turn():
    drawn = ttft_by_turn([NONE])
    points = re.search(r'<polyline class="pass-none line" points="([^"]+)"', drawn)[1].split()
    heights = [float(point.split(",")[1]) for point in points]
    # Turn 1: 400 and 200 ms, so 300; turn 2: 600 ms. The axis begins at 380 - 64 for 0 ms and grows upwards.
    assert len(heights) == 2
    assert (316 - heights[1]) / (316 - heights[0]) == pytest.approx(2.0, rel=1e-2)


@pytest.mark.parametrize(
    ("least", "step"), [(0.0, 1), (1, 1), (1.01, 2), (210, 250), (260, 500), (51, 100), (0.03, 0.05)]
)
def test_axes_have_round_numbers(least, step):
    assert round_step(least) == pytest.approx(step)


def test_the_json_has_the_names_of_the_contract():
    plain = json.loads(json.dumps(RESULT.as_dict()))
    assert plain["identical"] is True
    assert [it["name"] for it in plain["passes"]] == ["none", "cold", "warm"]
    warm = plain["passes"][2]
    assert (warm["requests"], warm["input_tokens"]) == (3, 3000)
    assert (warm["restored_tokens"], warm["restorable_tokens"], warm["computed_tokens"]) == (2304, 2304, 696)
    assert warm["restored_by_tier"] == {"directory": 1536, "host": 768}
    assert warm["ttft_ms"] == {"p50": 50.0, "p95": 59.0}
    assert warm["wall_s"] == 1.0
    assert plain["speed_up_ttft_p50"] == {"cold": 1.82, "warm": 8.0}
    assert plain["miss_cost"] == {"ttft_ratio_p50": 1.1, "requests": 2}
    assert plain["closest_choice"] == 0.25
    assert plain["rounding"] == pytest.approx(1e-7)


def test_a_different_answer_is_found_and_named():
    other = replace(WARM.samples[1], answer=(1, 3))
    result = replace(RESULT, passes=(NONE, COLD, replace(WARM, samples=(WARM.samples[0], other, WARM.samples[2]))))
    assert not result.is_identical
    assert not result.is_good
    assert result.difference.margin == 0.25
    assert "passes none and warm differ from token 1 of the answer in turn 2 of conversation 1" in problems(result)[0]
    assert "BUT THE ANSWERS DIFFER" in headline(result)
    assert 'class="bad">different' in render_report(result, WHEN)
    assert "NO" in table(result)[1][-1]


def test_an_answer_cut_short_is_a_difference_too():
    result = replace(
        RESULT, passes=(NONE, replace(COLD, samples=(sample(0, 1000, 1.0, answer=(1,)), *COLD.samples[1:])))
    )
    assert result.difference.token == 1


def test_too_little_restored_is_a_problem_even_with_the_same_answers():
    poor = replace(WARM.samples[1], restored={"host": 512})
    result = replace(RESULT, passes=(NONE, COLD, replace(WARM, samples=(WARM.samples[0], poor, WARM.samples[2]))))
    assert result.is_identical
    assert not result.is_good
    assert "restored 1,536 of 2,304 restorable tokens (66.7%)" in problems(result)[0]


def test_a_good_result_has_no_problem():
    assert RESULT.is_good
    assert problems(RESULT) == []
    assert headline(RESULT).startswith("Median time to first token: 400 ms without kvtier, 50.0 ms after a restart")


def test_the_table_has_a_column_for_each_pass_and_a_row_for_each_tier():
    headings, rows = table(RESULT)
    assert headings == ["", "none", "cold", "warm"]
    assert all(len(row) == 4 for row in rows)
    by_name = {row[0].strip(): row[1:] for row in rows}
    assert by_name["restored from disk"] == ["0", "0", "1,536"]
    assert by_name["restored from host memory"] == ["0", "768", "768"]
    assert by_name["hit rate, of tokens"] == ["0.0%", "25.6%", "76.8%"]
    assert by_name["bytes on disk"] == ["0 B", "2.5 MB", "2.5 MB"]
    assert by_name["same tokens as the first pass"] == ["-", "yes", "yes"]


def test_the_conditions_name_model_machine_seed_and_versions():
    told = dict(conditions(RESULT))
    assert told["Model"] == RESULT.model
    assert told["Seed"].startswith("3")
    assert "a processor, 2 cores" in told["Machine"]
    assert "CPython 3.11" in told["Versions"]


def test_numbers_are_written_for_people():
    assert [milliseconds(it) for it in (0.5, 99.94, 100, 1234.5)] == ["0.5 ms", "99.9 ms", "100 ms", "1,234 ms"]
    assert [gigabytes(it) for it in (0, 999, 1000, 2_500_000, 3 * 10**9)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "3.0 GB",
    ]
