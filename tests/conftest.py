"""What all tests share."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

with contextlib.suppress(ModuleNotFoundError):  # the environment of tests/vllm has none
    from hypothesis import HealthCheck, settings

    # Deterministic and without deadlines: a busy machine fails nothing. `make nightly` takes more and other examples.
    settings.register_profile(
        "quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("nightly", max_examples=400, deadline=None)
    settings.load_profile("quick")


def pytest_configure() -> None:
    """Make Ctrl-C work in background jobs of a shell, which ignore it, with all their children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument and position: content such as a gzip header holds the time of its making."""
    return argname if isinstance(val, bytes | bytearray) else None


def opened_by(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """For a fixture: `make`, and what it has made is closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(contextlib.closing(make(*given, **named)))


@pytest.fixture
def open_directory() -> Iterator[Callable[..., Any]]:
    """Opens directory tiers."""
    from kvtier.tier.directory.tier import DirectoryTier

    yield from opened_by(DirectoryTier)
