"""`kvtier bench multiturn`: conversations of many users, with and without kvtier."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvtier.cli.paths import OutputFile, WorkDirectory, tell_written
from kvtier.cli.render import emit_json, emit_table, progress
from kvtier.config.kinds import parse_size
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.bench.multiturn import Settings

FULL: dict[str, Any] = {
    "shape": "llama-3.1-8b", "device": "cuda", "dtype": "bfloat16", "users": "2,6,12,20", "rounds": 4, "system": 1000,
    "history": 4000, "question": 100, "answer": 100, "rate": 0.1, "kv_budget": "6GiB", "chunk_tokens": 256,
    "threads": 0,
}  # fmt: skip
FULL_TIERS = {"host": "32GiB", "dir": "64GiB"}
QUICK: dict[str, Any] = FULL | {
    "shape": "small", "device": "cpu", "dtype": "float32", "users": "1,2,4,6", "rounds": 3, "system": 64,
    "history": 768, "question": 16, "answer": 6, "rate": 0.5, "kv_budget": "12MiB", "chunk_tokens": 64, "threads": 1,
}  # fmt: skip
QUICK_TIERS = {"host": "16MiB", "dir": "1GiB"}
"""What `--quick` takes where nothing else is said: a model and lengths with which two cores show the effect."""

ORIGINS = {
    "system": "system_tokens",
    "history": "history_tokens",
    "question": "question_tokens",
    "answer": "answer_tokens",
    "rate": "rate_per_user",
    "kv_budget": "budget_bytes",
    "host": "host_bytes",
    "dir": "disk_bytes",
    "lengths": "real_lengths",
}
"""Options whose settings have other names."""


@click.command()
@click.option("--quick", is_flag=True, help="A small model and short texts on the CPU: some minutes.")
@click.option("--model", "--shape", "shape", metavar="SHAPE", help="The model whose shape is made. [llama-3.1-8b]")
@click.option("--device", help="Where it is made and runs: cuda, cuda:1, cpu. [cuda]")
@click.option("--dtype", help="Of its weights and KV. [bfloat16]")
@click.option("--users", metavar="N,…", help="Numbers of users, each a point of the curves. [2,6,12,20]")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Questions of each user. [4]")
@click.option("--system", type=click.IntRange(2), metavar="TOKENS", help="Of a prompt that all share. [1000]")
@click.option("--history", type=click.IntRange(1), metavar="TOKENS", help="Of a user's own, before that. [4000]")
@click.option("--question", type=click.IntRange(1), metavar="TOKENS", help="Mean of a question. [100]")
@click.option("--answer", type=click.IntRange(1), metavar="TOKENS", help="Mean of an answer. [100]")
@click.option("--lengths", type=click.Choice(("sharegpt", "fixed")), default="sharegpt", show_default=True,
              help="Whether questions and answers vary as in ShareGPT, or all have the mean.")  # fmt: skip
@click.option("--rate", type=click.FloatRange(0), help="Questions a second of each user; 0: no pause. [0.1]")
@click.option("--kv-budget", metavar="SIZE", help="KV that the device may hold. [6GiB]")
@click.option("--tier", "tiers", multiple=True, metavar="PLACE=SIZE",
              help="host=SIZE, dir=SIZE; dir=0 leaves the disk out. [host=32GiB, dir=64GiB]")  # fmt: skip
@click.option("--dir", "directory", type=WorkDirectory(),
              help="A directory on the drive in question. [default: the system's temporary one]")  # fmt: skip
@click.option("--chunk-tokens", type=click.IntRange(16, 65536), help="Of a chunk. [256]")
@click.option(
    "--at-once",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Conversations that decode together at most.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Runs of each arm; another one goes first in each.",
)
@click.option("--threads", type=click.IntRange(0), help="Of the model on a CPU; 0: as many as torch takes. [0]")
@click.option("--seed", type=int, default=1, show_default=True, help="Draws weights, tokens, lengths, arrivals.")
@click.option("--record", type=OutputFile(), metavar="FILE", help="JSON, as it goes.")
@click.option("--picture", type=OutputFile(), metavar="FILE", help="PNG or SVG.")
@click.option("--report", type=OutputFile(), metavar="FILE", help="HTML.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def multiturn(
    quick: bool,
    tiers: tuple[str, ...],
    directory: Path | None,
    record: Path | None,
    picture: Path | None,
    report: Path | None,
    as_json: bool,
    lengths: str,
    at_once: int,
    repeats: int,
    seed: int,
    **given: object,
) -> None:
    """Conversations whose KV does not fit on the device: time to first token and tokens/s, with and without kvtier.

    In brackets what is taken unless --quick is given.
    """
    from kvtier.plan.files import check_library, check_picture

    if picture is not None:
        check_picture("--picture", picture)
    if report is not None:
        check_library("--report")
    named = {name: value for name, value in given.items() if value is not None}
    chosen = (QUICK if quick else FULL) | named
    sizes = (QUICK_TIERS if quick else FULL_TIERS) | _tiers(tiers)
    settings = _settings(
        chosen, sizes, directory=directory, at_once=at_once, repeats=repeats, seed=seed, lengths=lengths
    )

    from kvtier.bench import multiturn as benchmark
    from kvtier.bench.multiturn_record import notes, summary, table, write
    from kvtier.bench.multiturn_result import MultiturnResult

    origins = _origins(set(named) | set(_tiers(tiers)))

    def keep(result: MultiturnResult) -> None:
        if record is not None:
            write(record, settings, result, origins)

    with progress("multiturn", len(settings.users) * settings.repeats * len(benchmark.ARMS) + 2) as advance:
        result = benchmark.run(settings, lambda _what: advance(1), keep)
    if picture is not None:
        from kvtier.bench.multiturn_report import write_picture

        write_picture(picture, result)
    if report is not None:
        from kvtier.bench.multiturn_report import write_report

        write_report(report, settings, result)
    tell_written(report, picture, record)
    if as_json:
        emit_json(summary(result))
        return
    shown = table(result)
    emit_table(shown.columns, shown.rows, shown.title, numeric=shown.numeric)
    for note in notes(result):
        click.echo(note, err=True)


def _settings(chosen: Mapping[str, Any], sizes: Mapping[str, str], *, lengths: str, **more: Any) -> "Settings":  # noqa: ANN401
    from kvtier.bench.multiturn import Settings
    from kvtier.bench.multiturn_load import Workload

    try:
        users = tuple(int(text) for text in chosen["users"].split(","))
    except ValueError:
        raise ConfigError(f"--users = {chosen['users']}: not a list of numbers; allowed: like 1,2,4") from None
    return Settings(
        shape=chosen["shape"],
        device=chosen["device"],
        dtype=chosen["dtype"],
        users=users,
        workload=Workload(
            rounds=chosen["rounds"],
            system_tokens=chosen["system"],
            history_tokens=chosen["history"],
            question_tokens=chosen["question"],
            answer_tokens=chosen["answer"],
            rate_per_user=chosen["rate"],
            real_lengths=lengths == "sharegpt",
        ),
        budget_bytes=_size("--kv-budget", chosen["kv_budget"]),
        host_bytes=_size("--tier host", sizes["host"]),
        disk_bytes=_size("--tier dir", sizes["dir"]),
        chunk_tokens=chosen["chunk_tokens"],
        threads=chosen["threads"],
        **more,
    )


def _origins(named: set[str]) -> dict[str, str]:
    """Where the value of each setting came from; those of `--quick` and of nothing at all are defaults."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    return {ORIGINS.get(name, name): "flag" for name in named | given}


def _tiers(given: tuple[str, ...]) -> dict[str, str]:
    told: dict[str, str] = {}
    for text in given:
        place, equals, size = text.partition("=")
        if place not in FULL_TIERS or not equals:
            raise ConfigError(f"--tier {text}: unknown; allowed: host=SIZE, dir=SIZE")
        told[place] = size
    return told


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}; allowed: bytes, or a number with KiB, MiB, GiB") from None
