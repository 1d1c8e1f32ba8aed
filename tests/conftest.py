"""What all tests share."""

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

with contextlib.suppress(ModuleNotFoundError):  # the environment of tests/vllm has none
    from hypothesis import HealthCheck, settings

    # Deterministic and without deadlines, so a busy machine fails no test. `make nightly` takes more and other
    # examples.
    settings.register_profile(
        "quick", max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("nightly", max_examples=400, deadline=None)
    settings.load_profile("quick")


def pytest_configure() -> None:
    """Make Ctrl-C work in a shell's background jobs and all their children, which otherwise ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for no garbage while tests are collected, nor later among what then exists, which stays to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by argument and position, because content such as a gzip header has the time of its creation."""
    return argname if isinstance(val, bytes | bytearray) else None


def opened_by(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Yield `make` for a fixture, and close what it has made after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *given, **named: stack.enter_context(contextlib.closing(make(*given, **named)))


@pytest.fixture
def open_directory() -> Iterator[Callable[..., Any]]:
    """Yield a function that opens directory tiers."""
    from kvtier.tier.directory.tier import DirectoryTier

    yield from opened_by(DirectoryTier)
