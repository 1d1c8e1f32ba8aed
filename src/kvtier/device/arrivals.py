"""Which layers of a load have landed: what the engine waits for, layer by layer, while the rest still arrives."""

import threading
from collections.abc import Iterable, Mapping

from kvtier.device.streams import Event


class Arrivals:
    """The layers of one load. Copiers tell, the engine's thread asks.

    Args:
        expected: how many chunks each layer is made of, by the layer's number in the model.
    """

    def __init__(self, expected: Mapping[int, int]) -> None:
        self._left = dict(expected)
        self._events: dict[int, list[Event]] = {}
        self._news = threading.Condition()

    def landed(self, layers: Iterable[int], chunks: int, events: Iterable[Event] = ()) -> None:
        """So many more chunks of these layers are there, or will be when `events` have come."""
        told = list(events)
        with self._news:
            for layer in layers:
                self._left[layer] -= chunks
                # Of one queue only the last counts, but queues are not known here; there are few.
                self._events.setdefault(layer, []).extend(told)
            self._news.notify_all()

    def wait(self, layer: int, seconds: float) -> bool:
        """Whether a layer is whole within `seconds`. What the caller gives the device from now on comes after it."""
        with self._news:
            if not self._news.wait_for(lambda: self._left.get(layer, 0) <= 0, seconds):
                return False
            events = self._events.pop(layer, [])
        for event in events:
            event.hold()
        return True
