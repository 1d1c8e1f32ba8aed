"""Tracks open loads and stores of the session. A call waits for its loads; stores continue after the call."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.connect.transformers.caches import Spans
from kvtier.connect.transformers.copier import CacheCopier
from kvtier.runtime.session import Session
from kvtier.types import LoadDone, Place, Prefix, RequestId, StoreDone

_POLL_S = 0.05


@dataclass(slots=True)
class RowRequest:
    """One row of a call: its prompt, and the state of its restoration."""

    name: str
    """A unique name, with which the row's request ids start."""
    pad: int
    prefix: Prefix
    conversation: str | None = None
    request: RequestId = RequestId("")  # noqa: RUF009  immutable
    restorable: int = 0
    whole_chunks: int | None = None
    """Number of chunks before the first one that could not be loaded; None if there was none. A tier may still list a
    bad object for some time after a failed read."""
    prefixes: dict[int, Prefix] = field(default_factory=dict[int, Prefix])
    """Shorter prefixes, by their number of chunks."""

    def shortened(self, chunks: int | None) -> Prefix:
        """Return the prefix of the first `chunks` chunks, or of all chunks if `chunks` is None.

        Calls with equal `chunks` return the same object, because lookups compare prefixes by identity.
        """
        if chunks is None or chunks >= len(self.prefix.keys):
            return self.prefix
        if chunks not in self.prefixes:
            self.prefixes[chunks] = Prefix(self.prefix.keys[:chunks], self.prefix.chunk_tokens)
        return self.prefixes[chunks]


class OpenRequests:
    """Polls the session, and releases the tensors of each load and store that has ended.

    Args:
        session: the session. Nothing else may poll it.
        copier: keeps the tensors.
    """

    def __init__(self, session: Session, copier: CacheCopier) -> None:
        self._session = session
        self._copier = copier
        self._loaded: dict[RequestId, LoadDone] = {}
        """Loads that have ended and that the call has not yet taken."""
        self._stores: dict[RequestId, int] = {}
        """Open stores, with the numbers of their calls."""
        self.held = 0
        """Number of stored objects."""
        self.dropped = 0
        """Number of objects that were not stored."""

    @property
    def storing_calls(self) -> int:
        """Number of calls whose tensors are kept for stores."""
        return len(set(self._stores.values()))

    def load(self, row: RowRequest, number: int, places: Sequence[Place], spans: Spans) -> None:
        """Start loading `places` of row `number` into its tensors, and keep the tensors until the load ends."""
        self._copier.expose(row.request, number, row.pad, spans)
        boundary = max(place.chunk for place in places) + 1
        tokens = boundary * row.prefix.chunk_tokens
        try:
            self._session.load(row.request, row.prefix, tokens, places, conversation=row.conversation)
        except BaseException:
            self._copier.forget(row.request)  # no LoadDone will come
            raise

    def store(
        self, row: RowRequest, number: int, call: int, prefix: Prefix, places: Sequence[Place], spans: Spans
    ) -> None:
        """Start storing `places` of row `number` of a call, and keep its tensors until the store ends."""
        request = RequestId(f"{row.name}/store")
        self._copier.expose(request, number, row.pad, spans)
        try:
            self._session.store(request, prefix, places, row.conversation)
        except BaseException:
            self._copier.forget(request)  # no StoreDone will come
            raise
        self._stores[request] = call

    def poll(self, wait_s: float = 0.0) -> None:
        """Process requests that have ended. Wait up to `wait_s` seconds for the first."""
        for event in self._session.poll(wait_s):
            if isinstance(event, LoadDone):
                self._copier.forget(event.request)
                self._loaded[event.request] = event
            elif isinstance(event, StoreDone):
                self._copier.forget(event.request)
                self._stores.pop(event.request, None)
                self.held += event.stored
                self.dropped += event.dropped

    def wait_for_loads(self, requests: Sequence[RequestId], until: float) -> dict[RequestId, LoadDone]:
        """Wait for these loads, until the monotonic time `until`, and return those that have ended."""
        while True:
            self.poll(min(_POLL_S, max(0.0, until - time.monotonic())))
            done = {request: self._loaded[request] for request in requests if request in self._loaded}
            if len(done) == len(requests) or time.monotonic() >= until:
                self._loaded.clear()  # the others are late loads of earlier calls
                return done

    def wait_for_stores(self, deadline_s: float = 0.0, call: int | None = None) -> bool:
        """Wait up to `deadline_s` seconds for the stores of one call, or of all calls. Return whether all ended."""
        until = time.monotonic() + deadline_s
        while True:
            left_s = until - time.monotonic()
            self.poll(min(_POLL_S, max(0.0, left_s)) if self._stores else 0.0)
            if not any(call in (None, number) for number in self._stores.values()):
                return True
            if left_s <= 0:
                return False

    def release_all(self) -> None:
        """Release all tensors. The session must be closed."""
        self.poll()
        for request in self._stores:
            self._copier.forget(request)
        self._stores.clear()
