"""A plan as one HTML file that needs nothing else, readable on a light and on a dark screen and on paper."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.plan.files import write_whole
from kvtier.plan.pictures import PICTURES, pictures
from kvtier.plan.planning import Plan
from kvtier.plan.series import crossing, single_prompt_curves
from kvtier.plan.stated import HOW, Stated
from kvtier.plan.tables import Table, assumptions, circumstances, heading, tables, verdict
from kvtier.plan.words import load_text, ratio_text, share_text

STYLE = """
:root{color-scheme:light dark;--ground:#ffffff;--panel:#f6f7f9;--ink:#1c2128;--soft:#5b6470;--line:#dfe3e8;
--alone:#6b7480;--tiered:#c9540a;--computed:#6b7480;--gpu:#2f7ed8;--host:#9a6a08;--disk:#17795e;--shared:#7d3fc8;
--good:#17803d;--bad:#c62828}
@media (prefers-color-scheme:dark){:root{--ground:#14181d;--panel:#1c2229;--ink:#e6e9ed;--soft:#9aa4af;--line:#313943;
--alone:#9aa4af;--tiered:#f28a3c;--computed:#9aa4af;--gpu:#5ba3f0;--host:#e0a548;--disk:#34b38e;--shared:#b58af0;
--good:#4cc27a;--bad:#ff7b72}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.25;margin:0 0 8px;font-weight:650;text-wrap:balance}
h2{font-size:20px;margin:44px 0 4px;font-weight:650}
h3{font-size:16px;margin:0 0 6px;font-weight:650}
p{margin:6px 0 12px;max-width:85ch}
.soft,figcaption{color:var(--soft)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:14px;margin:26px 0 8px}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px}
.tile b{display:block;font-size:21px;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:14px}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px;margin:26px 0 8px}
figure{margin:0;padding:16px 14px 10px;background:var(--panel);border:1px solid var(--line);border-radius:10px}
figcaption{font-size:14px;padding:8px 4px 2px}
svg{display:block;width:100%;height:auto}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif!important;
font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th:first-child,td:first-child{padding-left:4px}
.number{text-align:right;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
td.name{white-space:nowrap}
.assumptions td{font-size:14px}
dl{display:grid;grid-template-columns:minmax(90px,130px) 1fr;gap:4px 20px;margin:14px 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
ul{padding-left:20px;max-width:85ch}li{margin:4px 0}
summary{cursor:pointer;margin:34px 0 6px;font-weight:600}
@media (max-width:640px){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:10px}}
@media print{main{padding:0}figure,.tile,tr{break-inside:avoid}}
"""

SHORT = 16
"""Cells of so many characters are not broken into lines."""

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
    """Write the report; missing parent directories are made.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is missing.
    """
    write_whole("--report", path, render_report(plan, stated, datetime.now(UTC)).encode())


def render_report(plan: Plan, stated: list[Stated] | None, made: datetime) -> str:
    """The whole page."""
    told = list(tables(plan, None))
    parts = [
        _head(plan, made),
        _tiles(plan),
        _pictures(plan),
        *(_table(it) for it in told),
        _stated(stated) if stated else "",
        _assumptions(plan),
        _limits(),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>kvtier plan: {escape(heading(plan))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _head(plan: Plan, made: datetime) -> str:
    lines = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in circumstances(plan))
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in verdict(plan))
    return (
        f"<header><h1>{escape(heading(plan))}</h1>"
        f'<p class="soft">Made by <code>kvtier plan</code>, {made:%Y-%m-%d %H:%M} UTC.</p>'
        f"{sentences}<dl>{lines}</dl></header>"
    )


def _tiles(plan: Plan) -> str:
    alone, tiered = plan.alone, plan.tiered
    is_users = plan.setup.demand.has_users
    unit = "users" if is_users else "queries/s"
    before, after = (load_text(it.users_at_ttft, is_users=is_users) for it in (alone, tiered))
    ratio = ratio_text(tiered.users_at_ttft, alone.users_at_ttft)
    shown = [
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
    drawn = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in shown)
    return f'<div class="tiles">{drawn}</div>'


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


def _table(table: Table) -> str:
    first_number = len(table.columns) - table.numeric
    head = "".join(
        f"<th{' class=number' if place >= first_number else ''}>{escape(it)}</th>"
        for place, it in enumerate(table.columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_cell_class(cell, place, first_number)}">{escape(cell)}</td>'
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<section><h2>{escape(table.title)}</h2>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}</section>'
    )


def _cell_class(cell: str, place: int, first_number: int) -> str:
    if place >= first_number:
        return "number"
    return "name" if place == 0 or len(cell) <= SHORT else ""


def _stated(stated: list[Stated]) -> str:
    rows = tuple(
        (it.text, it.show(it.stated), it.show(it.computed), f"{it.off:+.0%}", it.how, it.note) for it in stated
    )
    note = "; ".join(f"{word}: {meaning}" for word, meaning in HOW.items())
    return _table(
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
    return f'<div class="assumptions">{_table(table)}<ul class="soft">{sources}</ul></div>'
