"""Keeps the open loads of one engine, reports each load to vLLM, and polls the session in a thread.

A step of a busy engine takes tens of milliseconds. A worker may learn during a step that a load has ended. It reports
the load at the end of that step, and vLLM schedules the request in the next step. Without the thread, vLLM would
schedule the request one step later. The next step's orders repeat each report, so a lost note costs one step and never
a request.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.tracked import PrefixMatch, TrackedRequest, shared_chunks
from kvtier.connect.vllm.step_metadata import LOADED_NOTE, LoadReport
from kvtier.connect.vllm.vllm_types import BlockTables
from kvtier.runtime.protocol import Note
from kvtier.runtime.session import Session
from kvtier.types import ChunkKey, Event, LoadDone, Place, Prefix, RequestId


@dataclass(slots=True, eq=False)
class OpenLoad:
    """One open load."""

    name: RequestId
    tracked: TrackedRequest
    match: PrefixMatch
    tables: BlockTables
    began_s: float
    ended_s: float = 0.0
    """Time of its LoadDone; 0 before that."""
    places: Sequence[Place] = ()
    blocked_by: set[RequestId] = field(default_factory=set[RequestId])
    """Open stores that read one of its target blocks. The load starts when they have ended."""
    is_void: bool = False
    """Whether the bytes of the load must not be used."""
    is_dropped: bool = False
    """Whether the request of the load has ended."""

    @property
    def leading_keys(self) -> tuple[ChunkKey, ...]:
        """The chunks that vLLM has once the load has ended."""
        return self.match.prefix.keys[: self.match.plan.tokens // self.match.prefix.chunk_tokens]


POLL_S = 5.0
"""Maximum seconds per poll, in case a wake-up is lost. A poll that finds nothing takes about 0.1 ms of the engine
core's time."""

CLOSE_S = 0.4
"""Seconds that `close` waits for the thread."""


class Loads:
    """All open loads of one engine. The scheduler's thread and the polling thread use them.

    Args:
        session: receives the loads. Nothing else polls it.
        geometry: locates chunks in block tables.
        send_note: sends a note to the workers.
    """

    def __init__(self, session: Session, geometry: Geometry, send_note: Callable[[Note], None]) -> None:
        self._session = session
        self._geometry = geometry
        self._send_note = send_note
        self._open: dict[RequestId, OpenLoad] = {}
        self._unreported: dict[RequestId, OpenLoad] = {}
        """Loads whose end no orders have reported yet."""
        self.landed: dict[str, OpenLoad] = {}
        """Complete loads, by request, until the request's next step shows that vLLM has processed the report."""
        self._numbers = itertools.count()
        # Both are bounded by the number of open loads and stores.
        self._events: deque[Event] = deque()
        self._reports: list[LoadReport] = []
        """Reports of ended loads, for the next orders."""
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._poll, name="kvtier session poller", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._open)

    # ---- from vLLM to the session ----------------------------------------------------------------------------------

    def register(self, tracked: TrackedRequest, match: PrefixMatch, tables: BlockTables) -> OpenLoad:
        """Open a load of `match` into the blocks of `tables`. From now on vLLM waits for its report."""
        name = RequestId(f"L{next(self._numbers)}/{tracked.id}")
        load = OpenLoad(name, tracked, match, tables, time.monotonic())
        self._open[name] = self._unreported[name] = load
        tracked.load = name
        return load

    def locate(self, load: OpenLoad) -> set[int]:
        """Compute the load's places and return the blocks that it writes. A load that does not fit becomes void."""
        plan = load.match.plan
        places = self._geometry.targets(plan.tokens, load.tables, plan.resident_tokens)
        load.is_void |= places is None
        load.places = places or ()
        return {block for place in load.places for block in place.blocks if block > 0}

    def start(self, load: OpenLoad) -> None:
        """Pass the load to the session, which answers with a LoadDone. A void load ends immediately."""
        plan = load.match.plan
        if load.is_void:
            self._deliver(LoadDone(load.name, plan.resident_tokens, plan.tokens, ()))
            return
        self._session.load(
            load.name,
            load.match.prefix,
            plan.tokens,
            load.places,
            resident_tokens=plan.resident_tokens,
            budget=plan.budget,
            conversation=load.tracked.hints.conversation,
        )

    def drop(self, name: RequestId) -> OpenLoad:
        """Void a load whose request has ended. The load's end must still be reported."""
        load = self.void(name)
        load.is_dropped = True
        return load

    def void(self, name: RequestId) -> OpenLoad:
        """Discard a load's bytes. Its request continues."""
        load = self._open[name]
        load.is_void = True
        self._session.release(name)
        return load

    def unblocked(self, store: RequestId) -> list[OpenLoad]:
        """Return the loads that only `store`, which has ended, still blocked."""
        freed: list[OpenLoad] = []
        for load in self._open.values():
            if store in load.blocked_by:
                load.blocked_by.discard(store)
                if not load.blocked_by:
                    freed.append(load)
        return freed

    def covered_tokens(self, prefix: Prefix, resident_tokens: int) -> int:
        """Return how many leading tokens of `prefix` the best load delivers, or has delivered without vLLM knowing yet.

        A result of at most `resident_tokens` means that no load helps.
        """
        first = resident_tokens // prefix.chunk_tokens
        best = 0
        for load in itertools.chain(self._open.values(), self.landed.values()):
            if not load.is_void and load.leading_keys[first : first + 1] == prefix.keys[first : first + 1]:
                best = max(best, shared_chunks(load.leading_keys, prefix.keys))
        return best * prefix.chunk_tokens

    # ---- from the session to vLLM ----------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Return loads and stores that have ended since the last call.

        Raises:
            RuntimeError: an exception has ended the thread.
        """
        if self._error is not None:
            raise RuntimeError("the thread that polls the session has ended") from self._error
        return [self._events.popleft() for _ in range(len(self._events))]

    def reports(self) -> tuple[LoadReport, ...]:
        """Return the reports that no step's orders have contained yet."""
        return tuple(self._reports)

    def ended(self, done: LoadDone) -> OpenLoad | None:
        """Close an ended load."""
        load = self._open.pop(done.request, None)
        if load is not None and load.tracked.load == load.name:
            load.tracked.load = None
        return load

    def reported(self, reports: Sequence[LoadReport]) -> None:
        """Remove these reports, because orders with them have gone out."""
        del self._reports[: len(reports)]
        for each in reports:
            self._unreported.pop(each.load, None)

    def last_reports(self) -> tuple[LoadReport, ...]:
        """Return reports of all loads that no orders have reported yet. Loads that have not ended count as failed."""
        known = {each.load: each for each in self.reports()}
        return tuple(known.get(name) or self._report(load, 0) for name, load in self._unreported.items())

    def abandon(self) -> None:
        """Forget all loads. Their later events are not reported to vLLM."""
        self._open.clear()
        self._unreported.clear()
        self.landed.clear()

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Stop the thread."""
        self._is_closing = True
        self._session.end_poll()
        self._thread.join(deadline_s)

    def _poll(self) -> None:
        try:
            while not self._is_closing:
                for event in self._session.poll(POLL_S):
                    if isinstance(event, LoadDone):
                        self._deliver(event)
                    else:
                        self._events.append(event)
        except BaseException as error:  # noqa: BLE001 - the scheduler's thread raises it
            self._error = error

    def _deliver(self, done: LoadDone) -> None:
        """Report the end of a load, if the load is open. Either thread may call this."""
        load = self._open.get(done.request)
        if load is not None:
            load.ended_s = time.monotonic()
        report = None if load is None else self._report(load, done.tokens)
        self._events.append(done)
        if report is not None:
            self._reports.append(report)
            if report.adapter is None:
                self._send_note(Note(LOADED_NOTE, report.load, report.bad_blocks, report.is_failed))

    def _report(self, load: OpenLoad, tokens: int) -> LoadReport:
        plan = load.match.plan
        filled = plan.resident_tokens if load.is_void else max(tokens, plan.resident_tokens)
        is_whole = filled >= plan.tokens
        bad_blocks: set[int] = set()
        if not is_whole and self._geometry.can_load_in_part:
            bad_blocks = self._geometry.unfilled(load.tables, filled, plan.tokens)
        is_failed = not is_whole and not self._geometry.can_load_in_part
        return LoadReport(load.name, tuple(sorted(bad_blocks)), is_failed, load.tracked.request.lora_request)
