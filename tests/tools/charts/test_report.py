"""The report kit: pages are self-contained and escape hostile text, files are replaced whole, figures keep units."""

import json
import math
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from tests import browser

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.report.format import (
    binary,
    both,
    bytes_text,
    count_text,
    decimal,
    digits,
    exact,
    rate_text,
    short_count,
    time_text,
)
from kvtier.report.output import write_file, write_json
from kvtier.report.table import Table, print_text
from kvtier.tools.charts.chart import COLOURS, Axis, Chart, Curve, Rule, few, stacked, write_charts
from kvtier.tools.charts.report import PageSection, Report
from kvtier.tools.replay.report import _policy_curves
from kvtier.tools.replay.sweep import CacheResult

WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VOID = {"meta", "br", "link", "img", "path", "use", "rect"}
HOSTILE = "<script>alert('&')</script>"


class PageChecker(HTMLParser):
    """Collects tags that do not match, and what a browser would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.problems: list[object] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.problems += [
            (name, value)
            for name, value in attrs
            if name.startswith("on") or (name in {"src", "href", "xlink:href", "srcset"} and value[:1] != "#")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.problems.append((tag, self.getpos()))


def check_page(text: str) -> None:
    """Well-formed, self-contained, without scripts, and every id is used once."""
    checker = PageChecker()
    checker.feed(text)
    assert (checker.problems, checker.open) == ([], [])
    assert not {"script", "link", "img", "iframe", "object", "embed"} & checker.tags
    assert not re.search(r"@import|url\((?!#)|https?://(?!www\.w3\.org)", text)
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def squares(**given):
    return Chart(heading="Squares", marks=[Curve(x=[1, 2, 3], y=[1, 4, 9], colour="host", **given)], x=Axis(label="n"))


def page_of(**section):
    return Report(command="c", answer="h", sections=[PageSection(**section)]).html(WHEN)


def test_an_axis_names_few_of_its_values_and_always_the_largest():
    assert few([]) == []
    assert few([3, 1, 2]) == [1, 2, 3]
    for count in range(1, 60):
        values = [2.0**it for it in range(count)]
        named = few(values)
        assert len(named) <= 7
        assert set(named) <= set(values)
        assert named[-1] == values[-1]


def rgb(colour):
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def test_policies_differ_in_hue_and_the_bound_in_its_dash_as_well():
    names = ["default", "lru", "min", "fifo", "lfu", "arc"]
    counts = dict.fromkeys(("hit_tokens", "block_hits", "evictions", "written_tokens", "peak_tokens", "mean_tokens"), 0)
    rows = [CacheResult(policy=it, capacity_tokens=100, hit_rate=0.5, **counts) for it in names]
    curves = {it.label.removesuffix(" (bound)"): it for it in _policy_curves(rows)}
    assert list(curves) == names
    assert len({str(curves[name].dash) for name in ("default", "lru", "min")}) == 3  # seen where they coincide
    for one, other in combinations(curves.values(), 2):
        for ground in (0, 1):
            pair = rgb(COLOURS[one.colour][ground]), rgb(COLOURS[other.colour][ground])
            assert math.dist(*pair) > 60, (one.label, other.label)
            assert math.dist(*(pair[0], rgb(COLOURS["line"][ground]))) > 60  # the grid's


def test_every_part_of_a_page_escapes_its_text():
    pytest.importorskip("matplotlib")
    chart = replace(squares(label=HOSTILE, end=HOSTILE), heading=HOSTILE, caption=HOSTILE)
    section = PageSection(
        title=HOSTILE, texts=[HOSTILE], problems=[HOSTILE], charts=lambda: {"a": chart},
        notes=[HOSTILE], tables=[Table((HOSTILE,), [(HOSTILE,)], title=HOSTILE, note=HOSTILE)], code=HOSTILE,
    )  # fmt: skip
    text = Report(command=HOSTILE, answer=HOSTILE, sections=[section], remark=HOSTILE).html(WHEN)
    check_page(text)
    assert "script>" not in text
    assert text.count("&lt;script&gt;alert") == 18


def test_charts_take_the_colours_of_the_page():
    pytest.importorskip("matplotlib")
    curves = [Curve(x=[1, 2], y=[1, 2], colour=colour) for colour in COLOURS]
    charts = {"a": replace(squares(), marks=[*curves, Rule(at=1)]), "b": squares()}
    text = page_of(charts=lambda: charts)
    check_page(text)
    assert set(re.findall(r"var\(--(\w+)\)", text.partition("<main>")[2])) == set(COLOURS)
    assert "#0a0b" not in text


def test_a_terminal_has_the_answer_first_and_all_but_charts(capsys):
    section = PageSection(
        title="title", texts=["text"], problems=["problem"], charts=lambda: 1 / 0,
        notes=["note " * 40], tables=[Table(("", ""), [("name", "words " * 40)]), Table(("n",), [("1",)])], code="code",
    )  # fmt: skip
    Report(command="c", answer="answer", sections=[section, replace(section, is_page_only=True)]).print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    begins = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert begins == ["answer", "title", "text", "warning:", "-", "name", "n", "1", "code"]
    print_text(f"in {'/long' * 40}")
    assert "/long" * 40 in capsys.readouterr().out  # a path is whole in a pipe


def test_a_browser_draws_a_page_within_the_width_of_a_phone(tmp_path):
    pytest.importorskip("matplotlib")
    wide = Table([f"column {number}" for number in range(30)], [["cell"] * 30])
    facts = Table(("", ""), [("name", "/a/path/that/is/long" * 20)])
    path = tmp_path / "page.html"
    path.write_text(page_of(charts=lambda: {"a": squares()}, tables=[wide, facts]))
    assert "Squares" in browser.rendered(path)
    assert browser.overflow(path, width=360) == 0
    path.write_text(path.read_text().replace("overflow-x:auto", ""))
    assert browser.overflow(path, width=360) > 0  # the control: what is wider than its window is noticed


def test_an_axis_is_what_its_chart_says():
    figure = pytest.importorskip("matplotlib.figure")
    axes = figure.Figure().subplots()
    Axis(label="n", is_log=True, least=1, most=1e6, text=binary, ticks=[1024, 2048]).set(axes, "x")
    Axis(label="m", least=0).set(axes, "y")
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_xlim()) == ("log", "n", (1, 1e6))
    assert axes.xaxis.get_major_formatter()(2048) == "2 KiB"
    assert list(axes.get_xticks()) == [1024, 2048]
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("linear", 0)


@pytest.mark.parametrize("heights", [[1.0, 0.99, 0.98, 0.97], [0.03, 0.02, 0.01, 0.0], [0.9, 0.5, 0.49, 0.1]])
def test_texts_at_the_ends_of_curves_keep_their_order_and_their_distance(heights, tmp_path):
    pytest.importorskip("matplotlib")
    curves = [Curve(x=[0, 1], y=[0, height], colour="ink", end=f"end{height}") for height in heights]
    chart = Chart(heading="", marks=curves[::-1], x=Axis(), y=Axis(least=0, most=1))
    write_charts("--picture", tmp_path / "a.svg", {"a": chart})
    picture = (tmp_path / "a.svg").read_text()
    found = [re.search(rf'y="([\d.]+)"[^>]*>end{height}<', picture) for height in heights]
    places = [float(it[1]) for it in found if it]
    assert len(places) == 4
    assert min(after - before for before, after in pairwise(places)) > 9  # points of the letters
    ticks = [float(it) for it in re.findall(r'y="([\d.]+)"[^>]*>0\.0<', picture)]
    assert max(places) < max(ticks), "above the numbers of the other axis"


def test_stacked_parts_are_shares_that_fill_the_bar():
    bars = stacked(["a", "b"], [("x", "host", [1, 0]), ("y", "disk", [3, 5])])
    assert [(it.label, it.left, it.values, it.texts) for it in bars] == [
        ("x", [0, 0], [0.25, 0], ["25%", ""]),
        ("y", [0.25, 0], [0.75, 1], ["75%", "100%"]),
    ]


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_chart_file_is_the_same_from_run_to_run(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        section = PageSection(charts=lambda: {"a": squares(), "b": squares(dash="", marker="o")})
        paths = Report(command="c", answer="h", sections=[section]).write(None, tmp_path / f"{name}{suffix}")
    first, second = sorted(tmp_path.iterdir())
    assert paths == [second]
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[:5] in {b"<?xml", b"\x89PNG\r"}


@pytest.mark.parametrize("command", ["probe", "plan llama-3.1-8b", "replay nothing.jsonl"])
def test_a_picture_of_an_unknown_kind_is_refused_before_any_work(command, tmp_path, capsys):
    assert run([*command.split(), "--picture", str(tmp_path / "x.gif")]) == 2
    assert "has an unknown picture format; allowed: .svg or .png" in capsys.readouterr().err


class Colour(Enum):
    RED = "red"


@dataclass
class Row:
    name: bytes
    path: Path
    colour: Colour


def test_json_of_dataclasses_bytes_paths_and_enums(tmp_path):
    write_json("--record", tmp_path / "x.json", {"rows": [Row(b"\x01", Path("a"), Colour.RED)]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"rows": [{"name": "01", "path": "a", "colour": "red"}]}
    with pytest.raises(ConfigError, match=r"--record .* cannot be written"):
        write_json("--record", tmp_path / "x.json" / "y.json", {})
    with pytest.raises(TypeError):
        write_json("--record", tmp_path / "y.json", {"x": object()})
    write_file("--report", tmp_path / "z", "é")
    assert (tmp_path / "z").read_bytes() == "é".encode()


@pytest.mark.parametrize(
    ("text_of", "texts"),
    [
        (digits, {0.00123: "0.00123", 9.876: "9.88", 98.76: "98.8", 987.6: "988", 98765.4: "98,765"}),
        (decimal, {0: "0 B", 999: "999 B", 147_456: "147.5 kB", 999_960: "1 MB", 1e21: "1,000 EB"}),
        (binary, {1: "1 B", 1023: "1,023 B", 1023.99: "1 KiB", 147_456: "144 KiB", 1 << 40: "1 TiB"}),
        (both, {147_456: "147.5 kB = 144 KiB"}),
        (exact, {147_456.0: "147,456", 4444.25: "4,444.25"}),
        (bytes_text, {999_600: "1 MB", 147_456: "147 kB"}),
        (
            time_text,
            {2e-6: "2 us", 0.0123: "12.3 ms", 1.5: "1.5 s", 119: "119 s", 7200: "2 h", math.inf: "unbounded"},
        ),
        (rate_text, {0: "-", 5e6: "5 MB/s", 12.5e9: "12.50 GB/s", 5e11: "500 GB/s"}),
        (short_count, {None: "inf", 999: "999", 131_072: "131.1k", 2.5e9: "2.5G"}),
        (count_text, {140.999999999: "141"}),
    ],
)
def test_numbers_have_units_and_as_many_digits_as_they_are_worth(text_of, texts):
    assert {it: text_of(it) for it in texts} == texts
