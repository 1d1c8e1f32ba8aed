"""The report and the pictures: one file that needs nothing else, in the page's colours, the same from run to run."""

import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest

from kvtier.errors import ConfigError
from kvtier.plan import compare, load, make_plan
from kvtier.plan.series import (
    capacity_curves,
    cost_curves,
    crossing,
    has_prices,
    single_prompt_curves,
    ttft_curves,
)

pytest.importorskip("matplotlib")
from kvtier.plan.drawing import LIGHT
from kvtier.plan.page import STYLE
from kvtier.plan.pictures import PICTURES, pictures, write_plot
from kvtier.plan.report import render_report, write_report

WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
VOID = {"meta", "br", "link", "img", "path", "use", "rect"}


@pytest.fixture(scope="module")
def plan():
    return make_plan(load(example="samsung"))


@pytest.fixture(scope="module")
def page(plan):
    return render_report(plan, compare("samsung", plan), WHEN)


class Checker(HTMLParser):
    """Follows the tags; `problems` are those that do not match, `links` what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.problems, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in {"src", "href", "xlink:href"} and value[:1] != "#"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append((tag, self.getpos()))

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_fetches_nothing(page):
    checker = Checker()
    checker.feed(page)
    assert (checker.problems, checker.open, checker.links) == ([], [], [])
    assert not re.search(r"<script|@import|url\((?!#)|https?://(?!www\.w3\.org)", page)


def test_the_page_tells_what_the_plan_tells(plan, page):
    for text in (
        "llama-3.1-8b on 8 x h100-nvl",
        "140 → 241",
        "time to first token",
        "What tiers buy",
        "drive life",
        "36 GB/s read at 240 users",
        "14 queries/s would need 41.8",
        "Made by <code>kvtier plan</code>, 2026-01-02 03:04 UTC",
        "traffic.history_tokens",
        "example samsung",
    ):
        assert text in page, text
    assert all(plan.inputs.origin(name) for name in ("gpu.flops", "power.pue"))


def test_pictures_take_their_colours_from_the_page(plan):
    colours = set(LIGHT)
    for name, svg in pictures(plan).items():
        assert svg.startswith('<svg viewBox="'), name
        used = set(re.findall(r"var\(--(\w+)\)", svg))
        assert {"soft", "line"} <= used <= colours
        assert "#0a0b" not in svg
        assert set(re.findall(r"#[0-9a-f]{6}", svg)) <= {"#000000", "#ffffff"}
        assert all(it.startswith(f"{name}-") for it in re.findall(r'id="([^"]*)"', svg))
    dark = STYLE.partition("prefers-color-scheme:dark")[2]
    for colour in colours - {"ground"}:
        assert f"--{colour}:" in STYLE
        assert f"--{colour}:" in dark


def test_ids_are_unique_on_the_page(page):
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_the_same_plan_draws_the_same_files(plan, tmp_path):
    write_plot(tmp_path / "a.svg", plan)
    write_plot(tmp_path / "b.svg", plan)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert pictures(plan) == pictures(plan)


def test_a_png_is_a_png_and_small(plan, tmp_path):
    write_plot(tmp_path / "plan.png", plan)
    content = (tmp_path / "plan.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) < 200_000
    assert [it.name for it in tmp_path.iterdir()] == ["plan.png"]


def test_a_file_that_cannot_be_written_is_said(plan, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(tmp_path / "file" / "plan.html", plan)


def test_the_report_is_written_whole(plan, tmp_path):
    write_report(tmp_path / "plan.html", plan)
    assert (tmp_path / "plan.html").read_text().endswith("</html>\n")
    assert len(list(tmp_path.iterdir())) == 1


def test_the_curves_meet_the_limit_where_the_plan_says(plan):
    limit_s = plan.inputs.target.ttft_s
    for curve, side in zip(ttft_curves(plan), (plan.alone, plan.tiered), strict=True):
        below = [users for users, seconds in zip(curve.x, curve.y, strict=True) if seconds <= limit_s]
        assert max(below) <= side.users_at_ttft <= max(below) + curve.x[0] * 1.01


def test_kv_grows_with_users_and_context(plan):
    curves = capacity_curves(plan)
    assert [curve.name for curve in curves] == ["8k tokens", "32k tokens", "128k tokens"]
    assert curves[0].y[0] == 8192 * 131_072
    assert curves[2].y[-1] / curves[0].y[-1] == pytest.approx(16)


def test_computing_and_fetching_cross_where_they_are_equal():
    values = {
        "model.name": "deepseek-r1",
        "model.tp": 8,
        "model.weights": "fp8",
        "gpu.name": "b200-sxm",
        "shared.capacity_bytes": 10**15,
        "shared.adapter_bytes_per_s": 50e9,
    }
    plan = make_plan(load(options=values), with_levers=False)
    computed, *fetched = single_prompt_curves(plan)
    network = next(it for it in fetched if it.kind == "shared")
    at = crossing(computed, network)
    place = network.x.index(at)
    assert network.y[place] < computed.y[place]
    assert network.y[place - 1] >= computed.y[place - 1]
    assert crossing(computed, computed) is None


def test_costs_are_energy_without_prices_and_money_with():
    free = make_plan(load(options={"model.name": "llama-3.1-8b"}), with_levers=False)
    paid = make_plan(load(options={"model.name": "llama-3.1-8b", "price.gpu": 20_000.0}), with_levers=False)
    assert (has_prices(free), has_prices(paid)) == (False, True)
    for plan in (free, paid):
        for curve in cost_curves(plan):
            assert curve.y[0] > 10 * curve.y[-1] > 0
    side = free.tiered
    kwh = cost_curves(free)[1].y[-1]
    assert kwh == pytest.approx(1e6 / (side.throughput_per_s * 100) / 3600 * 7.2, rel=0.1)  # about 7.2 kW
    assert set(PICTURES) == {"capacity", "prompt", "ttft", "cost"}
