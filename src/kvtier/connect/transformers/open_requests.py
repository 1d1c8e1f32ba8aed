"""Open loads and stores of the session: a call waits for its loads; stores go on after the call."""

import time
from collections.abc import Sequence

from kvtier.connect.transformers.caches import Spans
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.runtime.session import Session
from kvtier.types import LoadDone, Place, Prefix, RequestId, StoreDone

_POLL_S = 0.05


class OpenRequests:
    """Polls the session, and releases the tensors of each load and store that has ended.

    Args:
        session: must not be polled by anything else.
        copier: holds the tensors.
    """

    def __init__(self, session: Session, copier: CacheCopier) -> None:
        self._session = session
        self._copier = copier
        self._loads: dict[RequestId, LoadDone | None] = {}
        """Loads that a call waits for."""
        self._stores: dict[RequestId, int] = {}
        """Open stores, with the numbers of their calls."""
        self.held = 0
        """Stored objects."""
        self.dropped = 0
        """Objects that were not stored."""

    @property
    def storing_calls(self) -> int:
        """Calls whose tensors are held for stores."""
        return len(set(self._stores.values()))

    def store(
        self,
        request: RequestId,
        call: int,
        prefix: Prefix,
        places: Sequence[Place],
        *,
        row: int,
        pad: int,
        spans: Spans,
        conversation: str | None,
    ) -> None:
        """Begin to store `places` of one row, and hold its tensors until the store ends."""
        self._copier.expose(request, row, pad, spans)
        try:
            self._session.store(request, prefix, places, conversation)
        except BaseException:
            self._copier.forget(request)  # no StoreDone will come
            raise
        self._stores[request] = call

    def poll(self, wait_s: float = 0.0) -> None:
        """Process ended requests; wait up to `wait_s` seconds for the first."""
        for event in self._session.poll(wait_s):
            if isinstance(event, LoadDone):
                self._copier.forget(event.request)
                if event.request in self._loads:
                    self._loads[event.request] = event
            elif isinstance(event, StoreDone):
                self._copier.forget(event.request)
                self._stores.pop(event.request, None)
                self.held += event.held
                self.dropped += event.dropped

    def expect(self, requests: Sequence[RequestId]) -> None:
        """Record the ends of these loads. Call it before they begin."""
        self._loads.update(dict.fromkeys(requests))

    def ended(self, request: RequestId) -> LoadDone | None:
        """The end of an expected load; None while it is open."""
        return self._loads.get(request)

    def forget_loads(self, requests: Sequence[RequestId]) -> None:
        """Stop recording these loads; a second call does nothing."""
        for request in requests:
            self._loads.pop(request, None)

    def wait_for_loads(self, requests: Sequence[RequestId], until: float) -> dict[RequestId, LoadDone]:
        """Wait for expected loads, at most until `until` on the monotonic clock; returns the ended ones."""
        try:
            while True:
                self.poll(min(_POLL_S, max(0.0, until - time.monotonic())))
                done = {request: event for request in requests if (event := self.ended(request)) is not None}
                if len(done) == len(requests) or time.monotonic() >= until:
                    return done
        finally:
            self.forget_loads(requests)

    def wait_for_stores(self, deadline_s: float = 0.0, call: int | None = None) -> bool:
        """Wait for the stores of one call, or of all; False if `deadline_s` seconds were not enough."""
        until = time.monotonic() + deadline_s
        while True:
            left_s = until - time.monotonic()
            self.poll(min(_POLL_S, max(0.0, left_s)) if self._stores else 0.0)
            if not any(call in (None, number) for number in self._stores.values()):
                return True
            if left_s <= 0:
                return False

    def release_all(self) -> None:
        """Release all tensors, once the session is closed."""
        self.poll()
        for request in self._stores:
            self._copier.forget(request)
        self._stores.clear()
