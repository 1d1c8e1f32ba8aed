"""`kvtier trace`: record traces, convert them, take out what they tell of anybody, make new ones like them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from kvtier.cli.options import OutputFile
from kvtier.cli.replay import load_trace, reading_options
from kvtier.report.output import progress

_TOLD_EVERY = 4096


@click.group()
def trace() -> None:
    """Record, convert, anonymize and synthesize request traces."""


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=OutputFile())
@click.option("--ids", "as_ids", is_flag=True, help="Write hash_ids, which more tools read; runs are shorter.")
@reading_options
def convert(source: Path, target: Path, as_ids: bool, **reading: Any) -> None:  # noqa: ANN401  the options above
    """Write SOURCE, of any form that `kvtier replay` reads, to TARGET as request lines (.gz: gzip).

    TARGET holds times, lengths and which blocks are equal, nothing else: no text, no ids or names of sessions of
    SOURCE. It replays to the same figures; only the adaptive policy samples names, and differs by chance.
    """
    from kvtier.errors import ConfigError
    from kvtier.trace.write import write_requests

    if target.resolve() == source.resolve():
        raise ConfigError(f"{str(target)!r} is the trace that is read; allowed: another file")
    packed = load_trace(source, reading)
    write_requests(target, packed, as_runs=not as_ids)
    click.echo(f"{len(packed):,} requests, {packed.block_count:,} blocks of {packed.block_tokens} tokens: {target}")


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=OutputFile())
@click.option("--ids", "as_ids", is_flag=True, help="Write hash_ids, which more tools read; runs are shorter.")
@click.option("--coarse-s", type=float, default=0.0, help="Cut times to multiples of so many seconds.  [0: leave them]")
@click.option("--no-sessions", is_flag=True, help="Do not tell which requests belong together.")
@reading_options
def anonymize(source: Path, target: Path, as_ids: bool, coarse_s: float, no_sessions: bool, **reading: Any) -> None:  # noqa: ANN401
    """Write SOURCE to TARGET (.gz: gzip) so that it can be passed on.

    Blocks and sessions are numbered as they appear, whatever their ids were made of; times count from the first
    request; nothing else of SOURCE is in it. A trace that holds texts is refused. Hit rates stay as they are, but for
    policies that go by time if it is cut. What stays can tell something, too: lengths, the order, how often a block
    is used.
    """
    from kvtier.errors import ConfigError
    from kvtier.trace.arrays import without_sessions
    from kvtier.trace.formats.text_lines import TextLines
    from kvtier.trace.open import open_trace
    from kvtier.trace.write import write_requests

    if target.resolve() == source.resolve():
        raise ConfigError(f"{str(target)!r} is the trace that is read; allowed: another file")
    if isinstance(open_trace(source), TextLines):
        raise ConfigError(
            f"trace {source} holds texts, of which lengths would tell; allowed: one with block ids, such as "
            "`kvtier trace convert` makes of it"
        )
    packed = load_trace(source, reading)
    write_requests(target, without_sessions(packed) if no_sessions else packed, as_runs=not as_ids, coarse_s=coarse_s)
    click.echo(f"{len(packed):,} requests, {packed.block_count:,} blocks of {packed.block_tokens} tokens: {target}")


@trace.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--capacity", default="1GiB", help="Most bytes of recordings in FOLDER; then recording stops.  [1GiB]")
def record(folder: Path, program: tuple[str, ...], capacity: str) -> None:
    """Run PROGRAM, such as `vllm serve MODEL …` with kvtier, and record its requests in FOLDER.

    Each engine that it starts writes a file of request lines: when a request came, its lengths, and which blocks are
    equal, under ids that cannot be undone. No text, no token. `kvtier replay` reads it.

    The same as the settings trace.path and trace.capacity_bytes, wherever settings are read.
    """
    import os

    from kvtier.config.loader import load
    from kvtier.errors import ConfigError

    command = program[1:] if program[0] == "--" else program
    if not command:
        raise click.UsageError("PROGRAM is missing; allowed: such as vllm serve MODEL")
    flags = (f"trace.path={folder}", f"trace.capacity_bytes={capacity}")
    told = load(flags=flags).config.trace
    assert told.path is not None, "the setting that was just given"
    try:
        told.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be made: {error.strerror or error}; allowed: a directory") from error
    settings = (f"KVTIER_TRACE__PATH={told.path}", f"KVTIER_TRACE__CAPACITY_BYTES={told.capacity_bytes}")
    os.execvp("env", ["env", *settings, *command])  # noqa: S606  in our place: signals and the terminal are its own


_STATISTICS = (
    ("requests-per-s", float, "Requests a second on average, of all sessions.  [2; with --like: the trace's]"),
    ("turns", float, "Requests of a session on average.  [4]"),
    ("first-tokens", float, "Of a first prompt on average, behind what it shares.  [1500]"),
    ("turn-tokens", float, "By which a prompt grows from turn to turn, on average.  [600]"),
    ("output-tokens", float, "On average.  [300]"),
    ("think-s", float, "Seconds between the requests of a session, on average.  [60]"),
    ("spread", float, "Standard deviation of the logarithm of lengths and pauses.  [1]"),
    ("shared-prompts", int, "Prompts that sessions begin with.  [16]"),
    ("shared-tokens", int, "Of each of them.  [1024]"),
    ("shared-share", float, "Of the sessions that begin with one.  [0.8]"),
    ("popularity", float, "The n-th of them is used in proportion to n to the power of minus this.  [1]"),
)


def _statistics_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, text in reversed(_STATISTICS):
        command = click.option(f"--{name}", type=kind, help=text)(command)
    return command


@trace.command()
@click.argument("target", type=OutputFile())
@click.option("--requests", help="How many, such as 10M.  [100k; with --like: as many as the trace has]")
@click.option("--like", type=click.Path(path_type=Path), help="A trace to be like.")
@_statistics_options
@reading_options
def synthesize(target: Path, requests: str | None, like: Path | None, **options: Any) -> None:  # noqa: ANN401
    """Write TARGET, a trace that nobody has recorded (.gz: gzip): the same one for the same options and --seed.

    Its sessions have the statistics that are given, or those of the trace --like: whole sessions of it, with their
    lengths, pauses and what they share, in another order and under new ids.
    """
    from kvtier.config.kinds import parse_count
    from kvtier.errors import ConfigError
    from kvtier.trace.synthesize import (
        SessionSource,
        StatisticalSource,
        Statistics,
        TraceSource,
        option_of,
        synthesized,
    )
    from kvtier.trace.write import write_lines

    stated = {name: options.pop(name) for name in (it[0].replace("-", "_") for it in _STATISTICS)}
    given = {name: value for name, value in stated.items() if value is not None}
    try:
        count = None if requests is None else parse_count(requests)
    except ValueError as error:
        raise ConfigError(f"--requests {requests!r}: {error}") from None
    source: SessionSource
    if like is None:
        if options["block"] is not None:
            given["block_tokens"] = options["block"]
        source = StatisticalSource(Statistics(**given), options["seed"])
        count = 100_000 if count is None else count
    else:
        if like.resolve() == target.resolve():
            raise ConfigError(f"{str(target)!r} is the trace that is read; allowed: another file")
        rate = given.pop("requests_per_s", None)
        if given:
            names = ", ".join(f"--{option_of(name)}" for name in given)
            raise ConfigError(f"{names} and --like are both given; allowed: with --like only --requests-per-s")
        packed = load_trace(like, options)
        source = TraceSource(packed, options["seed"], rate)
        count = len(packed) if count is None else count
    with progress(f"{target.name}: {count:,} requests", count) as advance:
        write_lines(target, _told(synthesized(source, count), advance))
    click.echo(f"{count:,} requests, blocks of {source.block_tokens} tokens: {target}")


def _told(lines: Iterator[str], advance: Callable[[int], None]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if number % _TOLD_EVERY == 0:
            advance(_TOLD_EVERY)
        yield line
