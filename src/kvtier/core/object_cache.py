"""The core for engines that own host memory: gets, puts and searches of objects, without a session.

It is the same core, but objects only pass through host memory: one that has arrived is LEAVING. There is no eviction,
no prefix and no boundary; each object has an outcome of its own. The caller executes the gathers and scatters of its
own calls. A put ends when a tier has its objects.

A write to a slower tier keeps its slot while no other operation needs the slot. Then it becomes a relay.
"""

from collections.abc import Collection, Sequence
from math import inf

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.core.operations import LoadOperation, StoreOperation
from kvtier.layout import KvLayout
from kvtier.policy.fifo import Fifo
from kvtier.types import ObjectId, Origin, Place, Prefix, RequestId, Transfer

COPIES_MAX = 1 << 30
"""The slots limit the copies: callers execute them, and one that is slow must not delay others."""


class ObjectCache(Cache):
    """The state of the lower tiers, and of the objects on their way.

    Each operation has a request name of its own, and ends with one ObjectsDone: early after `release`.

    Args:
        layout: the KV groups.
        slots: slots of each group, at least two each.
        tiers: the lower tiers, fastest first.
        down: tiers that are not open yet.
    """

    def __init__(
        self, *, layout: KvLayout, slots: Sequence[int], tiers: Sequence[TierRules], down: Collection[str] = ()
    ) -> None:
        limits = Limits(gathers=COPIES_MAX, scatters=COPIES_MAX)
        super().__init__(
            layout=layout, slots=slots, tiers=tiers, evictor=Fifo, limits=limits, down=down, stages_only=True
        )

    def find(self, request: RequestId, objects: Sequence[ObjectId], now_s: float, *, is_run: bool) -> None:
        """Search all tiers, each for what faster ones lack. Only a leading run matters if `is_run`."""
        self._probes.find(request, objects, now_s, is_run=is_run)

    def find_for_put(self, request: RequestId, objects: Sequence[ObjectId], now_s: float) -> None:
        """Search the first tier. A copy that may be bad counts as absent, as a put replaces it."""
        self._probes.find(request, objects, now_s, is_run=False, is_for_put=True)

    def get(self, request: RequestId, objects: Sequence[ObjectId], origins: Sequence[Origin], now_s: float) -> None:
        """Bring objects. Place `i` of the list is chunk `i`, and the block of its scatter."""
        prefix, places = _listed(objects)
        load = LoadOperation(
            request=request,
            prefix=prefix,
            conversation=None,
            deadline_s=inf,
            tokens=0,
            resident_tokens=0,
            origins=origins,
        )
        self._operations.begin_load(load, places, now_s)
        self._transfers.advance(now_s)

    def put(self, request: RequestId, objects: Sequence[ObjectId], origins: Sequence[Origin], now_s: float) -> None:
        """Keep objects. Place `i` of the list is chunk `i`, and the block of its gather."""
        prefix, places = _listed(objects)
        for each in objects:
            entry = self.host.find(*each)
            if entry is not None:  # on its way already, and the first tier lacks it, perhaps again
                self._pending_writes.put_again(entry, now_s)
        store = StoreOperation(request=request, prefix=prefix, conversation=None, deadline_s=inf, origins=origins)
        self._operations.begin_store(store, places, now_s)
        self._transfers.advance(now_s)
        self._operations.end_if_settled(store)

    def requests(self) -> list[RequestId]:
        """Requests with an open operation."""
        stores = [store.request for store in self._operations.stores]
        return [*self._probes.finding(), *self._operations.loads, *stores]

    def copies_of(self, request: RequestId) -> list[Transfer]:
        """Gathers and scatters of `request` in flight."""
        return [it.transfer for it in self._transfers.flights.values() if it.transfer.request == request]

    def stop(self, now_s: float) -> None:
        """End every operation."""
        for request in self._probes.finding():
            self._probes.forget(request)
        super().stop(now_s)


def _listed(objects: Sequence[ObjectId]) -> tuple[Prefix, list[Place]]:
    prefix = Prefix(tuple([each.key for each in objects]), 1)
    return prefix, [Place(each.group, number, (number,)) for number, each in enumerate(objects)]
