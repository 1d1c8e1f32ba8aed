"""KV sizes that others have published: a verdict on each, and the counting convention behind a figure.

    python bench/published_sizes.py
    python bench/published_sizes.py qwen3-8b "150 KB" --tokens 128Ki

Without arguments the program judges the tables of ``parts/published_sizes.toml``, cell by cell. With a model of
`kvtier size` and figures it lists the conventions that reproduce each figure's digits, the fewest first.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import run as run_script
from bench.parts.size_check import published_cells

from kvtier.cli.options import Quantity
from kvtier.report.format import binary, decimal
from kvtier.report.table import Table, print_table
from kvtier.size import of
from kvtier.size.check import check

MATCHES_SHOWN = 3


@click.command()
@click.argument("model", required=False)
@click.argument("figures", nargs=-1)
@click.option("--tokens", type=Quantity(), multiple=True, help="Tokens of sessions that a figure may be of.")
def published_sizes(model: str | None, figures: tuple[str, ...], tokens: tuple[int, ...]) -> None:
    """Judge the published tables, or explain FIGURES of MODEL."""
    if model is None:
        _print_tables()
        return
    kv = of(model)
    for figure in figures:
        verdict = check(kv, figure, [(each, 1) for each in tokens])
        click.echo("\n  or ".join([verdict.text, *map(verdict.match_text, verdict.matches[1:MATCHES_SHOWN])]))


def _print_tables() -> None:
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
