"""What tests say about a wrong setting: the fields of the error, and not its text."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from kvtier.errors import ConfigError


@contextmanager
def refuses(
    setting: str,
    problem: str = "",
    *,
    value: str = "",
    origin: str = "",
    allowed: str = "",
    kind: type[ConfigError] = ConfigError,
) -> Generator[pytest.ExceptionInfo[ConfigError]]:
    """The block raises an error of this setting, whose other fields contain these texts."""
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.setting == setting, error
    for found, text in (
        (error.problem, problem),
        (error.value, value),
        (error.origin, origin),
        (error.allowed, allowed),
    ):
        assert text in found, error
    assert "\n" not in str(error)
