"""The servers of the shared tests are real, and every fault that the tests cause is one that a client notices."""

import time

import obstore
import pytest
from obstore.exceptions import GenericError


def impatient(gateway):
    """A client that gives up after a second."""
    access = gateway.access
    return type(gateway.raw)(
        access.bucket,
        endpoint=access.endpoint,
        access_key_id=access.access_key,
        secret_access_key=access.secret_key,
        region=access.region,
        client_options={"allow_http": True, "timeout": "1s", "connect_timeout": "1s"},
        retry_config={"max_retries": 0},
    )


def kill(gateway):
    gateway.daemon.kill()


def pause(gateway):
    gateway.daemon.pause()


def partition(gateway):
    gateway.proxy.partition()


def cut(gateway):
    gateway.proxy.cut()


def truncate(gateway):
    gateway.proxy.cut_answers_after(100_000)


@pytest.mark.shared_core
@pytest.mark.parametrize("fault", [kill, pause, partition, cut, truncate])
def test_a_fault_of_the_gateway_is_noticed_and_passes(gateway, ceph, fault):
    client, frame = impatient(gateway), bytes(range(256)) * 4096
    obstore.put(client, "object", frame)
    assert obstore.get(client, "object").bytes() == frame
    fault(gateway)
    with pytest.raises(GenericError):
        obstore.get(impatient(gateway), "object").bytes()
    gateway.proxy.heal()
    gateway.daemon.resume()
    if not gateway.daemon.is_running:
        gateway.daemon.start()
        ceph.wait_gateway()
    assert obstore.get(client, "object").bytes() == frame


def test_a_delay_is_one_of_the_line_not_of_the_bytes(gateway):
    client, frame = gateway.access.client(), bytes(4 << 20)
    obstore.put(client, "object", frame)
    gateway.proxy.delay_s = 0.2
    start_s = time.monotonic()
    assert len(obstore.get(client, "object").bytes()) == len(frame)
    assert 0.4 <= time.monotonic() - start_s < 5, "16 chunks of 0.2 s each would be a slow line, not a long one"


@pytest.mark.shared_core
def test_two_mounts_are_one_file_system(mounts):
    node_a, node_b = mounts
    (node_a / "draft").write_bytes(b"frame")
    (node_a / "draft").rename(node_a / "object")
    assert (node_b / "object").read_bytes() == b"frame"
    (node_b / "object").unlink()
    assert not (node_a / "object").exists()
