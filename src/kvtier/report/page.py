"""HTML pages: self-contained files without scripts or links, readable on light and dark screens and on paper.

Every function takes plain text and escapes it, except for arguments that are named `html`.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape

from kvtier.report.table import Table

COLOURS = {
    "ground": ("#ffffff", "#14181d"),
    "panel": ("#f6f7f9", "#1c2229"),
    "ink": ("#1c2128", "#e6e9ed"),
    "soft": ("#5b6470", "#9aa4af"),
    "line": ("#dfe3e8", "#313943"),
    "bad": ("#c62828", "#ff7b72"),
    "alone": ("#6b7480", "#9aa4af"),
    "computed": ("#6b7480", "#9aa4af"),
    "tiered": ("#c9540a", "#f28a3c"),
    "gpu": ("#2f7ed8", "#5ba3f0"),
    "host": ("#b57a0c", "#e0a548"),
    "disk": ("#1b8f6f", "#34b38e"),
    "shared": ("#8a4fd0", "#b58af0"),
}
"""Colours of pages and charts, on light and on dark screens."""
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
_LIGHT_VARIABLES = "".join(f"--{name}:{light};" for name, light in LIGHT.items())
_DARK_VARIABLES = "".join(f"--{name}:{dark};" for name, (_, dark) in COLOURS.items())

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT_VARIABLES}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK_VARIABLES}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1,h2{overflow-wrap:anywhere}
h1{font-size:30px;line-height:1.25;margin:0 0 8px;font-weight:650;text-wrap:balance}
h2{font-size:20px;margin:44px 0 4px;font-weight:650}
h3{font-size:16px;margin:0 0 6px;font-weight:650}
p{margin:6px 0 12px;max-width:85ch}
.soft,figcaption{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(215px,1fr));gap:14px;margin:26px 0 8px}
.tile{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px}
.tile b{display:block;font-size:21px;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:14px}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px;margin:26px 0 8px}
figure{margin:0;padding:16px 14px 10px;background:var(--panel);border:1px solid var(--line);border-radius:10px}
figcaption{font-size:14px;padding:8px 4px 2px}
svg{display:block;width:100%;height:auto;max-width:680px}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif!important;
font-variant-numeric:tabular-nums}
figure:only-child{max-width:720px}
.wide{overflow-x:auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px;overflow-x:auto;
font-size:14px}
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
@media (max-width:640px){main{padding:20px 12px 40px}h1{font-size:23px}figure{padding:10px 4px 8px}
dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:10px}table{font-size:14px}th,td{padding:6px}th,td.name{white-space:normal!important}}
@media print{main{padding:0}figure,.tile,tr{break-inside:avoid}}
"""
)

SHORT_CHARACTERS = 16
"""Cells of up to this length are not wrapped."""


def page_html(command: str, heading: str, *html: str, remark: str = "", made: datetime | None = None) -> str:
    """A whole page.

    Args:
        command: the command that made it.
        heading: the title.
        html: the parts below the header.
        remark: follows the date.
        made: when; None is now.
    """
    made = made or datetime.now(UTC)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(f'{command}: {heading}')}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(heading)}</h1>"
        f'<p class="soft">Made by <code>{escape(command)}</code>, {made:%Y-%m-%d %H:%M} UTC. {escape(remark)}</p>'
        "</header>\n" + "\n".join(html) + "\n</main>\n</body>\n</html>\n"
    )


def section_html(title: str, *html: str) -> str:
    """A part of the page under its title."""
    return f"<section><h2>{escape(title)}</h2>{''.join(html)}</section>"


def paragraphs_html(texts: Iterable[str], kind: str = "") -> str:
    """Each text as a paragraph; `kind` is a class of the style sheet."""
    return "".join(f'<p class="{kind}">{escape(it)}</p>' for it in texts)


def code_html(text: str) -> str:
    """Text to paste, as it is."""
    return f"<pre>{escape(text)}</pre>"


def list_html(texts: Iterable[str]) -> str:
    """A bulleted list; empty without texts."""
    items = "".join(f"<li>{escape(it)}</li>" for it in texts)
    return f"<ul>{items}</ul>" if items else ""


def definitions_html(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with their values."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in pairs)}</dl>"


def tiles_html(tiles: Iterable[tuple[str, str]]) -> str:
    """The page's main figures, each with what it means."""
    shown = "".join(f'<div class="tile"><b>{escape(it)}</b><span>{escape(name)}</span></div>' for it, name in tiles)
    return f'<div class="tiles">{shown}</div>'


def table_html(table: Table) -> str:
    """A table as a section with its title and note."""
    head = "".join(
        f"<th{' class=number' if place in table.right else ''}>{escape(it)}</th>"
        for place, it in enumerate(table.columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{_cell_class(table, place, cell)}">{escape(cell)}</td>' for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in table.rows
    )
    title = f"<h2>{escape(table.title)}</h2>" if table.title else ""
    note = f'<p class="soft">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section>{title}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"{note}</section>"
    )


def _cell_class(table: Table, place: int, cell: str) -> str:
    if place in table.right:
        return "number"
    return "name" if place == 0 or len(cell) <= SHORT_CHARACTERS else ""
