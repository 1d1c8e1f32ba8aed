"""Option types of the commands: paths are checked when the command line is parsed, before any work starts."""

import shlex
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvtier.config.value_types import parse_count, parse_seconds, parse_size


class WorkDirectory(click.Path):
    """An existing directory on the drive to measure; a missing one may be a mount point, so it is not created."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, exists=True, file_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`."""
        path = Path(value)
        if not path.exists():
            parent = next((str(it) for it in path.absolute().parents if it.exists()), "/")
            advice = f"create it on the drive to measure: mkdir -p {shlex.quote(str(path))}"
            self.fail(f"directory {str(path)!r} does not exist, only {parent!r} does; {advice}", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(click.Path):
    """A file to write, in an existing directory."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`."""
        from kvtier.report.output import check_writable

        check_writable(param.opts[0] if param is not None else "file", Path(value))
        return super().convert(value, param, ctx)


class ReportFile(OutputFile):
    """An HTML report with charts: also refused without matplotlib."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`."""
        from kvtier.report.output import check_matplotlib

        path = super().convert(value, param, ctx)
        check_matplotlib("--report")
        return path


class PictureFile(OutputFile):
    """A file of charts: also refused without matplotlib, or if it is neither .svg nor .png."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`."""
        from kvtier.report.output import check_chart

        path = super().convert(value, param, ctx)
        check_chart("--picture", path)
        return path


class Bytes(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not generic before click 8.3
    """Bytes, such as ``64GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(f"{value}: {error}; allowed: bytes, or a number with KiB, MiB, GiB", param, ctx)


class Duration(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not generic before click 8.3
    """A duration, such as ``500ms``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            return value if isinstance(value, float) else parse_seconds(value)
        except ValueError as error:
            self.fail(f"{value}: {error}; allowed: a number with a unit, such as 500ms", param, ctx)


class Quantity(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not generic before click 8.3
    """Tokens or users: ``4096``, ``131,072``, ``128k`` or ``128Ki``."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            return value if isinstance(value, int) else parse_count(value)
        except ValueError as error:
            self.fail(f"{value!r} is {error}", param, ctx)


def origin(name: str) -> str:
    """``flag`` if the parameter of the running command is on the command line, else ``default``."""
    source = click.get_current_context().get_parameter_source(name)
    return "flag" if source is ParameterSource.COMMANDLINE else "default"


def tell_written(*paths: Path | None) -> None:
    """Print the path of each written file to stderr."""
    for path in paths:
        if path is not None:
            click.echo(f"Written: {path.absolute()}", err=True)
