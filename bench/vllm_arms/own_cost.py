"""CPU time of the connector's own code: its threads, and its calls in the engine's threads.

Elapsed time cannot resolve one percent of a step on a shared machine; CPU time can.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from kvtier.connect.vllm import KvtierConnector


class _Calls:
    """CPU time of calls of the connector, whose methods may be nested."""

    seconds = 0.0
    depth = 0

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with its time added. The engine calls all of them from one thread."""

        @functools.wraps(method)
        def call(*arguments: object, **named: object) -> object:
            began_s = time.thread_time()
            self.depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += time.thread_time() - began_s

        return call


_CALLS = _Calls()


def count() -> None:
    """Start counting; called in the engine's process before the engine is built."""
    for name, member in list(vars(KvtierConnector).items()):
        if callable(member) and not name.startswith("__"):
            setattr(KvtierConnector, name, _CALLS.counted(member))


def own_cpu_s() -> float:
    """CPU seconds so far."""
    ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("kvtier")]
    return _CALLS.seconds + sum(time.clock_gettime(time.pthread_getcpuclockid(it)) for it in ours if it is not None)
