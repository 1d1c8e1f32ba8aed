"""`kvtier bench ttft`: time to first token by context length, computed against fetched."""

from dataclasses import asdict
from pathlib import Path

import click

from kvtier.cli.paths import OutputFile, WorkDirectory, tell_written
from kvtier.cli.render import emit_json, emit_table, progress
from kvtier.config.kinds import parse_size

CONTEXTS = "1024,4096,8192,16384,32768,65536,131072"


@click.command()
@click.option("--shape", default="llama-3.1-8b", show_default=True, help="The model whose shape is made.")
@click.option("--device", default="cuda", show_default=True, help="Where it is made and runs: cuda, cuda:1, cpu.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of its weights and KV.")
@click.option("--contexts", default=CONTEXTS, show_default=True, metavar="TOKENS,…", help="Prompt lengths.")
@click.option("--repeats", type=click.IntRange(1, 100), default=5, show_default=True, help="Samples behind a median.")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws weights and tokens.")
@click.option("--host", default="32GiB", show_default=True, metavar="SIZE", help="Host memory for chunks.")
@click.option("--disk", default="40GiB", show_default=True, metavar="SIZE", help="Most bytes on disk.")
@click.option(
    "--dir",
    "directory",
    type=WorkDirectory(),
    help="A directory on the drive in question. [default: the system's temporary one]",
)
@click.option("--chunk-tokens", type=click.IntRange(16, 65536), default=256, show_default=True, help="Of a chunk.")
@click.option("--decode/--no-decode", default=True, show_default=True, help="Also beside a request that decodes.")
@click.option("--record", type=OutputFile(), metavar="FILE", help="JSON, as it goes.")
@click.option("--picture", type=OutputFile(), metavar="FILE", help="PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ttft(
    shape: str,
    device: str,
    dtype: str,
    contexts: str,
    repeats: int,
    seed: int,
    host: str,
    disk: str,
    directory: Path | None,
    chunk_tokens: int,
    decode: bool,
    record: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Time to first token by context length: computed anew, restored from host memory, restored from disk."""
    from kvtier.bench import ttft as benchmark
    from kvtier.bench.ttft_record import recorded, write
    from kvtier.plan.files import check_picture

    lengths = _lengths(contexts)
    if picture is not None:
        check_picture("--picture", picture)
    settings = benchmark.Settings(
        shape=shape,
        device=device,
        dtype=dtype,
        contexts=lengths,
        repeats=repeats,
        seed=seed,
        host_bytes=parse_size(host),
        disk_bytes=parse_size(disk),
        directory=directory,
        chunk_tokens=chunk_tokens,
        with_decode=decode,
    )

    def keep(result: benchmark.TtftResult) -> None:
        if record is not None:
            write(record, settings, result)

    with progress("ttft", len(lengths) + 2) as advance:
        result = benchmark.run(settings, lambda _what: advance(1), keep)
    if picture is not None:
        from kvtier.bench.ttft_chart import draw

        draw(recorded(settings, result), picture)
    tell_written(picture, record)
    if as_json:
        emit_json({**benchmark.summary(result), "arms": [asdict(arm) for arm in result.arms]})
        return
    rows = [
        (
            f"{arm.context:,}",
            arm.name,
            f"{1e3 * arm.median_s:,.1f}",
            f"{plain.median_s / arm.median_s:.2f}" if (plain := result.arm("recompute", arm.context)) else "-",
            f"{arm.restored_bytes / arm.median_s / 1e9:.2f}",
            "yes" if arm.same_tokens else "NO",
        )
        for arm in result.arms
    ]
    emit_table(("context", "arm", "TTFT ms", "speed-up", "GB/s", "same tokens"), rows, f"{shape}, {device}", numeric=4)
    for link in result.links:
        click.echo(f"{link.name}: {link.gb_per_s:.2f} GB/s, {link.ratio:.2f} of a plain copy ({link.note})")
    for it in result.decoding:
        click.echo(
            f"{it.context:,} tokens beside a request that decodes: its tokens take {it.alone_ms:.1f} ms alone, "
            f"{it.beside_recompute_ms:.1f} beside a recompute, {it.beside_restore_ms:.1f} beside a restore"
        )
    for split in result.splits:
        of = "those tried" if split.is_tried else "all, by measured loads and prefills,"
        click.echo(
            f"{split.context:,} tokens from {split.place}: the planner loads {split.chosen_tokens:,}, the best split "
            f"of {of} is {split.best_tokens:,}; regret {split.regret:.1%}"
        )
    for told in result.skipped:
        click.echo(f"left out: {told}", err=True)


def _lengths(contexts: str) -> tuple[int, ...]:
    from kvtier.errors import ConfigError

    try:
        return tuple(int(text) for text in contexts.split(","))
    except ValueError:
        raise ConfigError(f"--contexts = {contexts}: not a list of numbers; allowed: like {CONTEXTS}") from None
