"""Judges KV sizes that others have published, cell by cell: the tables of ``parts/published_sizes.toml``.

    python bench/published_sizes.py

`kvtier size MODEL --check FIGURE` explains a single figure in the same way.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import run as run_script
from bench.parts.size_check import published_cells

from kvtier.report.format import binary, decimal
from kvtier.report.table import Table, print_table


@click.command()
def published_sizes() -> None:
    """Judge the published tables, cell by cell."""
    cells = published_cells()
    for document in dict.fromkeys(cell.document for cell in cells):
        own = [cell for cell in cells if cell.document == document]
        rows = [
            (cell.row, cell.column, cell.printed, decimal(cell.bytes), binary(cell.bytes), cell.verdict) for cell in own
        ]
        print_table(Table(("row", "column", "printed", "exact", "", "verdict"), rows, title=document))
        for cell in own:
            if cell.because:
                click.echo(f"- {cell.row}, {cell.column}, {cell.printed}: {cell.because}")


if __name__ == "__main__":
    run_script(published_sizes)
