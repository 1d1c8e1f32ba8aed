"""Writes JSON, progress and files. Output paths are checked before any work, and files are replaced atomically."""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from enum import Enum
from filecmp import cmp
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TypeVar

import click

from kvtier.errors import ConfigError, install_hint

Shown = TypeVar("Shown")

LINE_S = 10.0
"""Time between two progress lines in a log."""

EARLIER = "kvtier.earlier"
"""Key in click's context for the files that existed before the command."""

CHART_SUFFIXES = (".svg", ".png")


def print_json(result: object) -> None:
    """Print `result`, a dataclass or plain values, to stdout."""
    click.echo(json.dumps(result, indent=2, default=_plain))


def print_result(result: Shown, draw: Callable[[Shown], None], *, as_json: bool) -> None:
    """Print `result` as JSON, or with `draw`."""
    (print_json if as_json else draw)(result)


@contextmanager
def progress(label: str, total: float | None) -> Generator[Callable[[float], None]]:
    """Show progress on stderr and yield a function that advances it: a bar on a terminal, or a line every `LINE_S`."""
    if not sys.stderr.isatty():
        yield _ProgressLines(label, total).advance
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda advance: bar.advance(task, advance)


class _ProgressLines:
    """Prints progress as lines for a log."""

    def __init__(self, label: str, total: float | None) -> None:
        self._label, self._total = label, total
        self._done = 0.0
        self._next_s = time.monotonic() + LINE_S

    def advance(self, amount: float) -> None:
        self._done += amount
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_S
            share = f"{self._done / self._total:.0%}" if self._total else f"{self._done:,.0f}"
            click.echo(f"{self._label}: {share}", err=True)


def write_json(option: str, path: Path, result: object) -> None:
    """Write `result`, a dataclass or plain values, to `path`.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_file(option, path, json.dumps(result, indent=1, ensure_ascii=False, default=_plain) + "\n")


def write_file(option: str, path: Path, content: str | bytes) -> None:
    """Write a file atomically, as in `replaced`. Text is encoded as UTF-8.

    Raises:
        ConfigError: the file cannot be written.
    """
    with replaced(option, path) as draft, draft.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced(option: str, path: Path) -> Generator[Path]:
    """Yield the path of a draft, which the caller opens with mode "x". The complete draft replaces `path`.

    A file of an earlier command is kept next to the new one if `note_earlier` recorded it.

    Args:
        option: the command line's option, for the error message; may be empty.
        path: the file. A symbolic link is kept and its target replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    target = path.resolve()
    # The name cannot be predicted, and "x" does not follow a link planted under it.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        yield draft
        _keep_earlier(target, draft)
        draft.replace(target)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror or error}", setting=option, value=repr(str(path))
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink()


def note_earlier(path: Path) -> None:
    """Record a file that exists before the command writes to it, so that `replaced` keeps it under another name."""
    if path.exists() and (context := click.get_current_context(silent=True)):
        context.meta.setdefault(EARLIER, set()).add(path.resolve())


def _keep_earlier(target: Path, draft: Path) -> None:
    """Add the first free number to the earlier file's name, unless the new file has the same bytes."""
    context = click.get_current_context(silent=True)
    earlier: set[Path] = context.meta.get(EARLIER, set()) if context else set()
    if target not in earlier:
        return
    earlier.remove(target)  # later output of this command replaces its earlier output
    with suppress(OSError):  # a file that cannot be read is kept without a comparison
        if cmp(target, draft, shallow=False):
            return
    for kept in (target.with_name(f"{target.name}.{number}") for number in count(1)):
        with suppress(FileExistsError):
            try:
                os.link(target, kept)  # also keeps a file that another command wrote meanwhile, and never replaces one
            except FileNotFoundError:
                return
            except OSError:  # the name is taken, or hard links are not supported or not allowed for this owner
                kept.touch(exist_ok=False)
                target.replace(kept)
            click.echo(f"Kept: the earlier {target.name} is now {kept}", err=True)
            return


def check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written.

    Raises:
        ConfigError: the path is a directory, a device or this command's output, its directory is missing, or no file
            can be created there.
    """
    parent, about = Path(os.path.realpath(path)).parent, {"setting": option, "value": repr(str(path))}
    if path.is_dir():
        raise ConfigError("is a directory", **about, allowed="a file")
    if path.exists() and (not path.is_file() or _is_output(path)):
        what = "the output of this command" if path.is_file() else "not a regular file"
        raise ConfigError(f"is {what}", **about, allowed="a file, which is replaced as a whole")
    if not parent.is_dir():
        raise ConfigError(f"cannot be written: there is no directory {str(parent)!r}", **about)
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"cannot be written: {str(parent)!r} is not writable", **about)


def _is_output(path: Path) -> bool:
    """Return whether `path` is stdout or stderr of this process."""
    with suppress(OSError):  # one of them is closed
        return any(os.path.samestat(path.stat(), os.fstat(it)) for it in (1, 2))
    return False


def check_matplotlib(option: str) -> None:
    """Refuse to draw charts without matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if not has_matplotlib():
        raise ConfigError(f"needs matplotlib, which is not installed; run {install_hint('plots')}", setting=option)


def has_matplotlib() -> bool:
    """Return whether charts can be drawn. This does not import matplotlib."""
    return find_spec("matplotlib") is not None


def check_chart(option: str, path: Path) -> None:
    """Refuse a chart file that cannot be written.

    Raises:
        ConfigError: the suffix is unknown, matplotlib is missing, or `path` cannot be written.
    """
    if path.suffix.lower() not in CHART_SUFFIXES:
        raise ConfigError(
            "has an unknown picture format", setting=option, value=repr(str(path)), allowed=" or ".join(CHART_SUFFIXES)
        )
    check_matplotlib(option)
    check_writable(option, path)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"no JSON form for {type(value).__name__}")
