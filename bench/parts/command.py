"""What the command lines of the scripts share."""

import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtier.cli.options import OutputFile
from kvtier.errors import ConfigError, KvError
from kvtier.tools.options import WorkDirectory, origin
from kvtier.tools.run_record import RecordedSetting, software

_Settings = TypeVar("_Settings")


class Counts(click.ParamType):
    """Whole numbers with commas between them."""

    name = "n,n"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            return value if isinstance(value, tuple) else tuple(int(text) for text in value.split(","))
        except ValueError:
            self.fail(f"{value}: not a list of numbers; allowed: like 1,2,4", param, ctx)


dir_option = click.option(
    "--dir", "directory", type=WorkDirectory(), help="A directory on the drive to measure. [default: the temporary one]"
)
record_option = click.option("--record", type=OutputFile(), metavar="FILE", help="Write the JSON record to FILE.")
resume_option = click.option(
    "--resume", is_flag=True, help="Continue the record of an interrupted run: what it has is not measured again."
)
link_chunks_option = click.option(
    "--link-chunks", type=click.IntRange(1, 1024), default=16, show_default=True, help="Of 32 MiB, in a copy."
)
picture_option = click.option("--picture", type=OutputFile(), metavar="FILE", help="Draw a PNG or SVG.")


def taken(kind: type[_Settings], given: Mapping[str, Any]) -> _Settings:
    """A dataclass of the options that are named like its fields."""
    return kind(**{spec.name: given[spec.name] for spec in fields(kind) if spec.name in given})  # pyright: ignore[reportArgumentType]


def recorded_settings(given: Mapping[str, Any]) -> dict[str, RecordedSetting]:
    """Every option of the running command except its files, with the origin of its value."""
    return {
        name: RecordedSetting(value, origin(name))
        for name, value in given.items()
        if not isinstance(value, Path | None)
    }


def earlier_record(
    record: Path | None, benchmark: str, *, settings: Mapping[str, RecordedSetting], seed: int, device: str
) -> dict[str, Any] | None:
    """The record that a run with ``--resume`` continues; None if there is none yet.

    Its `results` say what is `measured`, and whether it `is_complete`. The commit may be another one.

    Raises:
        ConfigError: it is no such record, or has other settings, another device or other software.
    """
    if record is None or not record.exists():
        return None
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
        has = {name: it["value"] for name, it in found["settings"].items()} | found["software"]
        has |= {"benchmark": found["benchmark"], "seed": found["seed"], "the device": found["results"]["device"]}
        found["results"]["measured"], found["results"]["is_complete"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--resume: {record.name} is no record that can be continued ({type(error).__name__}: {error}); allowed: "
            f"a record of an interrupted run of {benchmark}, or another file"
        ) from error
    asked = {name: json.loads(json.dumps(it.value)) for name, it in settings.items()} | software()
    asked |= {"benchmark": benchmark, "seed": seed, "the device": device}
    for name in sorted((asked.keys() | has.keys()) - {"kvtier"}):
        if has.get(name) != asked.get(name):
            raise ConfigError(
                f"--resume: {record.name} was measured with {name} = {has.get(name)}, here it is {asked.get(name)}; "
                "allowed: the same, or another file"
            )
    return found


def continued(earlier: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Time and commit of each earlier run that a record continues."""
    if earlier is None:
        return []
    return [*earlier["results"].get("continues", []), {"time": earlier["time"], "commit": earlier["commit"]}]


def run(command: click.Command) -> None:
    """Run a script; an error of kvtier is one line and exit code 2."""
    try:
        command()
    except KvError as error:
        click.echo(f"{command.name}: {error}", err=True)
        sys.exit(2)
