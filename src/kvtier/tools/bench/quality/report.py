"""Makes the report of `kvtier bench quality`."""

from dataclasses import asdict
from functools import partial

from kvtier.report.table import Table
from kvtier.tools.bench.quality.gates import Gate, gates
from kvtier.tools.bench.quality.measure import BF16, SCORED_TOKENS, QualityResult
from kvtier.tools.charts.chart import Axis, Bars, Chart, Charts, Rule
from kvtier.tools.charts.report import PageSection, Report


def quality_json(result: QualityResult) -> dict[str, object]:
    """Return all rows and limits as plain values."""
    return {**asdict(result), "gates": [asdict(it) for it in gates(result)]}


def quality_report(result: QualityResult) -> Report:
    """Build the report of a result."""
    found = gates(result)
    missed = [it for it in found if not it.is_met]
    sections = [PageSection(charts=partial(_charts, result), tables=[_texts(result)])]
    if result.tasks:
        sections.append(PageSection(tables=[_tasks(result)]))
    if result.turns:
        sections.append(PageSection(tables=[_turns(result)]))
    problems = [f"{it.model}, {it.codec}: {it.what} is {it.value:.3g}; the limit is {it.limit:.3g}" for it in missed]
    sections.append(PageSection(problems=problems, tables=[_gates(found)]))
    return Report(
        command="kvtier bench quality",
        answer=f"{len(found) - len(missed)} of {len(found)} limits are kept",
        sections=sections,
    )


def _texts(result: QualityResult) -> Table:
    rows: list[tuple[str, ...]] = []
    for it in result.results:
        if not rows or rows[-1][:2] != (it.model, it.text):
            rows.append((it.model, it.text, BF16, "", f"{it.noise_kl:.1e}", "1.0", "", f"{it.noise_top1:.1%}", ""))
        figures = f"{it.kl:.1e}", f"{it.kl / it.noise_kl:.1f}", f"{it.kl_p99:.1e}", f"{it.top1:.1%}"
        rows.append((it.model, it.text, it.codec, f"{it.ratio:.3f}", *figures, f"{it.perplexity_change:+.2%}"))
    return Table(
        title=f"Next tokens after stored KV, compared with exact KV; {SCORED_TOKENS} tokens of each excerpt",
        columns=("model", "text", "codec", "of raw bytes", "KL", "in N", "KL p99", "top-1", "perplexity"),
        rows=rows,
        numeric=6,
        note="N is the KL of bf16 arithmetic on exact KV. fp8, rotation and int2 are references, not codecs of kvtier.",
    )


def _tasks(result: QualityResult) -> Table:
    kinds = [*dict.fromkeys(kind for it in result.tasks for kind in it.kinds)]
    rows = [
        (
            it.model,
            it.codec,
            f"{it.kept} of {it.of}",
            *("{} of {}".format(*it.kinds.get(kind, (0, 0))) for kind in kinds),
        )
        for it in result.tasks
    ]
    columns = ("model", "codec", "all", *kinds)
    return Table(title="Right answers that stay right", columns=columns, rows=rows, numeric=len(columns) - 2)


def _turns(result: QualityResult) -> Table:
    turns = max(len(it.kl_by_turn) for it in result.turns)
    rows = [(it.model, it.codec, *(f"{kl:.1e}" for kl in (*it.kl_by_turn, it.kl_once))) for it in result.turns]
    columns = ("model", "codec", *(f"turn {it + 1}" for it in range(turns)), "once")
    return Table(title="KL by turn, each after restored KV", columns=columns, rows=rows, numeric=turns + 1)


def _gates(found: list[Gate]) -> Table:
    rows = [
        (it.model, it.codec, it.what, f"{it.value:.3g}", f"{it.limit:.3g}", "yes" if it.is_met else "NO")
        for it in found
    ]
    return Table(title="Limits", columns=("model", "codec", "limit", "value", "allowed", "kept"), rows=rows, numeric=3)


def _charts(result: QualityResult) -> Charts:
    return {
        model: Chart(
            heading=f"{model}: loss by codec",
            marks=[
                Bars(
                    names=[f"{it.codec}, {it.text}" for it in result.results if it.model == model],
                    values=[it.kl / it.noise_kl for it in result.results if it.model == model],
                    colours=[
                        "tiered" if it.codec in {"k8v4", "int4"} else "alone"
                        for it in result.results
                        if it.model == model
                    ],
                ),
                Rule(at=1, is_vertical=True),
            ],
            x=Axis(label="KL, as a multiple of that of bf16 arithmetic", is_log=True),
        )
        for model in dict.fromkeys(it.model for it in result.results)
    }
