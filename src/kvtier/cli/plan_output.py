"""`kvtier plan`: reads the inputs, and prints the plan."""

import textwrap
from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import tell_written
from kvtier.errors import ConfigError
from kvtier.plan.hardware import catalogue, hardware_tables
from kvtier.plan.plan import Plan, make_plan, to_json
from kvtier.plan.read_inputs import OPTIONS, gpu_options, load, tier_options, weight_options
from kvtier.plan.report import write_plot, write_report
from kvtier.plan.settings import settings_toml
from kvtier.plan.tables import assumptions, circumstances, conclusion, heading, tables, verdict
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table
from kvtier.size import hub


def run(
    *,
    model: str | None,
    fetch: bool,
    gpu: str | None,
    weights: str | None,
    tiers: tuple[str, ...],
    file: Path | None,
    probe: Path | None,
    sets: tuple[str, ...],
    example: str | None,
    show_inputs: bool,
    report: Path | None,
    picture: Path | None,
    as_json: bool,
    **given: str | None,
) -> None:
    """Make a plan, and print it.

    Raises:
        ConfigError: an input is wrong, or no model is given.
    """
    if fetch and model:
        hub.fetch(model)
    values: dict[str, Any] = {"model": model, **given}
    options = {name: values[option] for name, option in OPTIONS.items() if option in values}
    options |= gpu_options(gpu) if gpu is not None else {}
    options |= weight_options(weights) if weights is not None else {}
    inputs = load(example=example or "", file=file, options=options | tier_options(tiers), sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")

    result = make_plan(inputs)
    if report is not None:
        write_report(report, result)
    if picture is not None:
        write_plot(picture, result)
    tell_written(report, picture)
    if as_json:
        answer = {"verdict": verdict(result), "conclusion": conclusion(result), "settings": settings_toml(result)}
        print_json(to_json(result) | answer)
        return
    _print(result, show_inputs=show_inputs)


def _print(result: Plan, *, show_inputs: bool) -> None:
    click.secho(textwrap.fill(f"{verdict(result)}.", 100), bold=True)
    for sentence in conclusion(result):
        _wrapped(sentence, 2)
    _wrapped(heading(result), 2)
    for table in tables(result):
        click.echo()
        print_table(table)
    click.echo()
    inputs = assumptions(result)
    for name, text in circumstances(result):
        _wrapped(f"  {name:<10}{text}", 12)
    if show_inputs:
        print_table(Table(inputs.columns[:3], [row[:3] for row in inputs.rows], title=inputs.title))
        for name, source, date in result.deployment.sources:
            _wrapped(f"  source of {name}: {source}; read {date}", 4)
    else:
        defaults = sum(row[2].startswith("default") for row in inputs.rows)
        _wrapped(f"  inputs    {len(inputs.rows)}, {defaults} of them by default; --show-inputs lists them", 12)
    click.echo()
    click.echo(settings_toml(result), nl=False)


def _wrapped(text: str, indent: int) -> None:
    click.echo(textwrap.fill(text, 100, subsequent_indent=" " * indent))


def list_catalogue(as_json: bool) -> None:
    """Print the hardware catalogue with its sources."""
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
