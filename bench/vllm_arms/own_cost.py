"""CPU time of a connector's own code: its threads, and its calls in the engine's threads.

Elapsed time cannot resolve one percent of a step on a shared machine; CPU time can.
"""

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any

_WORKERS = frozenset({
    "register_kv_caches", "bind_connector_metadata", "clear_connector_metadata", "handle_preemptions", "start_load_kv",
    "wait_for_save", "get_finished", "get_transfer_results", "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events", "build_connector_worker_meta",
})  # fmt: skip
"""Methods of vLLM's interface that it calls in a worker; the others are the scheduler's."""

_UNCOUNTED = frozenset({"wait_for_layer_load", "save_kv_layer"})
"""Called for each layer and empty in both connectors: reading the clock would take longer."""

_CLASSES = {
    "kvtier": ("kvtier.connect.vllm", "KvtierConnector"),
    "native": ("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector", "OffloadingConnector"),
}


_THREADS = ("kvtier", "native-tiering", "vllm_kv", "vllm_offloading")
"""How the names of the connectors' threads begin."""


class _Calls:
    """CPU time of calls of the connector, whose methods may be nested, by side."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.depth = 0

    def counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with its time added. The engine calls all of them from one thread."""
        side = "worker" if name in _WORKERS else "scheduler"

        @functools.wraps(method)
        def call(*arguments: object, **named: object) -> object:
            began_s = time.thread_time()
            self.depth += 1
            try:
                return method(*arguments, **named)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds[side] += time.thread_time() - began_s

        return call


_CALLS = _Calls()


def count_kvtier() -> None:
    """Start counting kvtier's calls; called in the engine's process before the engine is built."""
    _count(*_CLASSES["kvtier"])


def count_native() -> None:
    """Start counting the calls of vLLM's native tiering."""
    _count(*_CLASSES["native"])


def _count(module: str, name: str) -> None:
    connector = getattr(import_module(module), name)
    for method, member in list(vars(connector).items()):
        if callable(member) and not method.startswith("__") and method not in _UNCOUNTED:
            setattr(connector, method, _CALLS.counted(method, member))


def own_cpu_s() -> dict[str, float]:
    """CPU seconds so far by part: calls of `scheduler` and `worker`, and the connector's threads by name."""
    seconds = _CALLS.seconds.copy()
    for thread in threading.enumerate():
        if thread.ident is not None and thread.name.startswith(_THREADS):
            name = thread.name.rstrip("0123456789")
            seconds[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return dict(seconds)
