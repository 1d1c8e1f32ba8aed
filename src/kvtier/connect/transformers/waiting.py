"""What has been asked of the session and has not ended: loads that a call waits for, stores that go on behind it."""

import time
from collections.abc import Sequence

from kvtier.connect.transformers.caches import Spans
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.runtime.base import Session
from kvtier.types import LoadDone, Place, Prefix, RequestId, StoreDone

_POLL_S = 0.05


class Waiting:
    """The one place that polls the session, and lets go of tensors when their load or store has ended.

    Args:
        session: where loads and stores go.
        copier: which holds the tensors.
    """

    def __init__(self, session: Session, copier: CacheCopier) -> None:
        self._session = session
        self._copier = copier
        self._awaited: dict[RequestId, LoadDone | None] = {}
        self._storing: dict[RequestId, int] = {}
        """Request -> the number of the call it belongs to."""
        self.held = 0
        """Objects that were acknowledged."""
        self.dropped = 0
        """Objects that were not."""

    @property
    def storing_calls(self) -> int:
        """Calls whose tensors are still held for their stores."""
        return len(set(self._storing.values()))

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
        session: str | None,
    ) -> None:
        """Begin to store `places` of one row, whose tensors are held until that has ended."""
        self._copier.expose(request, row, pad, spans)
        try:
            self._session.store(request, prefix, places, session)
        except BaseException:
            self._copier.forget(request)  # no StoreDone will
            raise
        self._storing[request] = call

    def take(self, wait_s: float = 0.0) -> None:
        """Note what has ended; wait up to `wait_s` seconds for the first."""
        for event in self._session.poll(wait_s):
            if isinstance(event, LoadDone):
                self._copier.forget(event.request)
                if event.request in self._awaited:
                    self._awaited[event.request] = event
            elif isinstance(event, StoreDone):
                self._copier.forget(event.request)
                self._storing.pop(event.request, None)
                self.held += event.held
                self.dropped += event.dropped

    def begin(self, requests: Sequence[RequestId]) -> None:
        """Remember how the loads of `requests` end. Before they begin, or anything else polls."""
        self._awaited.update(dict.fromkeys(requests))

    def ended(self, request: RequestId) -> LoadDone | None:
        """How a load that was begun so has ended; None while it has not, as far as was taken."""
        return self._awaited.get(request)

    def leave(self, requests: Sequence[RequestId]) -> None:
        """Do not remember these any more; twice is fine."""
        for request in requests:
            self._awaited.pop(request, None)

    def loads(self, requests: Sequence[RequestId], until: float) -> dict[RequestId, LoadDone]:
        """Wait for the loads of `requests`, at most until the monotonic clock shows `until`; those that have ended.

        They were begun (`begin`), and are left afterwards.
        """
        try:
            while True:
                self.take(min(_POLL_S, max(0.0, until - time.monotonic())))
                done = {request: event for request in requests if (event := self.ended(request)) is not None}
                if len(done) == len(requests) or time.monotonic() >= until:
                    return done
        finally:
            self.leave(requests)

    def stores(self, deadline_s: float = 0.0, call: int | None = None) -> bool:
        """Wait for the stores of one call, or of all; whether they ended within `deadline_s` seconds."""
        until = time.monotonic() + deadline_s
        while True:
            left_s = until - time.monotonic()
            self.take(min(_POLL_S, max(0.0, left_s)) if self._storing else 0.0)
            if not any(call in (None, number) for number in self._storing.values()):
                return True
            if left_s <= 0:
                return False

    def forget(self) -> None:
        """Let go of all tensors, once the session is closed."""
        self.take()
        for request in self._storing:
            self._copier.forget(request)
        self._storing.clear()
