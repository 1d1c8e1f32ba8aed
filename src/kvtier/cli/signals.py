"""Signals of commands that run for a while."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_signals(*numbers: signal.Signals) -> Generator[Callable[[], int | None]]:
    """Yield a function that returns the signal that came, if any. The second signal ends the process as usual."""
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
