"""Options of several commands, and their types: paths are checked when the command line is parsed, before any work."""

import shlex
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from kvtier.config.value_types import Seconds, parse_count, parse_number, parse_size
from kvtier.report.output import check_chart, check_matplotlib, check_writable, note_earlier, write_json


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
    """A file to write, in an existing directory.

    Args:
        content: a report or a picture needs matplotlib, which is checked too.
    """

    def __init__(self, content: Literal["anything", "report", "picture"] = "anything") -> None:
        super().__init__(path_type=Path)
        self._content = content

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """See `click.ParamType`."""
        option = param.opts[0] if param is not None else "file"
        check_writable(option, Path(value))
        note_earlier(Path(value))
        if self._content == "picture":
            check_chart(option, Path(value))
        elif self._content == "report":
            check_matplotlib(option)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """A finite number in a range, also written ``10k``.

    click's own range lets nan through, which is neither above nor below a limit.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """See `click.ParamType`."""
        with suppress(ValueError):  # click reads what is left, such as 1e-3, or refuses it
            value = float(parse_number(str(value)))
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value!r} is not finite", param, ctx)


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
    """A duration, such as ``500ms``, in a range."""

    name = "time"

    def __init__(self, least_s: float = 0.0, most_s: float = 1e9) -> None:
        self._kind = Seconds(least_s, most_s)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            return self._kind.read(value, is_text=True)
        except ValueError as error:
            with suppress(ValueError):  # also 1e-3, which settings do not have
                return self._kind.read(float(value), is_text=True)
            self.fail(f"{value}: {error}; allowed: {self._kind.allowed}", param, ctx)


class Quantity(click.IntRange):
    """A whole number in a range: ``4096``, ``131,072``, ``128k`` or ``128Ki``."""

    name = "count"

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        super().__init__(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """See `click.ParamType`."""
        try:
            count = parse_count(str(value), is_signed=True)
        except ValueError as error:
            self.fail(f"{value!r} is {error}", param, ctx)
        return super().convert(count, param, ctx)


def tier_option(help: str, *, multiple: bool = True) -> Callable[[Any], Any]:  # noqa: A002 - the word that click uses
    """The option `--tier`, whose text has one form in all commands: see `config.tier_list`."""
    name = "tiers" if multiple else "tier"
    form = "[NAME=]KIND[:WHERE][?KEY=VALUE&...]|KIND=SIZE"
    return click.option("--tier", name, multiple=multiple, metavar=form, help=help)


def gpu_option(help: str) -> Callable[[Any], Any]:  # noqa: A002 - the word that click uses
    """The option `--gpu`. One kind of GPU is allowed, so that no text is silently ignored."""

    def once(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> str | None:
        if len(texts) > 1:
            raise click.BadParameter(f"{' and '.join(texts)} are given; allowed: one kind of GPU")
        return texts[0] if texts else None

    return click.option("--gpu", multiple=True, metavar="[Nx]NAME", callback=once, help=help)


def is_given(name: str) -> bool:
    """Whether the parameter of the running command is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def origin(name: str) -> str:
    """``flag`` if the parameter of the running command is on the command line, else ``default``."""
    return "flag" if is_given(name) else "default"


def write_record(path: Path | None, benchmark: str, **conditions: Any) -> None:  # noqa: ANN401 - of `make_record`
    """Write the record of `--record`, if there is one, and say so."""
    from kvtier.bench.record import make_record

    if path is not None:
        write_json("--record", path, make_record(benchmark, **conditions))
        tell_written(path)


def tell_written(*paths: Path | None) -> None:
    """Print the path of each written file to stderr."""
    for path in paths:
        if path is not None:
            click.echo(f"Written: {path.absolute()}", err=True)
