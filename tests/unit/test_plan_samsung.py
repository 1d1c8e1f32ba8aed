"""Samsung's published figures against the plan: derived, calibrated and predicted, and in the document."""

import re
from pathlib import Path

import pytest

from kvtier.plan.inputs import SETTINGS
from kvtier.plan.plan import make_plan
from kvtier.plan.published import FIGURES, HOW, compare
from kvtier.plan.read_inputs import PUBLISHED, example_names, example_tables, load

TOP = Path(__file__).parents[2]
DOCUMENT = TOP / "docs" / "planning.md"
OFF_AT_MOST = {"arithmetic": 0.06, "calibrated": 0.05, "predicted": 0.13}
"""Largest relative difference for each kind of agreement."""


@pytest.fixture(scope="module")
def plan():
    return make_plan(load(example="samsung"), with_sensitivities=False)


@pytest.fixture(scope="module")
def figures(plan):
    return compare("samsung", plan)


def test_every_figure_is_within_the_tolerance_of_its_kind(figures):
    far = [(it.text, it.off) for it in figures if abs(it.off) > OFF_AT_MOST.get(it.how, 10)]
    assert far == []
    assert {it.how for it in figures} == set(HOW)


def test_reads_stop_rising_where_the_gpus_are_full():
    reads = {
        users: sum(
            make_plan(
                load(example="samsung", options={"traffic.users": users}), with_sensitivities=False
            ).tiered.point.read_bytes_per_s.values()
        )
        for users in (140, 240, 280, 400)
    }
    assert reads[240] / reads[140] == pytest.approx(240 / 140)
    assert reads[280] < reads[240] * 280 / 240
    assert reads[400] == pytest.approx(reads[280])


def test_each_calibration_changes_its_figure(plan):
    """Negative control: without its calibration each figure differs."""
    freed = make_plan(load(example="samsung").change({"gpu.memory_share": 0.92}), with_sensitivities=False)
    assert freed.alone.users_at_ttft > 1.15 * plan.alone.users_at_ttft
    faster = make_plan(load(example="samsung").change({"software.load_bytes_per_s": 12e9}), with_sensitivities=False)
    assert faster.tiered.users_at_ttft > 1.15 * plan.tiered.users_at_ttft
    beside = make_plan(load(example="samsung").change({"software.loads_block": False}), with_sensitivities=False)
    assert beside.tiered.users_at_ttft == pytest.approx(354, abs=1)  # as in the document


def test_the_time_to_first_token_is_flat_up_to_140_users():
    times = [
        make_plan(load(example="samsung", options={"traffic.users": users}), with_sensitivities=False).tiered.ttft_s
        for users in (20, 80, 140)
    ]
    assert times == pytest.approx([0.5] * 3, abs=0.06)


def test_every_example_is_made_of_known_inputs_and_figures():
    for name in example_names():
        tables = example_tables(name)
        named = {f"{section}.{key}" for section, table in tables.items() if section != PUBLISHED for key in table}
        assert named <= set(SETTINGS)
        assert {it["figure"] for it in tables[PUBLISHED]} <= set(FIGURES)
        assert {it["how"] for it in tables[PUBLISHED]} <= set(HOW)


def table_of(figures) -> str:
    lines = ["| figure | published | plan | | why |", "| --- | ---: | ---: | --- | --- |"]
    lines += [
        f"| {it.text} | {it.show(it.published)} | {it.show(it.computed)} | {it.how} | {it.note} |" for it in figures
    ]
    return "\n".join(lines)


def test_the_document_has_these_figures(figures):
    (written,) = re.findall(r"<!-- table: samsung -->\n(.*?)\n<!-- end -->", DOCUMENT.read_text(), re.DOTALL)
    assert written == table_of(figures)


def test_the_documents_python_runs(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(snippet, {})
    assert re.match(r"[\d.]+ users, bound by \w+", capsys.readouterr().out)


def test_the_documents_file_of_inputs_is_read(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    path = tmp_path / "site.toml"
    path.write_text(text)
    plan = make_plan(load(file=path, options={"model.name": "llama-3.1-8b"}), with_sensitivities=False)
    assert plan.inputs.disk.capacity_bytes == 7_680_000_000_000
    assert plan.inputs.disk.read_bytes_per_s == 13e9
    assert plan.tiered.cost.missing == ()


def test_the_picture_for_the_readme_is_small():
    assert (TOP / "docs" / "images" / "plan.png").stat().st_size < 200_000
