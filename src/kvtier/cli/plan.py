"""`kvtier plan`: users, capacity, bandwidth, wear, power and cost with and without tiers, and the binding limit."""

import textwrap
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import OutputFile, gpu_option, tell_written, tier_option
from kvtier.errors import ConfigError
from kvtier.plan.hardware import catalogue, hardware_tables
from kvtier.plan.plan import Plan, make_plan, to_json
from kvtier.plan.published import PublishedFigure, compare, published_tables
from kvtier.plan.read_inputs import OPTIONS, gpu_options, load, tier_options
from kvtier.plan.report import write_plot, write_report
from kvtier.plan.settings import settings_toml
from kvtier.plan.tables import assumptions, circumstances, conclusion, heading, tables, verdict
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table

COLUMN = 48
"""Width of each of two columns of assumptions."""


@click.command()
@click.argument("model", required=False)
@gpu_option("GPUs, from the catalogue: 8xh200-sxm, or NAME for one.  [default: 8xh100-sxm]")
@click.option(
    "--tp", metavar="N", help="Tensor-parallel size, for both arms.  [default: of each, what serves most users]"
)
@click.option("--weights", help="Format of the weights: bf16, fp8, fp4.  [default: bf16]")
@click.option("--dtype", help="Format of the KV, as in `kvtier size`.  [default: bf16]")
@click.option("--users", metavar="N", help="Users at the same time.  [default: 80]")
@click.option("--interval", metavar="TIME", help="Mean time between two queries of a user.  [default: 20 s]")
@click.option("--turns", metavar="N", help="Queries of one conversation.  [default: 10]")
@click.option("--system", metavar="TOKENS", help="Tokens of the shared system prompt.  [default: 1000]")
@click.option("--history", metavar="TOKENS", help="Tokens of a conversation before its first query.  [default: 20000]")
@click.option("--question", metavar="TOKENS", help="Tokens that each query adds.  [default: 100]")
@click.option("--answer", metavar="TOKENS", help="Tokens of an answer.  [default: 100]")
@click.option(
    "--reuse",
    metavar="SHARE",
    help="Share of prompt tokens that occur in earlier prompts.  [default: from turns and lengths]",
)
@click.option("--trace", metavar="FILE", help="Measure the traffic in a trace (.jsonl or .csv, also .gz).")
@click.option("--ttft", metavar="TIME", help="Limit of the mean time to first token.  [default: 1 s]")
@tier_option(
    "A tier of all hosts together: host=1TiB, disk=4xpm1753, disk=4x7.68TB?read=20GB/s, s3=1000TB. Repeatable; tiers "
    "that are not named are left out.  [default: host=1TiB, disk=4xpm1753 a host]"
)
@click.option("--file", type=click.Path(path_type=Path), help="TOML file of inputs: hardware, traffic, prices.")
@click.option(
    "--probe",
    type=click.Path(path_type=Path),
    help="Record of `kvtier probe` with measured links; its drive stands for each drive of the plan.",
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one input; may be repeated.")
@click.option("--example", help="Start from an example that ships with kvtier: samsung, or prices (an illustration).")
@click.option("--show-inputs", is_flag=True, help="Also print every input in use with its origin, and the sources.")
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report with charts.")
@click.option("--picture", type=OutputFile("picture"), help="Also write the charts to a .svg or .png file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--hardware", "list_hardware", is_flag=True, help="List the hardware catalogue with its sources.")
def plan(
    model: str | None,
    gpu: str | None,
    tiers: tuple[str, ...],
    file: Path | None,
    probe: Path | None,
    sets: tuple[str, ...],
    example: str | None,
    show_inputs: bool,
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    list_hardware: bool,
    **given: str | None,
) -> None:
    """Plan tiers for MODEL (a name from `kvtier size --list`, or a config.json).

    Compares GPU memory alone with tiers of host memory, drives and shared storage, each at the size that serves most
    users. Prints what tiers change, which of them are worth it, the binding limit and what raises it; then users,
    throughput, power, cost, capacity, bandwidth, queue depth and wear; and last the settings of kvtier that the plan
    implies.

    Every input has a name, a default and an origin (--show-inputs). Later wins: defaults, --example, --file, --probe,
    options, --set. Without prices, costs are left out.
    """
    if list_hardware:
        _list_hardware(as_json)
        return
    values: dict[str, Any] = {"model": model, **given}
    options = {name: values[option] for name, option in OPTIONS.items() if option in values}
    options |= gpu_options(gpu) if gpu is not None else {}
    inputs = load(example=example or "", file=file, options=options | tier_options(tiers), sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")

    result = make_plan(inputs)
    published = compare(example, result) if example else []
    if report is not None:
        write_report(report, result, published)
    if picture is not None:
        write_plot(picture, result)
    tell_written(report, picture)
    if as_json:
        figures = {"published": [it.to_json() for it in published]} if example else {}
        answer = {"verdict": verdict(result), "conclusion": conclusion(result), "settings": settings_toml(result)}
        print_json({**to_json(result), **figures, **answer})
        return
    _print(result, published, show_inputs=show_inputs)


def _print(result: Plan, published: list[PublishedFigure], *, show_inputs: bool) -> None:
    click.secho(textwrap.fill(f"{verdict(result)}.", 100), bold=True)
    for sentence in conclusion(result):
        _wrapped(sentence, 2)
    _wrapped(heading(result), 2)
    shown = list(tables(result))
    if published:
        shown += published_tables(published)
    for table in shown:
        click.echo()
        print_table(table)
    click.echo()
    inputs = assumptions(result)
    for name, text in circumstances(result):
        _wrapped(f"  {name:<10}{text}", 12)
    if show_inputs:
        _print_assumptions(inputs)
        for name, source, date in result.deployment.sources:
            _wrapped(f"  source of {name}: {source}; read {date}", 4)
    else:
        defaults = sum(row[2].startswith("default") for row in inputs.rows)
        _wrapped(f"  inputs    {len(inputs.rows)}, {defaults} of them by default; --show-inputs lists them", 12)
    click.echo()
    click.echo(settings_toml(result), nl=False)


def _print_assumptions(table: Table) -> None:
    """Inputs by origin, in two columns."""
    groups: dict[str, list[str]] = {}
    for name, value, origin, _ in table.rows:
        groups.setdefault("given" if origin.startswith("--") else origin, []).append(f"{name} = {value}")
    click.echo()
    click.secho("Assumptions", bold=True)
    # Options and files first, then catalogue and model, then defaults.
    for origin in sorted(groups, key=lambda it: (it.startswith("default"), it.startswith(("catalogue", "model ")))):
        cells = groups[origin]
        if len(cells) == 1:
            click.echo(f"  {origin}: {cells[0]}")
            continue
        click.echo(f"  {origin}:")
        narrow = [cell for cell in cells if len(cell) < COLUMN]
        for left, right in zip_longest(narrow[::2], narrow[1::2], fillvalue=""):
            click.echo(f"    {left:<{COLUMN}}{right}".rstrip())
        for cell in cells:
            if len(cell) >= COLUMN:
                click.echo(f"    {cell}")


def _wrapped(text: str, indent: int) -> None:
    click.echo(textwrap.fill(text, 100, subsequent_indent=" " * indent))


def _list_hardware(as_json: bool) -> None:
    items = [it for kind in catalogue().values() for it in kind.values()]
    if as_json:
        print_json(
            [{"kind": it.kind, "name": it.name, **it.values, "source": it.source, "date": it.date} for it in items]
        )
        return
    for table in hardware_tables():
        print_table(table)
        click.echo()
    click.echo("Sources, with the date of reading:")
    for source, date in dict.fromkeys((it.source, it.date) for it in items):
        names = ", ".join(it.name for it in items if it.source == source)
        _wrapped(f"  {names}: {source}; {date}", 4)
