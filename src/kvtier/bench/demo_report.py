"""The demo's report: one HTML file that needs nothing else, readable on a light and on a dark screen and on paper."""

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from kvtier.bench.demo_chart import tokens_by_pass, ttft_by_request, ttft_by_turn
from kvtier.bench.demo_result import DemoResult
from kvtier.bench.demo_summary import (
    PASS_MEANS,
    conditions,
    conditions_in_short,
    headline,
    milliseconds,
    problems,
    table,
)
from kvtier.report.output import write_file

STYLE = """
:root{color-scheme:light dark;--ground:#ffffff;--panel:#f6f7f9;--ink:#1c2128;--soft:#5b6470;--line:#dfe3e8;
--none:#7d8590;--cold:#2f7ed8;--warm:#d9600f;--reopened:#8a4fd0;--computed:#b4bbc4;--host:#e39a2d;--directory:#1b8f6f;
--elsewhere:#8a4fd0;--good:#17803d;--bad:#c62828}
@media (prefers-color-scheme:dark){:root{--ground:#14181d;--panel:#1c2229;--ink:#e6e9ed;--soft:#9aa4af;--line:#313943;
--none:#8f99a5;--cold:#5ba3f0;--warm:#f28a3c;--reopened:#b58af0;--computed:#5d6772;--host:#e0a548;--directory:#34b38e;
--elsewhere:#b58af0;--good:#4cc27a;--bad:#ff7b72}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:30px;line-height:1.25;margin:0 0 8px;font-weight:650;text-wrap:balance}
h2{font-size:20px;margin:44px 0 4px;font-weight:650}
p{margin:6px 0 12px;max-width:80ch}
.soft,figcaption{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
.good{color:var(--good)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:14px;margin:26px 0 8px}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px}
.tile b{display:block;font-size:21px;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:14px}
figure{margin:12px 0 0;padding:18px 14px 10px;background:var(--panel);border:1px solid var(--line);border-radius:10px;
overflow-x:auto}
figcaption{font-size:14px;padding:6px 8px 4px}
svg{display:block;width:100%;min-width:640px;height:auto}
svg text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
svg .label{fill:var(--soft)}svg .faint{font-size:11px;opacity:.8}svg .name{font-weight:650;font-size:14px}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}.mark{stroke:var(--line);stroke-dasharray:2 3}
.line{fill:none;stroke-width:2.5;stroke-linejoin:round;stroke-linecap:round}
.dots{opacity:.38}
.pass-none{--hue:var(--none)}.pass-cold{--hue:var(--cold)}.pass-warm{--hue:var(--warm)}
.pass-reopened{--hue:var(--reopened)}
.dots circle,.bars rect,svg text.name{fill:var(--hue)}polyline{stroke:var(--hue)}
rect.computed{fill:var(--computed)}rect.host{fill:var(--host)}rect.directory{fill:var(--directory)}
rect.elsewhere{fill:var(--elsewhere)}
svg text.on-computed,svg text.on-host{fill:#14181d}svg text.on-directory,svg text.on-elsewhere{fill:#ffffff}
@media (prefers-color-scheme:dark){svg text.on-computed{fill:#ffffff}svg text.on-directory,
svg text.on-elsewhere{fill:#14181d}}
.wide{overflow-x:auto}
table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{padding:7px 14px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:4px}
td.in{padding-left:24px}
thead th{color:var(--soft);font-weight:600}
dl{display:grid;grid-template-columns:minmax(130px,220px) 1fr;gap:6px 20px;margin:12px 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
ul{padding-left:20px;max-width:80ch}li{margin:4px 0}
summary{cursor:pointer;margin:34px 0 6px;font-weight:600}
@media (max-width:640px){dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:10px}}
@media print{main{padding:0}figure,.tile{break-inside:avoid}}
"""

LIMITS = (
    "Requests are sent one after another, so nobody waits in a queue; what less prefill does for a queue is not shown.",
    "Without kvtier the engine keeps no KV between requests; kvtier is for what no longer fits its own memory.",
    "The weights are random, so the answers mean nothing. Time and KV depend on the shape of the model alone.",
    "The disk is that of this machine, and the operating system may hold some of its blocks in memory.",
)


def write_report(path: Path, result: DemoResult) -> None:
    """Write the report to `path`, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file("--report", path, render_report(result, datetime.now(UTC)).encode())


def render_report(result: DemoResult, made: datetime) -> str:
    """The whole page."""
    parts = [
        _head(result, made),
        _tiles(result),
        _figure(
            "Time to first token by turn",
            ttft_by_turn(result.passes),
            "A dot is one request; the lines join the medians of the conversations that have that turn (n of them). "
            "A conversation grows with every turn, and so does what must be computed without kvtier.",
        ),
        _figure(
            "Every request",
            ttft_by_request(result.passes),
            "One bar for each request, to the same scale in all passes. Point at a bar for its numbers.",
        ),
        _figure(
            "Where the prompts' KV came from",
            tokens_by_pass(result.passes),
            "A pass reads a chunk from disk once; later requests of the same pass find it in host memory, as they find "
            "what they stored themselves.",
        ),
        _table(result),
        _conditions(result),
        _limits(),
        _all_requests(result),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>kvtier demo</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _head(result: DemoResult, made: datetime) -> str:
    bad = "".join(f'<p class="bad">{escape(problem)}</p>' for problem in problems(result))
    return (
        f"<header><h1>{escape(headline(result))}</h1>"
        f'<p class="soft">{escape(conditions_in_short(result))} Made by <code>kvtier demo</code>, '
        f"{made:%Y-%m-%d %H:%M} UTC.</p>{bad}</header>"
    )


def _tiles(result: DemoResult) -> str:
    none, warm = result.find_pass("none"), result.find_pass("warm")
    tiles = [
        (f"{result.speed_up('warm'):.1f}x", "sooner to the first token after a restart, median", ""),
        (
            f"{milliseconds(none.ttft_ms(95)).removesuffix(' ms')} → {milliseconds(warm.ttft_ms(95))}",
            f"time to first token, p95 ({result.speed_up('warm', 95):.1f}x)",
            "",
        ),
        (f"{warm.hit_rate:.1%}", f"of {warm.input_tokens:,} prompt tokens restored, not computed", ""),
        (
            "identical" if result.is_identical else "different",
            f"answers in all {len(result.passes)} passes",
            "good" if result.is_identical else "bad",
        ),
    ]
    drawn = "".join(
        f'<div class="tile"><b class="{kind}">{escape(value)}</b><span>{escape(meaning)}</span></div>'
        for value, meaning, kind in tiles
    )
    return f'<div class="tiles">{drawn}</div>'


def _figure(title: str, drawing: str, caption: str) -> str:
    framed = f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"
    return f"<section><h2>{escape(title)}</h2>{framed}</section>"


def _table(result: DemoResult) -> str:
    headings, rows = table(result)
    head = "".join(f"<th>{escape(it)}</th>" for it in headings)
    body = "".join(
        f"<tr><td{' class=in' if row[0].startswith(' ') else ''}>{escape(row[0].strip())}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    meanings = "".join(f"<dt>{escape(it.name)}</dt><dd>{escape(PASS_MEANS[it.name])}</dd>" for it in result.passes)
    return (
        "<section><h2>The passes in numbers</h2>"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<dl>{meanings}</dl>"
        '<p class="soft">Restorable is counted apart from kvtier, from the tokens alone: whole chunks whose prefix an '
        "earlier request had stored, less the token that must be computed. The whole pass is the time from the first "
        "request until all answers are there and all that was stored is on disk.</p></section>"
    )


def _conditions(result: DemoResult) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in conditions(result))
    return f"<section><h2>Conditions</h2><dl>{rows}</dl></section>"


def _limits() -> str:
    items = "".join(f"<li>{escape(it)}</li>" for it in LIMITS)
    return f"<section><h2>What this does not show</h2><ul>{items}</ul></section>"


def _all_requests(result: DemoResult) -> str:
    head = "".join(f"<th>{escape(it.name)}, ms</th><th>restored</th>" for it in result.passes)
    rows: list[str] = []
    for position, first in enumerate(result.passes[0].samples):
        cells = "".join(
            f"<td>{it.samples[position].ttft_ms:,.1f}</td><td>{it.samples[position].restored_tokens:,}</td>"
            for it in result.passes
        )
        rows.append(f"<tr><td>{first.session + 1}.{first.turn + 1}</td><td>{first.prompt_tokens:,}</td>{cells}</tr>")
    return (
        "<details><summary>All requests, in the order in which they were sent</summary>"
        '<div class="wide"><table><thead><tr><th>conversation.turn</th><th>prompt tokens</th>'
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )
