"""What all tests share."""

import contextlib
import signal

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
