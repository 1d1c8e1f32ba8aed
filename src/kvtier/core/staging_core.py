"""The core for engines that own host memory: lookups, gets and puts of objects, without a session.

It is the same core, but objects only pass through host memory: an object is LEAVING as soon as it has arrived. There is
no eviction, no prefix and no boundary, and each object has its own outcome. The caller executes the gathers and
scatters of its own calls. A put ends when a tier has its objects.

A write to a slower tier keeps its slot until another operation needs the slot. Then the write becomes a relay.
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
"""In effect no limit: the slots limit the copies. Callers execute them, and a slow caller must not delay others."""


class ObjectCache(Cache):
    """The state of the lower tiers, and of the objects on their way to and from them.

    Each operation has its own request name, and ends with one ObjectsDone. `release` ends it early.

    Args:
        layout: the KV groups.
        slots: slots of each group, at least two each.
        tiers: the lower tiers, fastest first.
        down: tiers that are not open yet.
    """

    def __init__(
        self, *, layout: KvLayout, slots: Sequence[int], tiers: Sequence[TierRules], down: Collection[str] = ()
    ) -> None:
        limits = Limits(stores_in_flight=COPIES_MAX, scatters=COPIES_MAX)
        super().__init__(
            layout=layout, slots=slots, tiers=tiers, evictor=Fifo, limits=limits, down=down, stages_only=True
        )

    def lookup_objects(self, request: RequestId, objects: Sequence[ObjectId], now_s: float, *, is_run: bool) -> None:
        """Search all tiers, each for the objects that faster ones lack.

        With `is_run`, only the objects before the first absent one matter.
        """
        self._probes.search_objects(request, objects, now_s, is_run=is_run)

    def lookup_for_put(self, request: RequestId, objects: Sequence[ObjectId], now_s: float) -> None:
        """Search only the first tier. A copy that may be bad counts as absent, because a put replaces it."""
        self._probes.search_objects(request, objects, now_s, is_run=False, is_for_put=True)

    def get(self, request: RequestId, objects: Sequence[ObjectId], origins: Sequence[Origin], now_s: float) -> None:
        """Load objects. An object's position in the list serves as its chunk, and as the block to scatter it to."""
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
        """Store objects. An object's position in the list serves as its chunk, and as the block to gather it from."""
        prefix, places = _listed(objects)
        for each in objects:
            entry = self.host.entry(*each)
            if entry is not None:  # the object is already on its way, and the first tier lacks it, perhaps again
                self._tier_writes.put_again(entry, now_s)
        store = StoreOperation(request=request, prefix=prefix, conversation=None, deadline_s=inf, origins=origins)
        self._operations.begin_store(store, places, now_s)
        self._transfers.advance(now_s)
        self._operations.end_if_finished(store)

    def requests(self) -> list[RequestId]:
        """Return the requests with an open operation."""
        stores = [store.request for store in self._operations.stores]
        return [*self._probes.object_searches(), *self._operations.loads, *stores]

    def copies_of(self, request: RequestId) -> list[Transfer]:
        """Return the gathers and scatters of `request` that are in flight."""
        return [it.transfer for it in self._transfers.flights.values() if it.transfer.request == request]

    def stop(self, now_s: float) -> None:
        """End every operation."""
        for request in self._probes.object_searches():
            self._probes.forget(request)
        super().stop(now_s)


def _listed(objects: Sequence[ObjectId]) -> tuple[Prefix, list[Place]]:
    prefix = Prefix(tuple([each.key for each in objects]), 1)
    return prefix, [Place(each.group, number, (number,)) for number, each in enumerate(objects)]
