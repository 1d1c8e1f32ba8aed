"""Tables on narrow terminals: no figure is broken over two lines or cut, no line is wider than the terminal."""

import random
import re
from types import SimpleNamespace

import pytest

from kvtier.report import table as report_table
from kvtier.report.table import Table, print_table

FIGURE = re.compile(r"[^\s()]*\d[^\s()]*")
TEXTS = ("a few words of text", "x" * 70, "/a/path/that/is/long/" * 3, "12.5 GiB of 1,024 GiB", "", "(3.25x)")
NUMBERS = ("1", "1,234,567,890", "12.34 GiB", "-", "98.6%", "123,456.78 GiB/s")
HEADINGS = ("tier", "hit rate", "of what is possible", "GB/s", "written tokens")


def random_table(chance, count):
    numeric = chance.randrange(count + 1)
    rows = [
        [chance.choice(NUMBERS if place >= count - numeric else TEXTS) for place in range(count)]
        for _ in range(chance.randrange(1, 5))
    ]
    return Table([chance.choice(HEADINGS) for _ in range(count)], rows, numeric)


@pytest.mark.parametrize("width", [80, 60])
def test_no_table_breaks_a_figure(width, monkeypatch, capsys):
    monkeypatch.setattr(report_table, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    monkeypatch.setenv("COLUMNS", str(width))
    chance = random.Random(18)
    facts = Table(("", ""), [("name", text) for text in (*TEXTS, *NUMBERS)])
    empty = Table(HEADINGS * 3, [[""] * 15])
    for table in (facts, empty, *(random_table(chance, chance.randrange(1, 14)) for _ in range(80))):
        print_table(table)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width, lines
        for place, cell in (placed for row in table.rows for placed in enumerate(row)):
            kept = [cell] if place in table.right else [it for it in FIGURE.findall(cell) if len(it) <= 24]
            assert [it for it in kept if not any(it in line for line in lines)] == [], (table, lines)
