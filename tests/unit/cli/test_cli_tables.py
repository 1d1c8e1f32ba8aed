"""Tables on narrow terminals: no figure is broken over two lines or cut, no line is wider than the terminal."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.cli.main import run
from kvtier.report import table as report_table
from kvtier.testing.tier import frame_of, object_name
from kvtier.tier.directory.tier import DirectoryTier

FIGURE = re.compile(r"[^\s()]*\d[^\s()]*")
LINE = {"timestamp": 0, "input_length": 1 << 15, "output_length": 3, "hash_runs": [[1, 64]], "session_id": "a"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Of each table and width what it was asked to show and what it printed."""
    monkeypatch.setattr(report_table, "sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    tables: list[tuple] = []
    draw = report_table._draw

    def watched(table):
        for width in (80, 60):
            with monkeypatch.context() as inner:
                inner.setattr(report_table, "_draw", draw)
                inner.setenv("COLUMNS", str(width))
                capsys.readouterr()
                draw(table)
            tables.append((width, table, capsys.readouterr().out.splitlines()))

    monkeypatch.setattr(report_table, "_draw", watched)
    return tables


def check(tables: list) -> None:
    assert tables
    for width, table, lines in tables:
        assert max(map(len, lines)) <= width, lines
        for row in table.rows:
            for place, cell in enumerate(row):
                for it in [cell] if place in table.right else [it for it in FIGURE.findall(cell) if len(it) <= 24]:
                    assert any(it in line for line in lines), (table.columns, row, it, "\n".join(lines))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tier = DirectoryTier(tmp_path / "store", capacity_bytes=1 << 30)
    for number in range(3):
        tier.write(object_name(number), frame_of(number))
    tier.close()
    return tmp_path / "store"


COMMANDS = [
    "size llama-3.3-70b --users 1000 --tokens 128k --tp 8",
    "size gpt-oss-120b",
    "size --list",
    "config show",
    "plan llama-3.1-8b",
    "plan --example samsung",
    "plan --hardware",
    "replay describe TRACE",
    "replay TRACE --policy lru,default --capacity-tokens 1M,inf --jobs 1",
    "replay TRACE --tier host=64GiB --tier disk=4TiB?read=12GB/s --jobs 1",
    "inspect ls STORE",
    "inspect stat STORE",
    "inspect verify STORE",
    "inspect show STORE OBJECT",
    "bench core --repeats 1",
    "bench tier disk:DIR --size 64KiB --in-flight 1 --repeats 1 --sample 64KiB",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_breaks_a_figure(command, drawn, store, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps({**LINE, 'timestamp': n * 123_456})}\n" for n in range(9)))
    names = {"TRACE": str(trace), "STORE": str(store), "OBJECT": object_name(1).hex()}
    words = command.replace("DIR", str(tmp_path / "kv")).split()
    assert run([names.get(it, it) for it in words]) in (0, 1)
    check(drawn)


def test_no_table_breaks_a_figure(drawn):
    chance = random.Random(18)
    for _ in range(80):
        count = chance.randrange(1, 14)
        numeric = chance.randrange(count + 1)
        text = ("a few words of text", "x" * 70, "/a/path/that/is/long/" * 3, "12.5 GiB of 1,024 GiB", "", "(3.25x)")
        numbers = ("1", "1,234,567,890", "12.34 GiB", "-", "98.6%", "123,456.78 GiB/s")
        rows = [
            [chance.choice(numbers if place >= count - numeric else text) for place in range(count)]
            for _ in range(chance.randrange(1, 5))
        ]
        headings = [
            chance.choice(("tier", "hit rate", "of what is possible", "GB/s", "written tokens")) for _ in rows[0]
        ]
        drawn.clear()
        report_table.print_table(report_table.Table(headings, rows, numeric))
        check(drawn)
