"""Sessions on a shared directory: a file system that is away or slow costs misses, and one log line for each change."""

import logging
import os
import time
from contextlib import closing, contextmanager
from itertools import count
from operator import attrgetter

import pytest
from tests.rig import Engine, looked_up, places_of, prefix_of, stored
from tests.shared.node_sessions import (
    CHUNKS,
    QUICK,
    TOKENS,
    SessionContract,
    await_health,
    load,
    load_until,
    opened,
    store,
)
from tests.system import until

from kvtier.errors import ConfigError, DamagedStoreError
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.shared_directory.kind import SharedDirectorySettings

MIB = 1 << 20
ANSWER_S = 6.0
"""Lookup, load and a busy machine; far above the deadlines of `shared`."""


def shared(place, **settings) -> SharedDirectorySettings:
    return SharedDirectorySettings(path=place, capacity_bytes=256 * MIB, **QUICK | settings)


FAULTS = {
    "network.partition": "network.heal",
    "mds.pause": "mds.resume",
    "mds.kill": "mds.start",
    "osd.pause": "osd.resume",
}
"""What breaks the file system, and what mends it."""


@contextmanager
def broken(ceph, fault):
    if fault == "network.partition" and ceph.network is None:
        pytest.skip(f"no network namespaces: {ceph.no_network}")
    attrgetter(fault)(ceph)()
    try:
        yield
    finally:
        attrgetter(FAULTS[fault])(ceph)()


@pytest.mark.shared_core
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_system_that_is_away_in_the_middle_costs_misses_until_it_is_back(ceph, mounts, tmp_path, caplog, fault):
    place, here, there = f"store-{os.urandom(4).hex()}", Engine(64, seed=1), Engine(64, seed=2)
    store(there, shared(mounts[1] / place))
    caplog.set_level(logging.INFO)
    drive = DiskSettings(path=tmp_path / "drive", capacity_bytes=64 * MIB)
    own, later = prefix_of(CHUNKS, seed=9), prefix_of(CHUNKS, seed=10)
    with closing(opened(here, drive, shared(mounts[0] / place))) as session:
        with broken(ceph, fault):
            for number in range(3):
                start_s = time.monotonic()
                assert load(session, here, there, f"away-{number}") == 0
                assert time.monotonic() - start_s < ANSWER_S
            assert stored(session, "own", own, places_of(range(CHUNKS))).dropped == 0
            assert looked_up(session, "own", own).tokens == TOKENS
            await_health(session, caplog, ["down"])
        load_until(session, here, there, TOKENS)
        await_health(session, caplog, ["down", "up"])
        stored(session, "later", later, places_of(range(CHUNKS)))
    assert len(caplog.records) <= 8, "of each kind of fault one line, and one of each change"
    with closing(opened(Engine(64), shared(mounts[1] / place))) as session:
        numbers = count()
        # The other node may not be well at once, and a probe that is late answers "absent".
        until(lambda: looked_up(session, f"later-{next(numbers)}", later).tokens == TOKENS)


@pytest.mark.shared_core
@pytest.mark.timeout(180)
def test_a_file_system_that_hangs_at_the_start_is_used_once_it_is_back(ceph, mounts, caplog):
    place, here, there = f"store-{os.urandom(4).hex()}", Engine(64, seed=1), Engine(64, seed=2)
    store(there, shared(mounts[1] / place))
    caplog.set_level(logging.INFO)
    with broken(ceph, "mds.pause"):
        start_s = time.monotonic()
        session = opened(here, shared(mounts[0] / place), open_deadline_s=2.0)
        assert time.monotonic() - start_s < ANSWER_S
        assert load(session, here, there) == 0
    with closing(session):
        load_until(session, here, there, TOKENS)
    assert sum("starts without this tier" in record.getMessage() for record in caplog.records) == 1, caplog.text
    assert sum("is open now" in record.getMessage() for record in caplog.records) == 1, caplog.text


@pytest.mark.shared_core
class TestSharedDirectory(SessionContract):
    @pytest.fixture
    def places(self, mounts):
        place = f"store-{os.urandom(4).hex()}"
        self.root = mounts[0] / place
        return shared(self.root), shared(mounts[1] / place)

    def frames(self):
        return {path: path.read_bytes() for path in self.root.rglob("*") if len(path.name) == 64}

    def replace(self, key, frame):
        key.write_bytes(frame)


@pytest.mark.shared_core
def test_only_an_impossible_path_stops_the_start(mounts):
    (mounts[0] / "letter").write_text("to the editor")
    (mounts[0] / "home").mkdir()
    (mounts[0] / "home" / "letter").write_text("to the editor")
    with pytest.raises(ConfigError, match="too long"):
        opened(Engine(64), shared(mounts[0] / ("x" * 300)))
    for place, words in (("letter", "is not a directory|File exists|Not a directory"), ("home", "holds other files")):
        with pytest.raises(DamagedStoreError, match=words):
            opened(Engine(64), shared(mounts[0] / place, required=True))
        opened(Engine(64), shared(mounts[0] / place)).close()
