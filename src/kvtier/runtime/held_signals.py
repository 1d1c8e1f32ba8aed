"""Delays signals while a call runs, because a handler may raise at any instruction and leave the call half done.

Python runs handlers in the main thread, whichever thread of the process receives the signal. So blocking signals in a
thread does not help, and each handler is replaced while the call runs. Finding the handlers takes half a
microsecond. Two kinds of signals are left alone: fault signals, which belong to an instruction, and real-time
signals.
"""

import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

_signal: Any = import_module("_signal")
"""The `signal` module without its enums, which would add a dozen Python calls to each call."""

_OTHERS: Final = {"SIGKILL", "SIGSTOP", "SIGILL", "SIGTRAP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGSEGV", "SIGSYS"}
_SIGNALS: Final = sorted(int(it) for it in signal.Signals if it.name not in _OTHERS and it < signal.SIGRTMIN)

_known: tuple[list[Any], list[tuple[int, Any]]] = ([], [])
"""The handlers of all signals at the last call, and the (signal, handler) pairs of those written in Python."""


def without_signals(call: Callable[..., None], *arguments: object) -> None:
    """Make a call in the main thread. The handler of a signal that arrives meanwhile runs once, after the call."""
    global _known  # noqa: PLW0603 - a cache
    handlers = [*map(_signal.getsignal, _SIGNALS)]
    if handlers != _known[0]:
        _known = handlers, [it for it in zip(_SIGNALS, handlers, strict=True) if callable(it[1])]
    ours, is_over = _known[1], False
    waiting: dict[int, object] = {}

    def hold(number: int, frame: object) -> None:
        if is_over:  # an earlier handler, already restored, has raised
            dict(ours)[number](number, frame)
        else:
            waiting[number] = frame

    try:
        for number, _ in ours:
            _signal.signal(number, hold)
        call(*arguments)
    finally:
        try:
            for number, handler in ours:
                _signal.signal(number, handler)
        except BaseException:  # a handler that was already restored has raised
            for number, handler in ours:
                _signal.signal(number, handler)
            raise
        finally:
            is_over = True
            if waiting:
                _deliver(waiting, dict(ours))


def _deliver(waiting: dict[int, object], handlers: dict[int, Any]) -> None:
    """Call the handlers of waiting signals, even if one of them raises."""
    while waiting:
        number, frame = waiting.popitem()
        try:
            handlers[number](number, frame)
        finally:
            _deliver(waiting, handlers)
