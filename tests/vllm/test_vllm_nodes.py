"""Two engines as two nodes: each has host memory and a drive of its own, and both see one shared tier."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import LONG, Expected, Start
from harness import Engine
from judge import is_same
from settings import CHUNK, connector, whole
from tests.shared import conftest as bed
from tests.shared.ceph import Ceph

pytestmark = pytest.mark.engine

ceph, gateway, mounts = bed.ceph, bed.gateway, bed.mounts

SHARED_S = 60.0
"""For what a node still writes; far above what it takes."""
SECRET = "5e" * 32


class SharedTier(NamedTuple):
    """One store as each of two nodes is configured for it."""

    nodes: tuple[str, str]
    count: Callable[[], int]
    """Objects in the store."""
    pause: Callable[[], None]
    resume: Callable[[], None]


@pytest.fixture(params=["shared_directory", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SharedTier]:
    """The shared tier, and how to make it hang."""
    limits = "probe_deadline_s=2&transfer_deadline_s=4&retry_s=0.5"
    if request.param == "s3":
        at = request.getfixturevalue("gateway")
        keys = f"access_key_id={at.access.access_key}&secret_access_key={at.access.secret_key}"
        place = f"s3:s3://{at.access.bucket}/{tmp_path.name}?endpoint={at.access.endpoint}&allow_http=true&{keys}"
        spec = f"far={place}&{limits}"

        def count() -> int:
            import obstore

            return sum(len(page) for page in obstore.list(at.raw, prefix=tmp_path.name))

        yield SharedTier((spec, spec), count, at.daemon.pause, at.daemon.resume)
        return
    cluster: Ceph = request.getfixturevalue("ceph")
    one, other = (place / tmp_path.name for place in request.getfixturevalue("mounts"))

    def objects() -> int:
        return sum(len(path.name) == 64 for path in one.rglob("*"))

    specs = tuple(f"far=shared_directory:{place}?{limits}&capacity_bytes=1GiB" for place in (one, other))
    yield SharedTier((specs[0], specs[1]), objects, cluster.osd.pause, cluster.osd.resume)
    cluster.osd.resume()


class Nodes:
    """Starts engines as nodes 0 and 1."""

    def __init__(self, start: Start, shared: SharedTier, root: Path) -> None:
        self._start, self._shared, self._root = start, shared, root
        self._drives = 0

    def node(self, number: int, **settings: Any) -> Engine:
        """An engine with a new drive, as a machine that has just joined."""
        self._drives += 1
        tiers = [f"disk:{self._root}/drive-{self._drives}?capacity_bytes=1GiB", self._shared.nodes[number]]
        return self._start("llama", connector(None, **{"tiers": tiers, "store__secret": SECRET} | settings))

    def await_objects(self, engine: Engine, count: int) -> None:
        """Wait until the shared tier holds `count` objects."""
        until_s = time.monotonic() + SHARED_S
        while self._shared.count() < count:
            assert time.monotonic() < until_s, engine.printed()[-3000:]
            engine.drain()
            time.sleep(0.1)


@pytest.fixture
def nodes(start: Start, shared: SharedTier, tmp_path: Path) -> Nodes:
    """Starts nodes over the shared tier."""
    return Nodes(start, shared, tmp_path)


def test_what_one_node_computed_the_other_loads(nodes: Nodes, expected: Expected) -> None:
    one, other = nodes.node(0), nodes.node(1)
    cold = one.ask(LONG)[0]
    nodes.await_objects(one, whole(len(LONG)) // CHUNK)
    loaded = other.ask(LONG)[0]
    assert other.external_hits() == whole(len(LONG))
    assert is_same("llama", loaded, cold)
    assert is_same("llama", loaded, expected("llama")["long"])


def test_a_node_that_is_killed_in_the_middle_costs_only_misses(nodes: Nodes, expected: Expected) -> None:
    one = nodes.node(0)
    one.ask(LONG)
    one.kill()  # its writes to the shared tier are at any stage
    other = nodes.node(1)
    answer = other.ask(LONG)[0]
    assert is_same("llama", answer, expected("llama")["long"])
    assert other.external_hits() <= whole(len(LONG))
    nodes.await_objects(other, whole(len(LONG)) // CHUNK)  # and what is missing is written again


def test_a_shared_tier_that_hangs_costs_only_misses(nodes: Nodes, shared: SharedTier, expected: Expected) -> None:
    one = nodes.node(0)
    shared.pause()
    answer = one.ask(LONG)[0]
    assert is_same("llama", answer, expected("llama")["long"])
    one.forget()
    again = one.ask(LONG)[0]
    assert one.external_hits() == whole(len(LONG)), "host memory and the drive go on"
    assert is_same("llama", again, answer)
    shared.resume()
    nodes.await_objects(one, whole(len(LONG)) // CHUNK)
