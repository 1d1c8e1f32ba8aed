"""`kvtier plan`: users, capacity, bandwidth, wear, power and cost with and without tiers, and the binding limit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.options import PictureFile, ReportFile
from kvtier.report.output import print_json
from kvtier.report.table import print_table, print_text

if TYPE_CHECKING:
    from kvtier.plan.published import PublishedFigure


@click.command()
@click.argument("model", required=False)
@click.option(
    "--gpu", metavar="[Nx]NAME", help="GPUs, from the catalogue: 8xh200-sxm, or NAME for one.  [default: 8xh100-sxm]"
)
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
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="NAME=SIZE",
    help="A tier of all hosts together: host=1TiB, disk=4xpm1753, disk=4x7.68TB, s3=1000TB. Repeatable; tiers that "
    "are not named are left out.  [default: host=1TiB, disk=4xpm1753 a host]",
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
@click.option("--report", type=ReportFile(), help="Also write an HTML report with charts.")
@click.option("--picture", type=PictureFile(), help="Also write the charts to a .svg or .png file.")
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
    from kvtier.errors import ConfigError
    from kvtier.plan.read_inputs import OPTIONS, gpu_options, load, tier_options

    values: dict[str, Any] = {"model": model, **given}
    options = {name: values[option] for name, option in OPTIONS.items() if option in values}
    options |= gpu_options(gpu) if gpu is not None else {}
    inputs = load(example=example or "", file=file, options=options | tier_options(tiers), sets=sets, probe=probe)
    if not inputs.model.name:
        raise ConfigError("no model is given; name one, such as `kvtier plan llama-3.1-8b`, or --example samsung")

    from kvtier.plan.answer import conclusion, verdict
    from kvtier.plan.plan import make_plan, to_json
    from kvtier.plan.report import plan_report
    from kvtier.plan.settings import settings_toml

    result = make_plan(inputs)
    published: list[PublishedFigure] = []
    if example:
        from kvtier.plan.published import compare

        published = compare(example, result)
    figures = {"published": [it.to_json() for it in published]} if example else {}
    answer = {"verdict": verdict(result), "conclusion": conclusion(result), "settings": settings_toml(result)}
    shown = plan_report(result, published, shows_inputs=show_inputs)
    shown.show({**to_json(result), **figures, **answer}, as_json=as_json, page=report, picture=picture)


def _list_hardware(as_json: bool) -> None:
    from kvtier.plan.hardware import catalogue, hardware_tables

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
