"""What the connector's own code takes of the processor: all its threads, and its calls within the engine's.

A clock cannot tell one percent of a step on a machine that others use as well; this counts the work itself.
"""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from kvtier.connect.vllm import KvtierConnector


class _Calls:
    """Time spent in calls of the connector, whose methods call each other."""

    seconds = 0.0
    depth = 0

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with its time added up. The engine calls all of them from one thread."""

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
    """From now on; called in the engine's process before it is built."""
    for name, member in list(vars(KvtierConnector).items()):
        if callable(member) and not name.startswith("__"):
            setattr(KvtierConnector, name, _CALLS.counted(member))


def own_cpu_s() -> float:
    """Processor seconds so far."""
    ours = [thread.ident for thread in threading.enumerate() if thread.name.startswith("kvtier")]
    return _CALLS.seconds + sum(time.clock_gettime(time.pthread_getcpuclockid(it)) for it in ours if it is not None)
