"""Options for reading a trace, and functions that apply them, for all commands that take a trace."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.options import Quantity, is_given
from kvtier.tools.options import NumberRange

if TYPE_CHECKING:
    from kvtier.tools.trace.arrays import TraceArrays
    from kvtier.tools.trace.formats.base import TraceRequest


time_unit_option = click.option(
    "--time-unit",
    metavar="s|ms|us",
    help="Unit of timestamps in request lines.  [ms; s where lines have a parent_chat_id]",
)


def reading_options(command: Callable[..., object]) -> Callable[..., object]:
    """Add to a command the options for reading a trace."""
    for option in reversed(
        (
            click.option(
                "--block", type=Quantity(), metavar="TOKENS", help="Tokens per block.  [the trace's; sessions: 256]"
            ),
            click.option(
                "--window-h", type=NumberRange(0), default=10.0, help="Hours over which sessions start.  [10]"
            ),
            click.option(
                "--seed",
                type=Quantity(0),
                default=1,
                help="Seed of all random numbers, including start times.  [1]",
            ),
            time_unit_option,
            click.option(
                "--tokenizer",
                type=click.Path(path_type=Path),
                help="A tokenizer.json, or its folder, for texts.",
            ),
            click.option("--strict", is_flag=True, help="Treat warnings about a trace as errors."),
        )
    ):
        command = option(command)
    return command


def load_trace(path: Path, options: dict[str, Any]) -> "TraceArrays":
    """Read the trace at `path` with the options of `reading_options`. Warnings go to stderr."""
    return load_drawn(path, options)[0]


def load_drawn(
    path: Path,
    options: dict[str, Any],
    *,
    is_quiet: bool = False,
    each: "Callable[[TraceRequest], object] | None" = None,
) -> "tuple[TraceArrays, bool]":
    """Read a trace. Also return whether the order of its sessions follows from start times drawn at random.

    `is_quiet` suppresses all remarks and warnings. `each`, if given, is called with each request, and the requests then
    have their contents.
    """
    from kvtier.tools.trace.arrays import read_arrays
    from kvtier.tools.trace.formats.base import ReadOptions, open_trace

    read_options: ReadOptions = ReadOptions(
        block_tokens=options["block"],
        window_h=options["window_h"],
        seed=options["seed"],
        time_unit=options["time_unit"] or "",
        tokenizer=options["tokenizer"],
        has_contents=each is not None,
    )
    reader = open_trace(path, read_options)
    trace = read_arrays(reader, is_strict=options["strict"], each=each or (lambda _: None))
    unused = (option for option in ("tokenizer", "window_h", "time_unit") if option not in reader.options)
    remarks = [f"--{it.replace('_', '-')} has no effect on this format" for it in unused if is_given(it)]
    for remark in () if is_quiet else (*remarks, *trace.warnings):
        click.echo(f"kvtier: trace {path}: {remark}", err=True)
    return trace, "window_h" in reader.options and int(trace.session.max()) > 0
