"""A plan as one HTML file that needs nothing else, readable on a light and on a dark screen and on paper."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html, tiles_html
from kvtier.plan.pictures import PICTURES, pictures
from kvtier.plan.planning import Plan
from kvtier.plan.series import crossing, single_prompt_curves
from kvtier.plan.stated import HOW, Stated
from kvtier.plan.tables import Table, assumptions, circumstances, heading, tables, verdict
from kvtier.plan.words import load_text, ratio_text, share_text

LIMITS = (
    "Means, not percentiles: the slowest requests wait longer than what is told here.",
    (
        "One queue for each copy of the model. Chunked prefill, batching and preemption are not simulated; what they "
        "cost is in gpu.flops_share and gpu.memory_rate_share, which you can measure."
    ),
    "Users stay with their copy of the model, so that GPU memories add up, and tiers are shared by all copies.",
    (
        "LRU by its residence time. Against exact LRU on public traces that is off by one or two points of hit rate; a "
        "policy that knows which conversations have ended does better."
    ),
    "What is written is what was computed. Drives wear as rated; a drive in a data centre may do better or worse.",
)


def write_report(path: Path, plan: Plan, stated: list[Stated] | None = None) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is missing.
    """
    write_whole("--report", path, render_report(plan, stated, datetime.now(UTC)).encode())


def render_report(plan: Plan, stated: list[Stated] | None, made: datetime) -> str:
    """The whole page."""
    told = list(tables(plan, None))
    parts = [
        _head(plan, made),
        tiles_html(_tiles(plan)),
        _pictures(plan),
        *(table_html(it) for it in told),
        _stated(stated) if stated else "",
        _assumptions(plan),
        _limits(),
    ]
    body = "\n".join(parts)
    return page(f"kvtier plan: {heading(plan)}", body)


def _head(plan: Plan, made: datetime) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in circumstances(plan))
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(plan))
    return (
        f"<header><h1>{escape(heading(plan))}</h1>"
        f'<p class="soft">Made by <code>kvtier plan</code>, {made:%Y-%m-%d %H:%M} UTC.</p>'
        f"{sentences}<dl>{lines}</dl></header>"
    )


def _tiles(plan: Plan) -> list[tuple[str, str]]:
    alone, tiered = plan.alone, plan.tiered
    is_users = plan.setup.demand.has_users
    unit = "users" if is_users else "queries/s"
    before, after = (load_text(it.users_at_ttft, is_users=is_users) for it in (alone, tiered))
    ratio = ratio_text(tiered.users_at_ttft, alone.users_at_ttft)
    return [
        (f"{before} → {after}", f"{unit} within {plan.inputs.target.ttft_s:g} s to the first token ({ratio})"),
        (
            ratio_text(tiered.output_tokens_per_s, alone.output_tokens_per_s),
            f"tokens a second at {load_text(plan.asked_users, is_users=is_users)} {unit}",
        ),
        (
            f"{share_text(alone.point.hit_rate)} → {share_text(tiered.point.hit_rate)}",
            "of all prompt tokens found, not computed",
        ),
        (plan.binding.name, f"binds, at {load_text(plan.binding.users, is_users=is_users)} {unit}"),
    ]


def _pictures(plan: Plan) -> str:
    captions = _captions(plan)
    figures = "".join(
        f"<figure><h3>{escape(PICTURES[name][0])}</h3>{svg}<figcaption>{escape(captions[name])}</figcaption></figure>"
        for name, svg in pictures(plan).items()
    )
    return f'<div class="pictures">{figures}</div>'


def _captions(plan: Plan) -> dict[str, str]:
    curves = single_prompt_curves(plan)
    crossings = [
        f"{curve.name} from {at:,.0f} tokens on"
        for curve in curves[1:]
        if (at := crossing(curves[0], curve)) is not None
    ]
    faster = f" It is faster {'; '.join(crossings)}." if crossings else ""
    return {
        "capacity": "Each conversation keeps its own KV; dashed is what each place holds. Both axes are logarithmic.",
        "prompt": f"One prompt of which everything was seen before, on an idle machine.{faster}",
        "ttft": "Dashed is the limit; a dot is where the mean meets it. Curves end where queues grow without end.",
        "cost": "The same machines, used more and more: a curve ends where throughput saturates.",
    }


def _stated(stated: list[Stated]) -> str:
    rows = tuple(
        (it.text, it.show(it.stated), it.show(it.computed), f"{it.off:+.0%}", it.how, it.note) for it in stated
    )
    note = "; ".join(f"{word}: {meaning}" for word, meaning in HOW.items())
    return table_html(
        Table(
            title="What the source states, and what the plan says",
            columns=("stated", "there", "here", "off", "", "why"),
            rows=rows,
            numeric=0,
            note=f"{note}.",
        )
    )


def _limits() -> str:
    items = "".join(f"<li>{escape(it)}</li>" for it in LIMITS)
    return f"<section><h2>What this does not know</h2><ul>{items}</ul></section>"


def _assumptions(plan: Plan) -> str:
    table = assumptions(plan)
    sources = "".join(
        f"<li>{escape(name)}: {escape(source)}; read {escape(date)}</li>" for name, source, date in plan.sources
    )
    return f'<div class="assumptions">{table_html(table)}<ul class="soft">{sources}</ul></div>'
