"""Options of several tools, the types of these options, and the signals of long-running commands."""

import shlex
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import click

from kvtier.cli.options import is_given, only_one
from kvtier.config.value_types import parse_number, parse_size


class WorkDirectory(click.Path):
    """An existing directory on the drive to measure.

    A missing one is refused rather than created: if the drive is not mounted, the new directory would be on another
    drive.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path, exists=True, file_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Parse the text of an option."""
        path = Path(value)
        if not path.exists():
            parent = next((str(it) for it in path.absolute().parents if it.exists()), "/")
            advice = f"create it on the drive to measure: mkdir -p {shlex.quote(str(path))}"
            self.fail(f"directory {str(path)!r} does not exist, only {parent!r} does; {advice}", param, ctx)
        return super().convert(value, param, ctx)


class NumberRange(click.FloatRange):
    """A finite number in a range, also written ``10k``.

    click's own range accepts nan, which is neither above nor below a limit.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # noqa: ANN401
        """Parse the text of an option."""
        with suppress(ValueError):  # click reads other forms, such as 1e-3, or refuses them
            value = float(parse_number(str(value)))
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value!r} is not finite", param, ctx)


class Bytes(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] - not generic before click 8.3
    """A number of bytes, such as ``64GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401
        """Parse the text of an option."""
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(f"{value}: {error}; allowed: bytes, or a number with KiB, MiB, GiB", param, ctx)


def gpu_option(help: str) -> Callable[[Any], Any]:  # noqa: A002 - the word that click uses
    """Return the option `--gpu` for one kind of GPU."""
    return click.option("--gpu", multiple=True, metavar="[Nx]NAME", callback=only_one("one kind of GPU"), help=help)


def _split(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


ignore_option = click.option(
    "--ignore",
    multiple=True,
    metavar="FIELD[,FIELD]",
    callback=_split,
    help="Read the config.json without these fields; repeatable.",
)
"""The option `--ignore` of the commands that read a config.json. Its values are names without commas."""


def refuse_beside(option: str) -> None:
    """Refuse parameters other than `option` and --json, because the list that `option` prints ignores them."""
    shown = [it.opts[0] for it in click.get_current_context().command.params if is_given(it.name or "")]
    if others := [name for name in shown if name not in (option, "--json")]:
        raise click.UsageError(f"{option} is given with {', '.join(others)}; allowed: {option} alone, or with --json")


def origin(name: str) -> str:
    """Return ``flag`` if parameter `name` of the running command is on the command line, or else ``default``."""
    return "flag" if is_given(name) else "default"


@contextmanager
def noted_signals(*numbers: signal.Signals) -> Generator[Callable[[], int | None]]:
    """Yield a function that returns the signal that arrived, if any. A second signal has its usual effect."""
    seen: int | None = None

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen = number
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, note)
    try:
        yield lambda: seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C, so that temporary files are removed."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
