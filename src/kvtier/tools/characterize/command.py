"""`kvtier characterize`: shows the storage requests of a command, of processes or of a whole device."""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvtier.cli.options import Duration, OutputFile, Quantity
from kvtier.errors import ConfigError
from kvtier.report.format import bytes_text
from kvtier.tools.options import noted_signals

if TYPE_CHECKING:
    from kvtier.tools.characterize.io_trace import IoTrace

SECONDS = 10.0
"""Length of a capture without a command, in seconds."""
STDERR = 2


@click.command()
@click.option(
    "--device",
    metavar="DEVICE|PATH",
    help="A block device such as /dev/nvme0n1, or a path on one.  [every physical disk]",
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Measure only requests for files below this directory, instead of --device.",
)
@click.option(
    "--pid",
    "pids",
    multiple=True,
    type=Quantity(1),
    metavar="PID",
    help="Measure a process and its children. Repeatable.  [every process, and the kernel]",
)
@click.option(
    "--seconds",
    type=Duration(least_s=1e-3),
    help="How long to measure; a COMMAND that still runs is then ended.  [until COMMAND ends; 10s without one]",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure a recording instead: the text of blkparse, or kvtier's journals. Repeatable.",
)
@click.option(
    "--journal",
    "journals",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="kvtier's journal, read after the capture: the tier's write amplification. Repeatable.",
)
@click.option("--report", type=OutputFile("report"), metavar="FILE.html", help="Also write an HTML report with charts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the output of COMMAND goes to stderr.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def characterize(
    device: str | None,
    directory: Path | None,
    pids: tuple[int, ...],
    seconds: float | None,
    inputs: tuple[Path, ...],
    journals: tuple[Path, ...],
    report: Path | None,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Measure the block I/O of COMMAND, of processes, or of a whole device, from the kernel's events, as root.

    For example: kvtier characterize --report io.html -- kvtier bench io --dir /mnt/nvme

    The command reads the block layer's events through tracefs. It installs nothing and changes no request. Ctrl-C or
    SIGTERM ends it and shows the results so far. The exit code is 1 if COMMAND fails.
    """
    from kvtier.tools.characterize.capture import CaptureSettings, run

    if inputs:
        if device is not None or directory is not None or pids or seconds is not None or command or journals:
            raise ConfigError("--input measures a recording; only --report and --json can be given with it")
        from kvtier.tools.characterize.io_trace_readers import read_recordings

        _show(read_recordings(inputs), {}, report, as_json=as_json)
        return 0
    if device is not None and directory is not None:
        raise ConfigError(f"--device {device} and --dir {directory} are both given; give one of them")
    settings = CaptureSettings(
        device=device,
        directory=directory,
        pids=pids,
        command=command,
        seconds=SECONDS if seconds is None and not command else seconds,
        output=STDERR if as_json else None,
    )
    with noted_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as noted:
        captured = run(settings, lambda: noted() is not None)
        ended_by = noted()
    shown: dict[str, object] = {"command": list(command), "exit_code": captured.exit_code} if command else {}
    shown |= _joined(captured.trace, journals)
    _show(captured.trace, shown, report, as_json=as_json)
    if ended_by is not None:
        return 128 + ended_by
    return 1 if command and captured.exit_code else 0


def _joined(trace: "IoTrace", journals: tuple[Path, ...]) -> dict[str, object]:
    """Return the tier's write amplification, and add it to the trace's remarks."""
    if not journals:
        return {}
    from kvtier.tools.characterize.io_trace_readers import read_objects, write_amplification

    found = write_amplification(read_objects(journals), trace)
    framed, device = found.framed_ratio, found.device_ratio
    if framed is not None and device is not None:
        trace.remarks.append(
            f"The tier wrote {found.objects:,} objects of {bytes_text(found.payload_bytes)}: their frames have "
            f"{framed:.4f} times as many bytes, and the device saw {device:.4f} times as many."
        )
    return {"objects": asdict(found) | {"framed_ratio": framed, "device_ratio": device}}


def _show(trace: "IoTrace", command: dict[str, object], report: Path | None, *, as_json: bool) -> None:
    from kvtier.tools.characterize.measures import measure
    from kvtier.tools.characterize.report import io_report

    measures = measure(trace)
    io_report(trace, measures).show(asdict(measures) | command, as_json=as_json, page=report)
    if "command" in command and not as_json:
        click.echo(f"exit code of {command['command']}: {command['exit_code']}", err=True)
