"""`kvtier demo`: replay real conversations without kvtier, cold, and warm after a restart."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from kvtier.cli.options import OutputFile, tell_written
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvtier.bench.demo import DemoSettings
    from kvtier.bench.demo_result import DemoResult

REPORT = Path("demo-out/report.html")

DEFAULTS = {"model_size": "small", "sessions": 8, "new_tokens": 16, "seed": 11}
"""As in `kvtier.bench.demo`, which is not imported to show the help; a test compares them."""


@click.command()
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Keep the store in this directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; write a report only where --report is given.")
@click.option("--report", type=OutputFile(), help=f"HTML report  [default: {REPORT}]")
@click.option("--record", type=OutputFile(), help="Write all samples and conditions as a JSON record.")
@click.option(
    "--sessions", type=int, help=f"Conversations, the shortest first  [default: {DEFAULTS['sessions']} of 12]"
)
@click.option("--requests", type=int, help="Only the first so many requests  [default: all]")
@click.option("--new-tokens", type=int, help=f"Tokens of each answer  [default: {DEFAULTS['new_tokens']}]")
@click.option("--model-size", help=f"tiny, small or medium  [default: {DEFAULTS['model_size']}]")
@click.option("--seed", type=int, help=f"Of the model's weights  [default: {DEFAULTS['seed']}]")
@click.option("--threads", type=int, help="Threads of torch  [default: one for each core]")
@click.pass_context
def demo(context: click.Context, as_json: bool, report: Path | None, record: Path | None, **given: object) -> int:
    """Replay real agent conversations through a small language model made here, and compare.

    Three passes, each in a process of its own: without kvtier, with it and nothing stored yet, and again in a new
    process that reads from disk. In a --dir that an earlier call has used, a fourth reads what that call left.
    Needs the extra "transformers"; downloads nothing.

    Exit code 1 when passes differ in a token, or when the warm pass restores less than 90 % of what can be restored.
    """
    from kvtier.bench.demo import DemoSettings, check_libraries, run_demo
    from kvtier.bench.demo_process import DemoError
    from kvtier.bench.demo_summary import problems
    from kvtier.report.output import check_writable

    settings = DemoSettings(**cast("dict[str, Any]", {name: it for name, it in given.items() if it is not None}))
    check_libraries()
    if report is None and not as_json:
        REPORT.parent.mkdir(exist_ok=True)
        check_writable("--report", REPORT)
        report = REPORT
    try:
        with _progress() as watcher:
            result = run_demo(settings, watcher)
    except DemoError as error:  # no mistake of the caller's, so not exit code 2
        click.echo(f"kvtier: {error}", err=True)
        context.exit(1)
    if record is not None:
        _write_record(record, result, settings, given)
    if report is not None:
        from kvtier.bench.demo_report import write_report

        write_report(report, result)
    if as_json:
        print_json(result.as_dict())
    else:
        _print(result)
    tell_written(report, record)
    for problem in problems(result):
        click.echo(f"kvtier: {problem}", err=True)
    context.exit(0 if result.is_good else 1)


def _write_record(path: Path, result: "DemoResult", settings: "DemoSettings", given: dict[str, object]) -> None:
    from dataclasses import asdict

    from kvtier.bench.record import Setting, make_record
    from kvtier.report.output import write_json

    values = {**asdict(settings), "directory": None if settings.directory is None else "given"}
    named = {name: Setting(value, "default" if given.get(name) is None else "flag") for name, value in values.items()}
    named["threads"] = Setting(result.threads, named["threads"].origin)
    named |= {name: Setting(value, origin) for name, (value, origin) in result.cache_settings.items()}
    write_json(
        "--record",
        path,
        make_record(
            "demo",
            settings=named,
            seed=settings.seed,
            results={**result.as_dict(), "directory": values["directory"]},
            samples=result.samples_as_dicts(),
            directory=settings.directory or Path(),
        ),
    )


def _print(result: "DemoResult") -> None:
    from kvtier.bench.demo_summary import conditions_in_short, headline, table

    click.echo(f"Model: {result.model}\n  ({result.why})")
    click.echo(f"Requests: {result.conversations}\n")
    headings, rows = table(result)
    print_table(Table(headings, rows, numeric=len(result.passes)))
    click.echo(f"\n{headline(result)}\n{conditions_in_short(result)}")
    if result.directory is not None:
        click.echo(f"Store: {result.directory}")


class _Lines:
    """Progress where stderr is not a terminal: a line now and then."""

    def note(self, text: str) -> None:
        click.echo(f"demo: {text}", err=True)

    def passing(self, name: str, requests_total: int) -> None:
        pass

    def answered(self) -> None:
        pass


class _Bar:
    """One progress bar for all passes."""

    def __init__(self, progress: "Progress") -> None:
        self.progress = progress
        self.task = progress.add_task("set-up", total=None)

    def note(self, text: str) -> None:
        self.progress.console.print(text, style="dim", highlight=False)

    def passing(self, name: str, requests_total: int) -> None:
        self.progress.update(self.task, description=f"pass {name}", total=requests_total)

    def answered(self) -> None:
        self.progress.advance(self.task)


@contextmanager
def _progress() -> Generator[_Lines | _Bar]:
    import sys

    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<14}"), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Bar(progress)
