"""Real shared stores, started once for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import obstore
import pytest
from obstore.store import S3Store
from tests.shared.ceph import Ceph, Daemon, NotInstalledError, S3Access, install
from tests.shared.proxy import Proxy
from tests.tier_makers import close_all


@pytest.fixture(autouse=True)
def _tiers() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="session")
def ceph(tmp_path_factory) -> Iterator[Ceph]:
    """A running cluster; its gateway and its file system start when a test asks for them."""
    try:
        install()
    except NotInstalledError as error:
        pytest.skip(f"Ceph cannot be installed: {error}")
    ceph = Ceph(tmp_path_factory.mktemp("ceph"))
    try:
        ceph.start()
        yield ceph
    finally:
        ceph.close()


class Gateway(NamedTuple):
    """The S3 server, the network before it, and how to reach it through this network."""

    ceph: Ceph
    daemon: Daemon
    proxy: Proxy
    access: S3Access
    raw: S3Store
    """A plain client that does not pass through `proxy`."""

    def start(self) -> None:
        """Start the server again after `daemon.kill`."""
        self.daemon.start()
        self.ceph.wait_gateway()

    def heal(self) -> None:
        """End whatever a test has done to the server, the storage behind it and the network."""
        self.proxy.heal()
        self.ceph.osd.resume()
        self.daemon.resume()
        if not self.daemon.is_running:
            self.start()


@pytest.fixture
def gateway(ceph: Ceph) -> Iterator[Gateway]:
    """The S3 gateway with an empty bucket, healthy before and after the test."""
    direct = ceph.s3()
    raw = direct.client()
    obstore.delete(raw, [row["path"] for page in obstore.list(raw) for row in page])
    with Proxy(direct.port) as proxy:
        access = direct._replace(endpoint=f"http://127.0.0.1:{proxy.port}")
        gateway = Gateway(ceph, ceph.gateway, proxy, access, raw)
        yield gateway
        gateway.heal()


@pytest.fixture(scope="session")
def mounts(ceph: Ceph) -> tuple[Path, Path]:
    """Two mounts of one CephFS, as two nodes have them."""
    return ceph.mounts()
