"""What the command lines of the scripts share."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kvtier.bench.record import RecordedSetting
from kvtier.cli.options import OutputFile, WorkDirectory, origin
from kvtier.errors import KvError

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


def run(command: click.Command) -> None:
    """Run a script; an error of kvtier is one line and exit code 2."""
    try:
        command()
    except KvError as error:
        click.echo(f"{command.name}: {error}", err=True)
        sys.exit(2)
