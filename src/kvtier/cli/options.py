"""Options that several commands share, and their types. Paths are checked while parsing, before any work."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from kvtier.config.value_types import Seconds, parse_count
from kvtier.report.output import check_chart, check_matplotlib, check_writable, note_earlier


class OutputFile(click.Path):
    """A file to write, in an existing directory.

    Args:
        content: kind of content. A report or a picture also requires matplotlib, which is then checked.
    """

    def __init__(self, content: Literal["anything", "report", "picture"] = "anything") -> None:
        super().__init__(path_type=Path)
        self._content = content

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Parse the text of an option."""
        option = param.opts[0] if param is not None else "file"
        check_writable(option, Path(value))
        note_earlier(Path(value))
        if self._content == "picture":
            check_chart(option, Path(value))
        elif self._content == "report":
            check_matplotlib(option)
        return super().convert(value, param, ctx)


class Duration(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not generic before click 8.3
    """A duration, such as ``500ms``, in a range."""

    name = "time"

    def __init__(self, least_s: float = 0.0, most_s: float = 1e9) -> None:
        self._kind = Seconds(least_s, most_s)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Parse the text of an option."""
        try:
            return self._kind.read(value, is_text=True)
        except ValueError as error:
            with suppress(ValueError):  # options also take 1e-3, settings do not
                return self._kind.read(float(value), is_text=True)
            self.fail(f"{value}: {error}; allowed: {self._kind.allowed}", param, ctx)


class Quantity(click.IntRange):
    """A whole number in a range: ``4096``, ``131,072``, ``128k`` or ``128Ki``."""

    name = "count"

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        super().__init__(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Parse the text of an option."""
        try:
            count = parse_count(str(value), is_signed=True)
        except ValueError as error:
            self.fail(f"{value!r} is {error}", param, ctx)
        return super().convert(count, param, ctx)


def only_one(what: str) -> Callable[[click.Context, click.Parameter, tuple[str, ...]], str | None]:
    """Return a callback that refuses a second value, so that no value is silently ignored."""

    def once(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> str | None:
        if len(texts) > 1:
            raise click.BadParameter(f"{' and '.join(texts)} are given; give {what}")
        return texts[0] if texts else None

    return once


def tier_option(help: str, *, multiple: bool = True) -> Callable[[Any], Any]:  # noqa: A002 - the word that click uses
    """Return the option `--tier`. Its value has the same form in all commands; see `config.tier_list`."""
    name, once = ("tiers", None) if multiple else ("tier", only_one("one tier; run the command once for each"))
    form = "[NAME=]KIND[:WHERE][?KEY=VALUE&...]|KIND=SIZE"
    return click.option("--tier", name, multiple=True, metavar=form, callback=once, help=help)


def is_given(name: str) -> bool:
    """Return whether the running command's parameter `name` is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def tell_written(*paths: Path | None) -> None:
    """Print the path of each written file to stderr."""
    for path in paths:
        if path is not None:
            click.echo(f"Written: {path.absolute()}", err=True)
