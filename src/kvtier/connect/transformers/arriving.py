"""A load that the model does not wait for: layer i computes while layer i + 1 arrives.

The cache is handed out before its bytes are there. Each of its layers waits at its first use, with a deadline; when a
chunk turns out to be missing, the wait ends in `MissingLayerError`, nothing has been shown to anybody yet, and the call
begins again with what can be had.
"""

import time
from collections.abc import Mapping

from kvtier.connect.transformers.waiting import Waiting
from kvtier.device.layers import LayerReadiness
from kvtier.errors import KvError
from kvtier.types import LoadDone, RequestId

_LOOK_S = 0.005
"""How often a layer that waits asks whether its load has failed."""
_END_S = 5.0
"""How long the answers to loads may take whose last layer has been used."""


class MissingLayerError(KvError):
    """A layer that was promised has not come. Raised in the model, caught by who called it."""


class Arriving:
    """The loads of one call.

    Args:
        waiting: which polls the session.
        readiness: told of each layer by the copier.
        requests: the loads, by the number of their row; none has ended.
        deadline: on the monotonic clock; what has not come then is missing.
    """

    def __init__(
        self, waiting: Waiting, readiness: LayerReadiness, requests: Mapping[int, RequestId], deadline: float
    ) -> None:
        self._waiting = waiting
        self._readiness = readiness
        self._requests = dict(requests)
        self.deadline = deadline
        self.waited_s = 0.0
        """Seconds that the model stood still."""

    @property
    def is_late(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() >= self.deadline

    @property
    def done(self) -> dict[int, LoadDone]:
        """How those that have ended did, by row."""
        return {
            row: event for row, request in self._requests.items() if (event := self._waiting.ended(request)) is not None
        }

    def wait(self, layer: int) -> None:
        """Wait until the model's layer `layer` is whole.

        Raises:
            MissingLayerError: it will not be, or not in time.
        """
        started = time.perf_counter()
        try:
            while not self._readiness.wait(layer, _LOOK_S):
                self._waiting.take()
                if any(event.failed for event in self.done.values()):
                    raise MissingLayerError(f"a chunk of layer {layer} could not be had")
                if self.is_late:
                    raise MissingLayerError(f"layer {layer} was not there in time")
        finally:
            self.waited_s += time.perf_counter() - started

    def end(self) -> bool:
        """Wait for the answers of all loads, for a moment; whether all came."""
        until = min(time.monotonic() + _END_S, max(self.deadline, time.monotonic() + _LOOK_S))
        while len(self.done) < len(self._requests) and time.monotonic() < until:
            self._waiting.take(_LOOK_S)
        return len(self.done) == len(self._requests)

    def leave(self) -> None:
        """Wait for nothing any more."""
        self._waiting.leave(list(self._requests.values()))
