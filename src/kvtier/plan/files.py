"""Files that a plan writes: whole or not at all, and refused before anything is computed for them."""

import os
import secrets
from contextlib import suppress
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
        ConfigError: it is a directory or a device, its directory is missing, or no file can be made there.
    """
    parent = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a directory; allowed: a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{option} {str(path)!r} is no regular file; allowed: a file, which is replaced as a whole")
    if not parent.is_dir():
        raise ConfigError(f"{option} {str(path)!r} cannot be written: there is no directory {str(parent)!r}")
    if not os.access(parent, os.W_OK):
        raise ConfigError(f"{option} {str(path)!r} cannot be written: no writing in {str(parent)!r}")


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Write a file, whole or not at all: until it is whole, its name keeps what it had.

    Raises:
        ConfigError: it cannot be written.
    """
    there = path.resolve()  # a link stays, and what it names is replaced
    draft = there.with_name(f".{there.name}.{secrets.token_hex(8)}")
    try:
        with draft.open("xb") as file:  # no link is followed
            file.write(content)
        draft.replace(there)
    except OSError as error:
        raise ConfigError(f"{option} {str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            draft.unlink()
