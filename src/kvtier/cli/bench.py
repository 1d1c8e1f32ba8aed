"""`kvtier bench core` and `kvtier bench io`: this machine's figures, next to what its hardware allows."""

from dataclasses import asdict
from pathlib import Path

import click

from kvtier.cli.render import emit_json, emit_table, progress
from kvtier.config.kinds import parse_size

RECORD_HELP = "Also write the JSON record (commit, machine, settings, samples) to FILE."


@click.group()
def bench() -> None:
    """Measure the core and the I/O path; every figure stands next to what the hardware allows in the same run."""


@bench.command()
@click.option("--repeats", type=click.IntRange(1, 1000), default=21, show_default=True, help="Samples of each figure.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws the prompt's tokens.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def core(repeats: int, seed: int, record: Path | None, as_json: bool) -> None:
    """What a prompt of 131,072 tokens costs before a byte moves: hashing, lookup, decisions."""
    from kvtier.bench import core as benchmark
    from kvtier.bench.record import Setting, make_record, write_record

    with progress("core", repeats) as advance:
        result = benchmark.run(repeats, seed, advance)
    told = asdict(result)
    if record is not None:
        settings = {"repeats": Setting(repeats, "flag"), "chunk_tokens": Setting(benchmark.CHUNK_TOKENS, "default")}
        samples = [told["samples"]]
        summary = {name: value for name, value in told.items() if name != "samples"}
        write_record(record, make_record("core", settings=settings, seed=seed, results=summary, samples=samples))
    if as_json:
        emit_json(told)
        return
    rows = [
        ("hashing, from a list of integers", f"{result.hash_ms:.3f}"),
        ("lookup, everything in host memory", f"{result.lookup_ms:.3f}"),
        ("lookup, everything in a lower tier", f"{result.lookup_below_ms:.3f}"),
        ("decisions of a store and a load, host memory", f"{result.decide_ms:.3f}"),
        ("decisions of writing it through to one tier", f"{result.demote_ms:.3f}"),
    ]
    title = f"{result.prompt_tokens:,} tokens, {result.chunks} chunks, medians of {result.repeats}"
    emit_table(("what", "ms"), rows, title, numeric=1)


@bench.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False, writable=True),
    default=Path(),
    help="A directory on the drive in question; a temporary one is made in it and removed. [default: here]",
)
@click.option(
    "--size", "sizes", multiple=True, metavar="SIZE", help="Chunk size, repeatable. [default: 32, 4, 0.5 MiB]"
)
@click.option(
    "--threads", multiple=True, type=click.IntRange(1, 64), help="Threads to try, repeatable. [default: 1, 2, 4]"
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(("directory", "disk")),
    help="Tier to measure, repeatable. [default: both]",
)
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Pairs of samples behind a row."
)
@click.option("--sample", default="1GiB", show_default=True, metavar="SIZE", help="Bytes that one sample moves.")
@click.option("--all", "keep_all", is_flag=True, help="Show every thread count, not only the best.")
@click.option("--fresh", is_flag=True, help="Store to new files, not into a full directory.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def io(
    directory: Path,
    sizes: tuple[str, ...],
    threads: tuple[int, ...],
    tiers: tuple[str, ...],
    repeats: int,
    sample: str,
    keep_all: bool,
    fresh: bool,
    record: Path | None,
    as_json: bool,
) -> None:
    """Store and cold load through the whole path, next to memcpy and fio in the same run."""
    from kvtier.bench import io as benchmark
    from kvtier.bench.record import Setting, make_record, write_record

    chosen = tuple(parse_size(size) for size in sizes) or benchmark.SIZES
    counts = threads or (1, 2, 4)
    sample_bytes = parse_size(sample)
    with progress("io", len(chosen) * (2 + len(counts)) * repeats) as advance:
        result = benchmark.run(
            directory,
            sizes=chosen,
            threads=counts,
            tiers=tiers or benchmark.TIERS,
            repeats=repeats,
            sample_bytes=sample_bytes,
            keep_all=keep_all,
            is_fresh=fresh,
            tick=lambda _what: advance(1),
        )
    told = asdict(result)
    if record is not None:
        settings = {
            "sizes": Setting(list(chosen), "flag" if sizes else "default"),
            "threads": Setting(list(counts), "flag" if threads else "default"),
            "tiers": Setting(list(tiers or benchmark.TIERS), "flag" if tiers else "default"),
            "repeats": Setting(repeats, "flag"),
            "fresh": Setting(fresh, "flag"),
            "sample_bytes": Setting(sample_bytes, "flag"),
        }
        write_record(record, make_record("io", settings=settings, seed=None, results=told, directory=directory))
    if as_json:
        emit_json(told)
        return
    rows = [
        (
            row.tier,
            row.op,
            _size(row.chunk_bytes),
            str(row.threads),
            f"{row.gb_per_s:.2f}",
            f"{row.ceiling_gb_per_s:.2f}",
            f"{row.ratio:.2f}",
            f"{row.plain_gb_per_s:.2f}",
            f"{row.cpu_s_per_gb:.3f}",
        )
        for row in result.results
    ]
    columns = ("tier", "op", "chunk", "threads", "GB/s", "ceiling GB/s", "ratio", "plain fio", "CPU s/GB")
    emit_table(
        columns, rows, f"Medians of {repeats}; ceilings: memcpy for host, {result.ceiling} for the others", numeric=6
    )
    if not all(row.direct_io for row in result.results if row.tier != "host"):
        click.echo("The file system there has no direct I/O: loads may come from the page cache.", err=True)


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
