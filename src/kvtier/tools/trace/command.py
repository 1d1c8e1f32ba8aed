"""`kvtier trace`: records, converts, anonymizes, synthesizes and examines request traces."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvtier.cli.main import Commands
from kvtier.cli.options import Duration, OutputFile, Quantity
from kvtier.errors import ConfigError
from kvtier.report.output import progress
from kvtier.tools.options import NumberRange
from kvtier.tools.trace.options import load_drawn, load_trace, reading_options

if TYPE_CHECKING:
    from kvtier.tools.trace.arrays import TraceArrays

_STEP = 4096
"""Lines between two updates of the progress bar."""
_WAIT_S = 60.0
_STATISTICS = (
    ("requests-per-s", NumberRange(0), "Mean requests a second, all sessions.  [2; with --like: the trace's]"),
    ("turns", NumberRange(0), "Mean requests per session.  [4]"),
    ("first-tokens", NumberRange(0), "Mean tokens of a first prompt after its shared part.  [1500]"),
    ("turn-tokens", NumberRange(0), "Mean growth of a prompt from turn to turn.  [600]"),
    ("output-tokens", NumberRange(0), "Mean tokens per response.  [300]"),
    ("think-s", Duration(), "Mean seconds between the requests of a session.  [60]"),
    ("spread", NumberRange(0), "Standard deviation of the logarithm of lengths and pauses.  [1]"),
    ("shared-prompts", Quantity(), "Number of distinct shared prompts.  [16]"),
    ("shared-tokens", Quantity(), "Tokens of each shared prompt.  [1024]"),
    ("shared-share", NumberRange(0), "Share of the sessions that begin with a shared prompt.  [0.8]"),
    ("popularity", NumberRange(0), "Zipf exponent of the shared prompts.  [1]"),
)


@click.group(cls=Commands)
def trace() -> None:
    """Record, convert, anonymize, synthesize and examine request traces."""


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=OutputFile())
@click.option(
    "--ids",
    "as_ids",
    is_flag=True,
    help="Write one hash id for each block, which more tools read, instead of shorter runs.",
)
@reading_options
def convert(source: Path, target: Path, as_ids: bool, **reading: Any) -> None:  # noqa: ANN401  the options above
    """Write SOURCE, in any format of `kvtier replay`, to TARGET as request lines (.gz: gzip).

    TARGET has times, lengths, and which blocks are equal, but no text, ids or session names of SOURCE. Its replay gives
    the same figures, except for the adaptive policy, which samples by name.
    """
    _check_distinct(source, target)
    _write(target, load_trace(source, reading), as_runs=not as_ids)


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=OutputFile())
@click.option(
    "--ids",
    "as_ids",
    is_flag=True,
    help="Write one hash id for each block, which more tools read, instead of shorter runs.",
)
@click.option("--coarse-s", type=Duration(), default=0.0, help="Round times down to multiples of this.  [0: keep them]")
@click.option("--no-sessions", is_flag=True, help="Leave out session ids.")
@reading_options
def anonymize(source: Path, target: Path, as_ids: bool, coarse_s: float, no_sessions: bool, **reading: Any) -> None:  # noqa: ANN401
    """Write SOURCE to TARGET (.gz: gzip) for sharing.

    Blocks and sessions are numbered by first use, and times count from the first request; TARGET contains nothing else
    of SOURCE. A trace with texts is refused. Hit rates stay the same, except with --coarse-s for policies that use
    time. Lengths, order and the number of uses of a block remain, and may identify something.
    """
    from kvtier.tools.trace.arrays import without_sessions
    from kvtier.tools.trace.formats.base import open_trace

    _check_distinct(source, target)
    if "tokenizer" in open_trace(source).options:
        raise ConfigError(
            f"trace {source} holds texts, whose lengths may identify them; use one with block ids, such as the "
            "output of `kvtier trace convert`"
        )
    arrays = load_trace(source, reading)
    _write(target, without_sessions(arrays) if no_sessions else arrays, as_runs=not as_ids, coarse_s=coarse_s)


def _check_distinct(source: Path, target: Path) -> None:
    if target.resolve() == source.resolve():
        raise ConfigError(f"{str(target)!r} is the trace that is read; write to another file")


def _write(target: Path, arrays: "TraceArrays", *, as_runs: bool, coarse_s: float = 0.0) -> None:
    from kvtier.tools.trace.arrays import write_requests

    write_requests(target, arrays, as_runs=as_runs, coarse_s=coarse_s)
    click.echo(f"{len(arrays):,} requests, {arrays.block_count:,} blocks of {arrays.block_tokens} tokens: {target}")


@trace.command()
@click.argument("source", metavar="TRACE", type=click.Path(path_type=Path))
@click.option("--separator", default="", help="What stands between the parts of a text, where \\n is a new line.")
@reading_options
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Output of `kvtier plan --json`, for the GPU seconds and the cost of each change.",
)
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report with a chart.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def advise(
    source: Path,
    separator: str,
    plan_file: Path | None,
    report: Path | None,
    as_json: bool,
    **reading: Any,  # noqa: ANN401
) -> None:
    """Say which changes of prompts would save misses of a prefix cache, and how many.

    Early cuts: a prompt is about as long as the one before in its session, but shares much less, because something near
    its start changed. Texts show both versions of the line. Heads: one text stands behind several beginnings. Order:
    parts of prompts that change often go last, and frequent ones first. The rest is what only reuse without a common
    prefix could save.

    All figures assume an unbounded cache. Ids that name whole prefixes show early cuts; texts, components and ids that
    name contents show the rest.
    """
    from kvtier.tools.trace.advise import Prompt, advise
    from kvtier.tools.trace.advise_report import advice_json, advice_report, read_plan

    plan = None if plan_file is None else read_plan(plan_file)
    prompts: list[Prompt] = []
    trace, _ = load_drawn(source, reading, each=lambda it: prompts.append(Prompt(it.model, it.contents)))
    if not trace.has_blocks:
        raise ConfigError("has no blocks", setting="trace", value=str(source), allowed="a trace with blocks")
    advice = advise(trace, prompts, separator.replace("\\n", "\n"))
    advice_report(advice, trace.notes, plan).show(advice_json(advice, plan), as_json=as_json, page=report)


@trace.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--capacity", default="1GiB", help="Size of FOLDER at which recording stops.  [1GiB]")
def record(folder: Path, program: tuple[str, ...], capacity: str) -> None:
    """Run PROGRAM, such as `vllm serve MODEL …` with kvtier, and record its requests in FOLDER.

    Each engine writes a file of request lines: arrival times, lengths, and which blocks are equal, under ids that
    cannot be reversed. The files hold neither texts nor tokens. `kvtier replay` reads them.

    Equivalent to the settings trace.path and trace.capacity_bytes.
    """
    from kvtier.config.loader import load  # late, because importing all kinds of tiers would slow the help
    from kvtier.runtime.observers.line_file import SUFFIX
    from kvtier.tier.files.safe_open import make_root

    command = program[1:] if program[0] == "--" else program
    if not command:
        raise click.UsageError("PROGRAM is missing; give one, such as vllm serve MODEL")
    config = load(flags=(f"trace.path={folder}", f"trace.capacity_bytes={capacity}")).config.trace
    assert config.path is not None, "it is set above"
    try:
        make_root(config.path)
        os.scandir(config.path).close()
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be made: {error.strerror or error}; allowed: a directory") from error
    settings = (f"KVTIER_TRACE__PATH={config.path}", f"KVTIER_TRACE__CAPACITY_BYTES={config.capacity_bytes}")
    before = set(config.path.glob(f"*{SUFFIX}"))
    code = _run_program(["env", *settings, *command])
    if set(config.path.glob(f"*{SUFFIX}")) <= before:
        click.echo(
            f"trace record: nothing was recorded in {folder}: no engine of PROGRAM started with kvtier", err=True
        )
    raise SystemExit(code)


def _run_program(command: Sequence[str]) -> int:
    """Run a program on this terminal, and forward signals to it.

    Return its exit code, or 128 plus the number of the signal that ended it.
    """
    child = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to PROGRAM as well
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: child.send_signal(received))
    while (code := child.poll()) is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_WAIT_S)
    return 128 - code if code < 0 else code


def _statistics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, text in reversed(_STATISTICS):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


@trace.command()
@click.argument("target", type=OutputFile())
@click.option(
    "--requests", "count", type=Quantity(), help="Number of requests, such as 10M.  [100k; with --like: the trace's]"
)
@click.option("--like", type=click.Path(path_type=Path), help="Take sessions from this trace.")
@_statistics_options
@reading_options
def synthesize(target: Path, count: int | None, like: Path | None, **options: Any) -> None:  # noqa: ANN401
    """Write a synthetic trace to TARGET (.gz: gzip); the same options and --seed give the same file.

    Sessions are drawn from the statistics above, or from the trace --like: whole sessions, with their lengths, pauses
    and shared blocks, in another order and under new ids.
    """
    from kvtier.tools.trace.arrays import write_lines
    from kvtier.tools.trace.synthesize import StatisticalSource, Statistics, TraceSource, option_of, synthesized

    values = {name: options.pop(name) for name in (it[0].replace("-", "_") for it in _STATISTICS)}
    given = {name: value for name, value in values.items() if value is not None}
    if like is None:
        if options["block"] is not None:
            given["block_tokens"] = options["block"]
        source = StatisticalSource(Statistics(**given), options["seed"])
        count = 100_000 if count is None else count
    else:
        _check_distinct(like, target)
        rate = given.pop("requests_per_s", None)
        if given:
            names = ", ".join(f"--{option_of(name)}" for name in given)
            raise ConfigError(f"{names} and --like are both given; with --like, only --requests-per-s is allowed")
        model = load_trace(like, options)
        source = TraceSource(model, options["seed"], rate)
        count = len(model) if count is None else count
    with progress(f"{target.name}: {count:,} requests", count) as advance:
        write_lines(target, _counted(synthesized(source, count), advance))
    click.echo(f"{count:,} requests, blocks of {source.block_tokens} tokens: {target}")


def _counted(lines: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if number % _STEP == 0:
            advance(_STEP)
        yield line
