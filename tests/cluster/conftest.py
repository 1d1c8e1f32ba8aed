"""Real cluster stores, each started once for all tests of this folder that ask for it."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from tests.cluster.valkey_bed import Cluster, Program, Server, install
from tests.shared.ceph import NotInstalledError
from tests.tier_makers import close_all

if TYPE_CHECKING:
    from tests.cluster.mooncake_store import MooncakeStore


@pytest.fixture(autouse=True)
def _tiers() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="session")
def valkey_program() -> Program:
    """The program of Valkey, or of Redis."""
    try:
        return install()
    except NotInstalledError as error:
        pytest.skip(f"Valkey cannot be installed: {error}")


@pytest.fixture(scope="session")
def running_valkey(valkey_program, tmp_path_factory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("valkey"), valkey_program)
    try:
        server.restart()
        yield server
    finally:
        server.kill()


@pytest.fixture
def valkey(running_valkey: Server) -> Iterator[Server]:
    """One server, empty and with its first settings before the test, healthy after it."""
    limits = {"maxmemory": 0, "maxmemory-policy": "noeviction", "proto-max-bulk-len": 512 << 20}
    running_valkey.call("CONFIG", "SET", *(part for limit in limits.items() for part in limit))
    running_valkey.call("FLUSHALL")
    running_valkey.call("CONFIG", "RESETSTAT")
    yield running_valkey
    running_valkey.resume()
    if not running_valkey.is_running:
        running_valkey.restart()


@pytest.fixture
def start(valkey_program, tmp_path) -> Iterator[Callable[..., Server]]:
    """Starts further servers, with settings and environment variables; ends them after the test."""
    servers: list[Server] = []

    def started(*settings: str, **variables: str) -> Server:
        servers.append(Server(tmp_path, valkey_program, *settings, **variables))
        servers[-1].restart()
        return servers[-1]

    yield started
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def running_cluster(valkey_program, tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), valkey_program)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    """Three masters with a replica each, all of them healthy before and after the test, and empty before it."""
    for master in running_cluster.masters():
        master.call("FLUSHALL")
        master.call("CONFIG", "RESETSTAT")
    yield running_cluster
    for node in running_cluster.nodes:
        node.resume()
        if not node.is_running:
            node.restart()
    running_cluster.wait()


@pytest.fixture(scope="session")
def running_mooncake(tmp_path_factory) -> "Iterator[MooncakeStore]":
    pytest.importorskip("mooncake.store", exc_type=ImportError, reason="kvtier[mooncake] is not installed")
    from tests.cluster.mooncake_store import MooncakeStore

    store = MooncakeStore(tmp_path_factory.mktemp("mooncake"))
    try:
        store.start()
        yield store
    finally:
        store.close()


@pytest.fixture
def mooncake(running_mooncake: "MooncakeStore") -> "Iterator[MooncakeStore]":
    """A master and two storage nodes, all of them healthy before and after the test."""
    yield running_mooncake
    close_all()  # before the store has forgotten its idle connections
    running_mooncake.heal()
