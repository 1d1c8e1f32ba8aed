"""`kvtier plan`: reads the inputs, and prints the plan."""

from pathlib import Path
from typing import Any

import click

from kvtier.errors import ConfigError
from kvtier.report.output import print_json
from kvtier.report.table import print_table, print_text
from kvtier.tools.plan.hardware import catalogue, hardware_tables
from kvtier.tools.plan.lossy_classes import class_plans, loss_table
from kvtier.tools.plan.plan import make_plan, to_json
from kvtier.tools.plan.plan_text import conclusion, request, verdict
from kvtier.tools.plan.read_inputs import OPTIONS, gpu_options, load, tier_options, weight_options
from kvtier.tools.plan.report import plan_report
from kvtier.tools.plan.settings import settings_toml
from kvtier.tools.size import hub
from kvtier.tools.trace.formats.base import TraceWarning


def run(
    *,
    model: str | None,
    fetch: bool,
    ignore: tuple[str, ...],
    gpu: str | None,
    weights: str | None,
    tiers: tuple[str, ...],
    file: Path | None,
    probe: Path | None,
    sets: tuple[str, ...],
    example: str | None,
    loss: str | None,
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
    values: dict[str, Any] = {"model": model, "ignore": ",".join(ignore) or None, **given}
    names = {name: option.replace("-", "_") for name, option in OPTIONS.items()}
    options = {
        **{name: values[option] for name, option in names.items() if option in values},
        **(gpu_options(gpu) if gpu is not None else {}),
        **(weight_options(weights) if weights is not None else {}),
        **tier_options(tiers),
    }
    inputs = load(example=example or "", file=file, options=options, sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")

    result = make_plan(inputs)
    for note in result.deployment.workload.notes:
        if isinstance(note, TraceWarning):
            click.echo(f"kvtier: trace {inputs.traffic.trace}: {note}", err=True)
    texts = {"request": request(result), "verdict": verdict(result), "conclusion": conclusion(result)}
    classes = class_plans((result.given.need or result.given).deployment, loss) if loss else []
    losses = {"loss": [it._asdict() for it in classes]} if loss else {}
    answer: dict[str, Any] = {**texts, "settings": settings_toml(result), **losses}
    shown = plan_report(result, [loss_table(result, classes)] if loss else [], shows_inputs=show_inputs)
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
