"""`kvtier probe`: measures bandwidth and latency of this machine's links, and warns of misconfiguration."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtier.cli.config import settings_options
from kvtier.cli.options import Duration, OutputFile, Quantity
from kvtier.config.loader import Loaded, load
from kvtier.config.sections import all_settings, value_of
from kvtier.report.output import progress
from kvtier.tools.options import Bytes, WorkDirectory, ended_by_signals, origin
from kvtier.tools.run_record import RecordedSetting, write_record

if TYPE_CHECKING:
    from kvtier.tools.probe.run import Effort


@click.command()
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    help="Measure each kind of tier that keeps files in this directory, instead of the configured ones.",
)
@settings_options
@click.option("--quick", is_flag=True, help="Measure two sizes and two depths, in a fraction of the time and bytes.")
@click.option("--size", "sizes", type=Bytes(), multiple=True, help="Size of an object, repeatable.")
@click.option(
    "--depth", "depths", multiple=True, type=Quantity(1, 256), help="Number of parallel operations, repeatable."
)
@click.option("--seconds", type=Duration(), help="Time limit of each measurement.  [default: 0.5 s]")
@click.option("--bytes", "write_bytes", type=Bytes(), help="Byte limit of all writes together.  [default: 8 GiB]")
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report with charts.")
@click.option("--picture", type=OutputFile("picture"), help="Also write the charts to a .svg or .png file.")
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
    tiers: tuple[str, ...],
    flags: tuple[str, ...],
    quick: bool,
    sizes: tuple[int, ...],
    depths: tuple[int, ...],
    seconds: float | None,
    write_bytes: int | None,
    report: Path | None,
    picture: Path | None,
    record: Path | None,
    as_json: bool,
) -> int:
    """Measure host memory, the GPU's link, each configured tier, checksum and codecs; warn of misconfiguration.

    Tiers are measured in temporary stores on the same file systems, which are removed at the end. Existing stores are
    not opened. Exits with code 1 if a tier could not be measured.
    """
    from kvtier.tools.probe.report import probe_report
    from kvtier.tools.probe.run import ProbeRun, where_text

    loaded = load(file, flags=flags, tiers=tiers)
    effort, origins = _effort(quick, sizes, depths, seconds, write_bytes)
    it = ProbeRun(loaded, directory, effort)
    click.echo(f"{it.bounds}; {where_text(loaded.config, directory)}.", err=True)
    with ended_by_signals(), progress("probe", it.bounds.points) as advance:
        result = it.run(lambda _what: advance(1))
    settings = {**origins, **_settings(loaded, directory)}
    write_record(record, "probe", settings=settings, seed=None, results=asdict(result), directory=directory)
    probe_report(result).show(asdict(result), as_json=as_json, page=report, picture=picture)
    return 0 if result.is_complete else 1


def _effort(
    quick: bool, sizes: tuple[int, ...], depths: tuple[int, ...], seconds: float | None, write_bytes: int | None
) -> "tuple[Effort, dict[str, RecordedSetting]]":
    from kvtier.tools.probe.run import QUICK, USUAL, Effort

    usual = QUICK if quick else USUAL
    effort = Effort(
        sizes=tuple(sorted(set(sizes))) or usual.sizes,
        depths=tuple(sorted(set(depths))) or usual.depths,
        seconds=usual.seconds if seconds is None else seconds,
        write_bytes=usual.write_bytes if write_bytes is None else write_bytes,
    )
    values = {**asdict(effort), "sizes": list(effort.sizes), "depths": list(effort.depths)}
    usual_origin = "flag --quick" if quick else "default"
    return effort, {
        name: RecordedSetting(it, "flag" if origin(name) == "flag" else usual_origin) for name, it in values.items()
    }


def _settings(loaded: Loaded, directory: Path | None) -> dict[str, RecordedSetting]:
    """Return the settings that affect the measurements."""
    configured = {
        it.name: RecordedSetting(value_of(loaded.config, it), str(loaded.origins[it.name]))
        for it in all_settings(loaded.config)
        if it.name in {"host.capacity_bytes", "host.page_lock"} or it.name.endswith(".direct_io")
    }
    return {**configured, "directory": RecordedSetting(None if directory is None else str(directory), "flag")}
