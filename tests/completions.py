"""Takes an executor's completions, for tests that wait for them."""

from queue import SimpleQueue
from typing import Any

from kvtier.runtime.executor import Completion
from kvtier.tools.bench.io_harness import taken

RETRY_S = 0.005


def taking(executor: Any) -> Any:
    """Return `executor` with a method `take`, which flushes it and returns the completions since the last call.

    It waits up to `wait_s` seconds for the first one, and returns early while a rank reads slowly.
    """
    completions: SimpleQueue[Completion] = SimpleQueue()
    executor.complete_to(completions.put, lambda: None)
    executor.take = lambda wait_s=0.0: taken(completions, wait_s if executor.flush() else min(wait_s, RETRY_S))
    return executor
