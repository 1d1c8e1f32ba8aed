"""Layerwise loads: the order of the copies, and the readiness of each layer."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvtier.device.streams import Event

_WAIT_S = 60.0
"""Threads check again after this long, so that a lost wake-up cannot stall them."""


class ChunkScatter:
    """One chunk, scattered in steps.

    Args:
        kind: chunks of one kind have the same steps and are scattered together.
        layers: the first of the model's layers that each step brings; ascending.
    """

    def __init__(self, kind: object, layers: Sequence[int]) -> None:
        self.kind = kind
        self.layers = layers
        self.step = 0
        """The next step."""
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether no step remains."""
        return self.error is not None or self.step == len(self.layers)


Move = Callable[[list[ChunkScatter]], None]
"""Makes the next step of chunks of one kind that are at the same step. Its error applies to all of them."""


class LayerOrder:
    """Scatters chunks layer by layer, lowest layer first, over all chunks that are in host memory. Thread-safe.

    One mover thread has one chunk, but the engine needs the first layer of every chunk before the second of any. So
    the threads share their chunks: a thread that finds none at work makes the lowest outstanding step of all chunks
    at once. Chunks that have not arrived are not waited for.

    Args:
        move: makes a step.
        at_once: most chunks of one call of `move`.
    """

    def __init__(self, move: Move, *, at_once: int) -> None:
        self._move = move
        self._at_once = at_once
        self._is_moving = False
        self._waiting: list[ChunkScatter] = []
        self._changed = threading.Condition()

    def run(self, chunk: ChunkScatter) -> None:
        """Make all steps of `chunk`, and steps of other threads' chunks meanwhile. Raises what `move` raised."""
        with self._changed:
            self._waiting.append(chunk)
            while not chunk.is_over:
                if self._is_moving or not self._waiting:
                    self._changed.wait(_WAIT_S)
                    continue
                chunks = self._take_lowest()
                self._is_moving = True
                self._changed.release()
                try:
                    self._step(chunks)
                finally:
                    self._changed.acquire()
                    self._is_moving = False
                    self._waiting += [one for one in chunks if not one.is_over]
                    self._changed.notify_all()
        if chunk.error is not None:
            raise chunk.error

    def _take_lowest(self) -> list[ChunkScatter]:
        first = min(self._waiting, key=lambda chunk: chunk.layers[chunk.step])
        alike = [it for it in self._waiting if (it.kind, it.step) == (first.kind, first.step)][: self._at_once]
        self._waiting = [it for it in self._waiting if it not in alike]
        return alike

    def _step(self, chunks: list[ChunkScatter]) -> None:
        try:
            self._move(chunks)
        except Exception as error:  # noqa: BLE001 - each chunk's own thread raises it
            for chunk in chunks:
                chunk.error = error
        except BaseException as error:
            for chunk in chunks:
                chunk.error = RuntimeError(f"{type(error).__name__} in the thread that scattered it")
            raise
        else:
            for chunk in chunks:
                chunk.step += 1


class LayerReadiness:
    """Tracks which layers of one load have arrived. Copiers report, the engine's thread waits.

    Args:
        expected: chunks of each layer, by the layer's number in the model.
    """

    def __init__(self, expected: Mapping[int, int]) -> None:
        self._missing = dict(expected)
        self._events: dict[int, list[Event]] = {}
        self._changed = threading.Condition()

    def arrived(self, layers: Iterable[int], chunks: int, events: Iterable[Event] = ()) -> None:
        """Count `chunks` more of these layers, which are complete once `events` have been reached."""
        behind = list(events)
        with self._changed:
            for layer in layers:
                self._missing[layer] -= chunks
                # Of one stream only the last event counts, but streams are not known here; events are few.
                self._events.setdefault(layer, []).extend(behind)
            self._changed.notify_all()

    def wait(self, layer: int, seconds: float) -> bool:
        """Whether a layer is complete within `seconds`. Device work queued by the caller afterwards runs behind it."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._missing.get(layer, 0) <= 0, seconds):
                return False
            events = self._events.pop(layer, [])
        for event in events:
            event.hold()
        return True
