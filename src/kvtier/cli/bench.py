"""`kvtier bench core` and `kvtier bench io`."""

from dataclasses import asdict
from pathlib import Path

import click

from kvtier.cli.options import OutputFile, WorkDirectory, tell_written
from kvtier.cli.probe import ended_by_signals
from kvtier.cli.progress import progress
from kvtier.config.kinds import parse_size
from kvtier.errors import ConfigError
from kvtier.report.output import print_json
from kvtier.report.table import Table, print_table

RECORD_HELP = "Also write the JSON record (commit, machine, settings, samples) to FILE."


@click.group()
def bench() -> None:
    """Measure the core and the I/O path; every figure stands next to what the hardware allows in the same run."""


@bench.command()
@click.option("--repeats", type=click.IntRange(1, 1000), default=21, show_default=True, help="Samples of each figure.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws the prompt's tokens.")
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def core(repeats: int, seed: int, record: Path | None, as_json: bool) -> None:
    """What a prompt of 131,072 tokens costs before a byte moves: hashing, lookup, decisions."""
    from kvtier.bench import core as benchmark
    from kvtier.bench.record import Setting, make_record
    from kvtier.report.output import write_json

    with progress("core", repeats) as advance:
        result = benchmark.run(repeats, seed, advance)
    told = asdict(result)
    if record is not None:
        settings = {"repeats": Setting(repeats, "flag"), "chunk_tokens": Setting(benchmark.CHUNK_TOKENS, "default")}
        samples = [told["samples"]]
        summary = {name: value for name, value in told.items() if name != "samples"}
        write_json(
            "--record", record, make_record("core", settings=settings, seed=seed, results=summary, samples=samples)
        )
        tell_written(record)
    if as_json:
        print_json(told)
        return
    rows = [
        ("hashing, from a list of integers", f"{result.hash_ms:.3f}"),
        ("lookup, everything in host memory", f"{result.lookup_ms:.3f}"),
        ("lookup, everything in a lower tier", f"{result.lookup_below_ms:.3f}"),
        ("decisions of a store and a load, host memory", f"{result.decide_ms:.3f}"),
        ("decisions of writing it through to one tier", f"{result.demote_ms:.3f}"),
    ]
    title = f"{result.prompt_tokens:,} tokens, {result.chunks} chunks, medians of {result.repeats}"
    print_table(Table(("what", "ms"), rows, title=title, numeric=1))


@bench.command()
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    default=Path(),
    help="A directory on the drive in question; a temporary one is made in it and removed. [default: here]",
)
@click.option(
    "--size", "sizes", multiple=True, metavar="SIZE", help="Chunk size, repeatable. [default: 32, 4, 1/2, 1/16 MiB]"
)
@click.option(
    "--threads",
    multiple=True,
    type=click.IntRange(1, 64),
    help="Threads to try, repeatable. [default: 4; with --thorough: 1, 2, 4]",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(("directory", "disk")),
    help="Tier to measure, repeatable. [default: both]",
)
@click.option("--mix", "mixes", multiple=True, metavar="R/W", help="Also a mix of reads and writes, such as 92/8.")
@click.option(
    "--streams",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Engines whose objects come interleaved, each in its own order.",
)
@click.option(
    "--repeats", type=click.IntRange(1, 100), help="Pairs of samples behind a row. [default: 3; with --thorough: 5]"
)
@click.option("--sample", metavar="SIZE", help="Bytes that one sample moves. [default: 256MiB; with --thorough: 1GiB]")
@click.option(
    "--thorough",
    is_flag=True,
    help="More threads, repeats and bytes, 19 times as much in all, and no deadline. Without it, and without options "
    "on what to measure, nothing new is begun after 2 minutes.",
)
@click.option("--all", "keep_all", is_flag=True, help="Show every thread count, not only the best.")
@click.option("--fresh", is_flag=True, help="Store to new files, not into a full directory.")
@click.option("--report", type=OutputFile(), help="Also write an HTML report.")
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def io(
    directory: Path,
    sizes: tuple[str, ...],
    threads: tuple[int, ...],
    tiers: tuple[str, ...],
    mixes: tuple[str, ...],
    streams: int,
    repeats: int | None,
    sample: str | None,
    thorough: bool,
    keep_all: bool,
    fresh: bool,
    report: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Store and cold load through the whole path, next to memcpy and fio in the same run."""
    from kvtier.bench import io as benchmark
    from kvtier.bench.record import Setting, make_record
    from kvtier.report.output import write_json

    if report is not None:
        from kvtier.report.output import check_matplotlib

        check_matplotlib("--report")
    chosen = tuple(_read_size("--size", size) for size in sizes) or benchmark.SIZES
    counts = threads or ((1, 2, 4) if thorough else (4,))
    sample_bytes = _read_size("--sample", sample or ("1GiB" if thorough else "256MiB"))
    is_quick = not (thorough or sizes or threads or repeats or sample or mixes)
    repeats = repeats or (5 if thorough else 3)
    percents = tuple(_read_mix(mix) for mix in mixes)
    settings = {
        "sizes": Setting(list(chosen), "flag" if sizes else "default"),
        "threads": Setting(list(counts), "flag" if threads else "default"),
        "tiers": Setting(list(tiers or benchmark.TIERS), "flag" if tiers else "default"),
        "mixes": Setting(list(mixes), "flag" if mixes else "default"),
        "streams": Setting(streams, "flag"),
        "repeats": Setting(repeats, "flag"),
        "thorough": Setting(thorough, "flag"),
        "fresh": Setting(fresh, "flag"),
        "sample_bytes": Setting(sample_bytes, "flag"),
    }

    def keep(result: benchmark.IoResult) -> None:
        if record is not None:
            told = asdict(result)
            write_json(
                "--record", record, make_record("io", settings=settings, seed=1, results=told, directory=directory)
            )

    with ended_by_signals(), progress("io", len(chosen) * (2 + len(counts)) * repeats) as advance:
        result = benchmark.run(
            directory,
            sizes=chosen,
            threads=counts,
            tiers=tiers or benchmark.TIERS,
            repeats=repeats,
            sample_bytes=sample_bytes,
            keep_all=keep_all,
            is_fresh=fresh,
            mixes=percents,
            streams=streams,
            tick=lambda _what: advance(1),
            keep=keep,
            deadline_s=benchmark.QUICK_S if is_quick else None,
        )
    if report is not None:
        from kvtier.bench.io_report import write_report

        write_report(report, result)
    tell_written(report, record)
    if as_json:
        print_json(result)
        return
    from kvtier.bench.io_report import notes, table

    shown = table(result)
    print_table(shown)
    for note in notes(result):
        click.echo(note, err=True)
    if is_quick:
        click.echo("--thorough also tries 1 and 2 threads, with samples of 1 GiB and medians of 5.", err=True)


def _read_size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}; allowed: bytes, or a number with KiB, MiB, GiB") from None


def _read_mix(text: str) -> int:
    """Per cent of reads."""
    reads, slash, writes = text.partition("/")
    if not slash or not reads.isdecimal() or not writes.isdecimal() or int(reads) + int(writes) != 100:
        raise ConfigError(f"--mix {text}: allowed: reads/writes in per cent that make 100, such as 92/8")
    if not 1 <= int(reads) <= 99:
        raise ConfigError(f"--mix {text}: allowed: 1/99 to 99/1; store and load alone are always measured")
    return int(reads)
