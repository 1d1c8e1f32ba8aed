"""`kvtier plan`: what a KV cache beside the GPU buys, what it must provide, and which limit binds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.options import OutputFile, tell_written
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table

if TYPE_CHECKING:
    from kvtier.plan import Plan
    from kvtier.plan.stated import Stated
    from kvtier.report.table import Table

COLUMN = 48
"""Assumptions are shown in two columns of this width, where they fit."""


@click.command()
@click.argument("model", required=False)
@click.option("--gpu", help="Kind of GPU, of the catalogue.  [default: h100-sxm]")
@click.option("--gpus", metavar="N", help="GPUs.  [default: 8]")
@click.option("--tp", metavar="N", help="GPUs that serve one copy of the model.  [default: 1]")
@click.option("--weights", help="Format of the weights: bf16, fp8, fp4.  [default: bf16]")
@click.option("--dtype", help="Format of the KV, as `kvtier size` knows it.  [default: bf16]")
@click.option("--users", metavar="N", help="Users at the same time.  [default: 80]")
@click.option("--interval", metavar="TIME", help="From one query of a user to the next.  [default: 20 s]")
@click.option("--turns", metavar="N", help="Queries of one conversation.  [default: 10]")
@click.option("--system", metavar="TOKENS", help="System prompt that all share.  [default: 1000]")
@click.option("--history", metavar="TOKENS", help="What a conversation begins with.  [default: 20000]")
@click.option("--question", metavar="TOKENS", help="What each query adds.  [default: 100]")
@click.option("--answer", metavar="TOKENS", help="Tokens of an answer.  [default: 100]")
@click.option("--reuse", metavar="SHARE", help="Share of prompt tokens seen before.  [default: from turns and lengths]")
@click.option("--trace", metavar="FILE", help="Measure the traffic in a trace instead (.jsonl or .csv, also .gz).")
@click.option("--ttft", metavar="TIME", help="Mean time to first token, at most.  [default: 1 s]")
@click.option("--host", metavar="SIZE", help="Host memory for KV; 0: none.  [default: 1 TiB]")
@click.option("--drive", help="Kind of drive, of the catalogue.  [default: pm1753]")
@click.option("--drives", metavar="N", help="Drives; 0: none.  [default: 4]")
@click.option("--file", type=click.Path(path_type=Path), help="TOML file of inputs: hardware, traffic, your prices.")
@click.option(
    "--probe",
    type=click.Path(path_type=Path),
    help="Record of `kvtier probe`: links as measured, one drive of --drives.",
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one input; may be repeated.")
@click.option("--example", help="Start from an example that ships with kvtier, such as samsung.")
@click.option("--report", type=OutputFile(), help="Also write an HTML report with pictures.")
@click.option("--plot", type=OutputFile(), help="Also write the pictures to a .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--hardware", "list_hardware", is_flag=True, help="List the hardware catalogue with its sources, and end."
)
def plan(
    model: str | None,
    file: Path | None,
    probe: Path | None,
    sets: tuple[str, ...],
    example: str | None,
    report: Path | None,
    plot: Path | None,
    as_json: bool,
    list_hardware: bool,
    **given: str | None,
) -> None:
    """Plan tiers for MODEL (a name that `kvtier size` knows, or a config.json).

    Compares GPU memory alone with tiers of host memory, drives and shared storage: users within the limit of the time
    to first token, throughput, power, cost, capacity, bandwidth, queue depth and wear; and says which limit binds,
    which is next, and how the answer depends on each input.

    Every input has a name, a default and an origin, and all are printed. Later wins: defaults, --example, --file,
    --probe, options, --set. Prices are yours: without them, costs are left out.
    """
    if list_hardware:
        _list_hardware(as_json)
        return
    from kvtier.errors import ConfigError
    from kvtier.plan import OPTIONS, compare, load, make_plan

    values: dict[str, Any] = {"model": model, **given}
    options = {name: values[option] for name, option in OPTIONS.items()}
    inputs = load(example=example or "", file=file, options=options, sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")
    _check_outputs(report, plot)
    result = make_plan(inputs)
    stated = compare(example, result) if example else None
    if report is not None:
        from kvtier.plan.report import write_report

        write_report(report, result, stated)
    if plot is not None:
        from kvtier.plan.report import write_plot

        write_plot(plot, result)
    tell_written(report, plot)
    if as_json:
        from kvtier.plan import as_dict

        print_json(as_dict(result, stated))
        return
    _print(result, stated)


def _check_outputs(report: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written before anything is computed."""
    if report is None and plot is None:
        return
    from kvtier.report.output import check_chart, check_matplotlib

    if report is not None:
        check_matplotlib("--report")
    if plot is not None:
        check_chart("--plot", plot)


def _print(result: "Plan", stated: "list[Stated] | None") -> None:
    from kvtier.plan.tables import assumptions, circumstances, heading, tables, verdict

    click.secho(heading(result), bold=True)
    for name, text in circumstances(result):
        _wrapped(f"  {name:<10}{text}", 12)
    _print_assumptions(assumptions(result))
    for name, source, date in result.sources:
        _wrapped(f"  source of {name}: {source}; read {date}", 4)
    for table in tables(result, stated):
        click.echo()
        print_table(table)
    click.echo()
    for sentence in verdict(result):
        _wrapped(sentence, 2)


def _print_assumptions(table: "Table") -> None:
    """All of them, by where they come from; those without a word to say on it two to a line."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, value, origin, _ in table.rows:
        groups.setdefault("given" if origin.startswith("--") else origin, []).append((name, value))
    click.echo()
    click.secho("Assumptions", bold=True)
    # What was given comes first, then what the catalogue and the model say, then defaults.
    for origin in sorted(groups, key=lambda it: (it.startswith("default"), it.startswith(("catalogue", "model ")))):
        cells = [f"{name} = {value}" for name, value in groups[origin]]
        lone = len(cells) == 1
        click.echo(f"  {origin}: {cells[0]}" if lone else f"  {origin}:")
        for line in () if lone else _in_columns(cells):
            click.echo(f"    {line}")


def _in_columns(cells: list[str]) -> list[str]:
    lines: list[str] = []
    waiting = ""
    for cell in cells:
        if len(cell) >= COLUMN:
            lines += [waiting] if waiting else []
            lines.append(cell)
            waiting = ""
        elif waiting:
            lines.append(f"{waiting:<{COLUMN}}{cell}")
            waiting = ""
        else:
            waiting = cell
    return [*lines, waiting] if waiting else lines


def _wrapped(text: str, indent: int) -> None:
    import textwrap

    click.echo(textwrap.fill(text, 100, subsequent_indent=" " * indent))


def _list_hardware(as_json: bool) -> None:
    from kvtier.plan.catalogue import catalogue
    from kvtier.plan.tables import hardware

    items = [it for kind in catalogue().values() for it in kind.values()]
    if as_json:
        print_json(
            [{"kind": it.kind, "name": it.name, **it.values, "source": it.source, "date": it.date} for it in items]
        )
        return
    for table in hardware():
        print_table(table)
        click.echo()
    click.echo("Sources, and when they were read:")
    for source, date in dict.fromkeys((it.source, it.date) for it in items):
        names = ", ".join(it.name for it in items if it.source == source)
        _wrapped(f"  {names}: {source}; {date}", 4)
