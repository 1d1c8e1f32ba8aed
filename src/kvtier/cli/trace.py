"""`kvtier trace`: traces in another form, without what they tell of their texts."""

from pathlib import Path
from typing import Any

import click

from kvtier.cli.replay import packed_trace, reading_options


@click.group()
def trace() -> None:
    """Convert request traces."""


@trace.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--ids", "as_ids", is_flag=True, help="Write hash_ids, which more tools read; runs are shorter.")
@reading_options
def convert(source: Path, target: Path, as_ids: bool, **reading: Any) -> None:  # noqa: ANN401  the options above
    """Write SOURCE, of any form that `kvtier replay` reads, to TARGET as request lines (.gz: gzip).

    TARGET holds times, lengths and which blocks are equal, nothing else: no text, no ids or names of sessions of
    SOURCE. It replays to the same figures.
    """
    from kvtier.errors import ConfigError
    from kvtier.trace.writing import write_requests

    if target.resolve() == source.resolve():
        raise ConfigError(f"{str(target)!r} is the trace that is read; allowed: another file")
    packed = packed_trace(source, reading)
    write_requests(target, packed, as_runs=not as_ids)
    click.echo(f"{len(packed):,} requests, {packed.block_count:,} blocks of {packed.block_tokens} tokens: {target}")
