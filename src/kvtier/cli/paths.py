"""Paths that commands are given: looked at when they are read, so that nothing is computed in vain."""

import shlex
from pathlib import Path
from typing import Any

import click


class WorkDirectory(click.Path):
    """A directory on the drive that a command is about; never made, lest another drive be measured."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, exists=True, file_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`; says what is missing."""
        path = Path(value)
        if not path.exists():
            there = next((str(it) for it in path.absolute().parents if it.exists()), "/")
            advice = f"on the drive that is meant: mkdir -p {shlex.quote(str(path))}"
            self.fail(f"directory {str(path)!r} does not exist, only {there!r} does; make it {advice}", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(click.Path):
    """A file to be written, in a directory that exists: a misspelt one is refused, not made."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`; refuses what cannot be written."""
        from kvtier.plan.files import check_writable

        check_writable(param.opts[0] if param is not None else "file", Path(value))
        return super().convert(value, param, ctx)


def tell_written(*paths: Path | None) -> None:
    """Say which files there are now; None is one that nobody wanted."""
    for path in paths:
        if path is not None:
            click.echo(f"Written: {path.absolute()}", err=True)
