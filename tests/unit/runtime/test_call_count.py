"""A chunk's way from a load to its event is short: Python calls of all threads are counted, not timed."""

import sys
import threading
import time
from collections import Counter
from types import FrameType

import pytest
from tests import rig
from tests.memory_tier import MemoryTier
from tests.rig import CHUNK_TOKENS, Engine, local, looked_up, places_of, prefix_of, stored

from kvtier.config.sections import Config
from kvtier.layout import KvLayout
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Threads
from kvtier.runtime.observers.transfer_metrics import CommandCounters
from kvtier.testing.host_copier import HostCopier
from kvtier.types import RequestId

CALLS_MAX = 190
ONE_GROUP = KvLayout(CHUNK_TOKENS, rig.LAYOUT.groups[:1])


class Calls:
    """Counts calls of Python functions in threads that start later, and in this one, while `is_on`.

    What the storage and the device do themselves (`tests.memory_tier`, `kvtier.testing`) does not count.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.seen: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if not self.is_on or event != "call" or threading.current_thread().name == "kvtier-session":
            return
        above: FrameType | None = frame
        while above is not None:
            if above.f_code.co_filename.endswith(("/tests/memory_tier.py", "/kvtier/testing/host_copier.py")):
                return
            above = above.f_back
        file = frame.f_code.co_filename.rpartition("/kvtier/")[2].rpartition("site-packages/")[2]
        self.seen[f"{file}:{frame.f_code.co_qualname}"] += 1


@pytest.fixture
def calls():
    counted = Calls()
    threading.setprofile(counted)
    yield counted
    threading.setprofile(None)
    sys.setprofile(None)


def test_a_chunks_promotion_and_scatter_take_few_calls(monkeypatch, calls):
    monkeypatch.setattr(rig, "LAYOUT", ONE_GROUP)
    tier, engine, places = (
        MemoryTier("below", capacity_bytes=64 << 20),
        Engine(8, layout=ONE_GROUP),
        places_of([0], [0]),
    )
    metrics = Metrics()

    def opened():
        session, _, _ = local(
            HostCopier(ONE_GROUP, engine.groups),
            {"below": tier},
            threads=Threads(device=1, read=1, write=1, probe=1),
            observer=CommandCounters(metrics),
            evictor=Config().host.evictor,
        )
        return session

    session = opened()
    for seed in range(3):
        stored(session, f"store {seed}", prefix_of(1, seed=seed), places)
    assert session.close().flushed
    session = opened()
    counts = []
    for seed in range(3):  # the first takes more, for scratch memory and series of metrics
        prefix, request = prefix_of(1, seed=seed), RequestId(f"load {seed}")
        looked_up(session, request, prefix)
        time.sleep(0.02)  # health checks are over
        calls.seen.clear()
        sys.setprofile(calls)
        calls.is_on = True
        session.load(request, prefix, CHUNK_TOKENS, places)
        until_s = time.monotonic() + 20
        while not session._events._queue._items and time.monotonic() < until_s:
            time.sleep(0.001)
        time.sleep(0.02)
        calls.is_on = False
        sys.setprofile(None)
        (done,) = session.poll()
        assert done.sources == (("below", CHUNK_TOKENS),)
        counts.append((calls.seen.total(), calls.seen.copy()))
    session.close()
    total, seen = min(counts, key=lambda count: count[0])
    spent = "\n".join(f"{count:4} {name}" for name, count in seen.most_common())
    print(f"{total} calls")
    assert 50 < total <= CALLS_MAX, f"{total} calls:\n{spent}"
