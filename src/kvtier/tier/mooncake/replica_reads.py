"""Tracks which storage nodes of a Mooncake store are silent, and reads from the others.

The library reads only the first copy of an object, and waits a minute for a silent node. So this module reads copies
with the library's transfer engine, and tries the next one when one fails. A read ends only when the engine reports the
end of the transfer, so that no byte can arrive later. The library itself ends a transfer without progress
(`mooncake.client.STALL_S`).
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.tier.mooncake.client import LANES, Copy
from kvtier.tier.mooncake.socket_filter import NodeError, data_port

logger = logging.getLogger(__name__)

CONTACT_DEADLINE_S = 1.0
"""How long a node may take to name its data port."""
SILENT_S = 10.0
"""A node that failed is left alone for this long."""
MET_S = 1.0
"""A node that gave a sign of life is not asked for another sign for this long."""
POLL_S, POLL_MAX_S = 30e-6, 500e-6
NODES_MAX = 4096

_DONE, _PENDING = 1, 0


@dataclass(slots=True, eq=False)
class Want:
    """A read from one object."""

    copies: Sequence[Copy]
    address: int
    """Address of the memory to fill."""
    size_bytes: int
    offset: int
    is_done: bool = False
    tried: int = 0
    failure: str = ""
    """Why a copy on a live node cannot be read."""


_Running = tuple[Want, Copy, int]
"""A running transfer: the read, the copy and the library's number."""


class MooncakeNodes:
    """Reads copies, and remembers which nodes failed.

    Args:
        tier: the tier's name, for the log.
        engine: the library's transfer engine.
    """

    def __init__(self, tier: str, engine: Any) -> None:  # noqa: ANN401 - the library has no types
        self._tier, self._engine = tier, engine
        self._met_until: dict[str, float] = {}
        """Time until which each node that gave a sign of life is not asked again, by endpoint."""
        self._silent_until: dict[str, float] = {}
        """Time until which each silent node is left alone, by endpoint."""

    @property
    def has_silent(self) -> bool:
        """Whether any node is left alone at present."""
        return any(map(self.is_silent, list(self._silent_until)))

    def is_silent(self, endpoint: str) -> bool:
        """Return whether the node is left alone at present."""
        return self._silent_until.get(endpoint, 0.0) > time.monotonic()

    def read(self, wants: Sequence[Want], deadline_s: float) -> None:
        """Fill the memory of `wants` from the first copy that can be read within about `deadline_s` seconds.

        All bytes of a want come from one copy. The call returns when no further byte can arrive.
        """
        end_s = time.monotonic() + deadline_s
        waiting, running = deque(wants), list[_Running]()
        pause_s, is_logged = POLL_S, False
        while waiting or running:
            while waiting and len(running) < LANES:  # a stalled read blocks one lane, not the reads behind it
                begun = self._begin(waiting.popleft(), end_s)
                if begun is not None:
                    running.append(begun)
            still = [each for each in running if not self._has_ended(each, waiting)]
            has_ended, running = len(still) < len(running), still
            if has_ended or not running:
                pause_s = POLL_S
                continue
            if time.monotonic() > end_s + CONTACT_DEADLINE_S and not is_logged:
                logger.warning("tier %s: a read is past its deadline and keeps its memory until it ends", self._tier)
                is_logged = True
                for _, copy, _ in running:
                    self._leave_alone(copy.endpoint, "a read from it does not end")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, POLL_MAX_S)

    def _begin(self, want: Want, end_s: float) -> _Running | None:
        """Submit the read of the next copy. Return None if there is none."""
        while want.tried < len(want.copies) and time.monotonic() < end_s:
            copy = want.copies[want.tried]
            want.tried += 1
            if self.is_silent(copy.endpoint) or not self._contact(copy.endpoint):
                continue
            batch = self._engine.batch_transfer_async_read(
                copy.endpoint, [want.address], [copy.address + want.offset], [want.size_bytes]
            )
            if batch:
                return want, copy, batch
            self._leave_alone(copy.endpoint, "a read cannot be started")
        return None

    def _has_ended(self, running: _Running, waiting: deque[Want]) -> bool:
        """Return whether the transfer has ended. The read of a failed transfer waits for the next copy."""
        want, copy, batch = running
        status = self._engine.transfer_check_status(batch)
        if status == _PENDING:
            return False
        if status == _DONE:
            want.is_done = True
            self._met_until[copy.endpoint] = time.monotonic() + MET_S
            return True
        if not self.is_silent(copy.endpoint) and self._answers(copy.endpoint):
            want.failure = f"node {copy.endpoint} answers, but does not send the object"
        waiting.append(want)
        return True

    def _contact(self, endpoint: str) -> bool:
        """Return whether the node is alive. A silent one would block the library's other reads."""
        if len(self._met_until) + len(self._silent_until) >= NODES_MAX:
            self._met_until, self._silent_until = {}, {}
        return self._met_until.get(endpoint, 0.0) > time.monotonic() or self._answers(endpoint)

    def _answers(self, endpoint: str) -> bool:
        try:
            data_port(endpoint, CONTACT_DEADLINE_S)
        except NodeError as error:
            self._leave_alone(endpoint, str(error))
            return False
        self._met_until[endpoint] = time.monotonic() + MET_S
        return True

    def _leave_alone(self, endpoint: str, why: str) -> None:
        self._met_until.pop(endpoint, None)
        if self.is_silent(endpoint):
            return
        self._silent_until[endpoint] = time.monotonic() + SILENT_S
        logger.warning("tier %s: node %s is not used for %g s: %s", self._tier, endpoint, SILENT_S, why)
