"""Files that a plan writes: whole or not at all, and refused before anything is computed for them."""

import os
from importlib.util import find_spec
from pathlib import Path

from kvtier.errors import ConfigError

SUFFIXES = (".svg", ".png")
"""Kinds of picture files."""


def check_picture(option: str, path: Path) -> None:
    """Refuse a picture file that cannot be written.

    Raises:
        ConfigError: the kind of file is not known, matplotlib is missing, or the place cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{option} {str(path)!r}: unknown kind of picture; allowed: {' or '.join(SUFFIXES)}")
    check_library(option)
    check_writable(option, path)


def check_library(option: str) -> None:
    """Refuse to draw without matplotlib.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib, which is not installed; allowed: pip install 'kvtier[plots]'")


def check_writable(option: str, path: Path) -> None:
    """Refuse a path that cannot be written.

    Raises:
        ConfigError: it is a directory, or no file can be made there.
    """
    parent = next(it for it in path.absolute().parents if it.exists())
    if path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a directory; allowed: a file")
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"{option} {str(path)!r} cannot be written: no writing in {str(parent)!r}")


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Write a file; missing parent directories are made.

    Raises:
        ConfigError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        if draft.exists():
            draft.unlink()
