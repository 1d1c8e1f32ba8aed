"""`kvtier plan`: reads the inputs, and prints the plan."""

from pathlib import Path
from typing import Any

import click

from kvtier.errors import ConfigError
from kvtier.plan.answer import conclusion, request, verdict
from kvtier.plan.hardware import catalogue, hardware_tables
from kvtier.plan.plan import make_plan, to_json
from kvtier.plan.read_inputs import OPTIONS, gpu_options, load, tier_options, weight_options
from kvtier.plan.report import plan_report
from kvtier.plan.settings import settings_toml
from kvtier.report.output import print_json
from kvtier.report.table import print_table, print_text
from kvtier.size import hub
from kvtier.trace.formats.base import TraceWarning


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
    names = {name: option.replace("-", "_") for name, option in OPTIONS.items()}
    options = {name: values[option] for name, option in names.items() if option in values}
    options |= gpu_options(gpu) if gpu is not None else {}
    options |= weight_options(weights) if weights is not None else {}
    inputs = load(example=example or "", file=file, options=options | tier_options(tiers), sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")

    result = make_plan(inputs)
    for note in result.deployment.workload.notes:
        if isinstance(note, TraceWarning):
            click.echo(f"kvtier: trace {inputs.traffic.trace}: {note}", err=True)
    texts = {"request": request(result), "verdict": verdict(result), "conclusion": conclusion(result)}
    answer = {**texts, "settings": settings_toml(result)}
    shown = plan_report(result, shows_inputs=show_inputs)
    shown.show(to_json(result) | answer, as_json=as_json, page=report, picture=picture)


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
        print_text(f"  {names}: {source}; {date}", 4)
