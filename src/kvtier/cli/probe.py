"""`kvtier probe`: how fast this machine's links are, and what is misconfigured."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import click

from kvtier.cli.options import OutputFile, WorkDirectory, tell_written
from kvtier.cli.progress import progress
from kvtier.config.kinds import parse_seconds, parse_size
from kvtier.errors import ConfigError
from kvtier.report.output import print_json
from kvtier.report.table import print_table

if TYPE_CHECKING:
    from kvtier.bench.record import Setting
    from kvtier.config.loader import Loaded
    from kvtier.probe.result import ProbeResult
    from kvtier.probe.run import Effort


_Value = TypeVar("_Value", int, float)


@click.command()
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    help="Measure both kinds of tier in this directory instead of the configured ones.",
)
@click.option(
    "--file",
    "--config",
    "file",
    type=click.Path(path_type=Path),
    help="TOML file of settings [default: $KVTIER_CONFIG].",
)
@click.option("--set", "flags", multiple=True, metavar="SECTION.KEY=VALUE", help="Set one value; may be repeated.")
@click.option("--quick", is_flag=True, help="Two sizes, two depths, a fraction of the time and bytes.")
@click.option("--size", "sizes", multiple=True, metavar="SIZE", help="Bytes of an object, repeatable.")
@click.option("--depth", "depths", multiple=True, type=click.IntRange(1, 256), help="Operations at once, repeatable.")
@click.option("--seconds", metavar="TIME", help="At most so long for each measure.  [default: 0.5 s]")
@click.option("--bytes", "write_bytes", metavar="SIZE", help="At most so much is written in all.  [default: 8 GiB]")
@click.option("--report", type=OutputFile(), help="Also write an HTML report with pictures.")
@click.option("--plot", type=OutputFile(), help="Also write the pictures to a .svg or .png.")
@click.option(
    "--record",
    type=OutputFile(),
    metavar="FILE",
    help="Also write the JSON record (commit, machine, settings, figures) to FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def probe(
    directory: Path | None,
    file: Path | None,
    flags: tuple[str, ...],
    quick: bool,
    sizes: tuple[str, ...],
    depths: tuple[int, ...],
    seconds: str | None,
    write_bytes: str | None,
    report: Path | None,
    plot: Path | None,
    record: Path | None,
    as_json: bool,
) -> int:
    """Measure host memory, the GPU's link, each configured tier, checksum and codecs; name what is misconfigured.

    Tiers are measured in temporary stores on the same file systems, which are removed at the end; existing stores are
    not opened. Exit code 1 when a tier could not be measured.
    """
    from dataclasses import asdict

    from kvtier.bench.record import make_record
    from kvtier.config.loader import load
    from kvtier.probe.run import Probe, where_text
    from kvtier.report.output import check_chart, check_matplotlib, write_json

    if report is not None:
        check_matplotlib("--report")
    if plot is not None:
        check_chart("--plot", plot)
    loaded = load(file, flags=flags)
    effort, origins = _effort(quick, sizes, depths, seconds, write_bytes)
    it = Probe(loaded, directory, effort)
    click.echo(f"{it.bounds}; {where_text(loaded.config, directory)}.", err=True)
    with ended_by_signals(), progress("probe", it.bounds.points) as advance:
        result = it.run(lambda _what: advance(1))
    if record is not None:
        settings = {**origins, **_settings(loaded, directory)}
        made = make_record("probe", settings=settings, seed=None, results=asdict(result), directory=directory)
        write_json("--record", record, made)
    if report is not None:
        from kvtier.probe.report import write_report

        write_report(report, result)
    if plot is not None:
        from kvtier.probe.report import write_plot

        write_plot(plot, result)
    if as_json:
        print_json(asdict(result))
    else:
        _print(result)
    tell_written(report, plot, record)
    return 0 if result.is_complete else 1


def _effort(
    quick: bool, sizes: tuple[str, ...], depths: tuple[int, ...], seconds: str | None, write_bytes: str | None
) -> "tuple[Effort, dict[str, Setting]]":
    from kvtier.bench.record import Setting
    from kvtier.probe.run import QUICK, USUAL, Effort

    usual = QUICK if quick else USUAL
    effort = Effort(
        sizes=tuple(sorted({_read("--size", it, parse_size) for it in sizes})) or usual.sizes,
        depths=tuple(sorted(set(depths))) or usual.depths,
        seconds=usual.seconds if seconds is None else _read("--seconds", seconds, parse_seconds),
        write_bytes=usual.write_bytes if write_bytes is None else _read("--bytes", write_bytes, parse_size),
    )
    given = {"sizes": sizes, "depths": depths, "seconds": seconds, "write_bytes": write_bytes}
    origin = "flag --quick" if quick else "default"
    values = {
        "sizes": list(effort.sizes),
        "depths": list(effort.depths),
        "seconds": effort.seconds,
        "write_bytes": effort.write_bytes,
    }
    return effort, {name: Setting(it, "flag" if given[name] else origin) for name, it in values.items()}


def _read(option: str, text: str, parse: Callable[[str], _Value]) -> _Value:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}; allowed: a number with a unit, such as 4MiB or 500ms") from None


def _settings(loaded: "Loaded", directory: Path | None) -> "dict[str, Setting]":
    """What of the settings decides what is measured."""
    from kvtier.bench.record import Setting
    from kvtier.config.schema import settings
    from kvtier.config.sections import SECTIONS, value_of

    names = {"host.capacity_bytes", "host.page_lock", "directory.direct_io", "disk.direct_io"}
    told = {
        it.name: Setting(value_of(loaded.config, it), str(loaded.origins[it.name]))
        for kind in SECTIONS.values()
        for it in settings(kind)
        if it.name in names
    }
    return {**told, "directory": Setting(None if directory is None else str(directory), "flag")}


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Let a request to end act like Ctrl-C, so that nothing is left behind then either."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(result: "ProbeResult") -> None:
    from kvtier.probe.report import place_lines, table

    shown = table(result)
    print_table(shown)
    for line in place_lines(result):
        click.echo(line)
    for text in result.skipped:
        click.echo(f"not measured: {text}")
    for text in result.warnings:
        click.secho(f"warning: {text}", fg="yellow")
    if not result.warnings:
        click.echo("No misconfiguration found.")
