"""Queries what is installed: versions of packages, and programs that import an engine."""

import json
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from kvtier.errors import ConfigError


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these packages that is installed; None if none is."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


class NotInTimeError(ConfigError):
    """A program that imports an engine did not answer by its deadline."""


def ask_program(command: Sequence[str], deadline_s: float, allowed: str) -> dict[str, Any]:
    """Run a program and return the JSON object on its last line of output. Kill the program at the deadline.

    Args:
        command: the command line.
        deadline_s: seconds that the program may run.
        allowed: text for error messages that says what the command may be.

    Raises:
        NotInTimeError: the deadline has passed.
        ConfigError: the program cannot be run, it fails, or its last line is not a JSON object.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=deadline_s,
            check=False,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{command[0]}: {error.strerror or error}; {allowed}") from error
    except subprocess.TimeoutExpired:
        raise NotInTimeError(f"{command[0]}: no answer within {deadline_s:.3g} s; {allowed}") from None
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError, RecursionError):
        end = " ".join(done.stderr.split())[-300:]
        raise ConfigError(f"{command[0]}: exit code {done.returncode}: {end or 'no output'}; {allowed}") from None
