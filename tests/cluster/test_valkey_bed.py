"""The test bed itself: a cluster whose master dies promotes its replica, and a slot moves with its keys."""

import pytest
from tests.cluster.valkey_bed import RefusedError, own_row
from tests.shared.ceph import wait_until


@pytest.mark.cluster_core
def test_a_killed_master_is_replaced_and_comes_back_as_a_replica(cluster):
    master = cluster.master_of(0)
    replica = cluster.replica_of(master)
    master.kill()
    wait_until(lambda: "master" in own_row(replica)[2], "the promotion", 30)
    master.start()
    master.wait()
    cluster.wait()
    wait_until(lambda: "slave" in own_row(master)[2], "the old master's return", 30)


def test_a_slot_moves_with_its_keys(cluster):
    source = cluster.master_of(12182)
    target = next(node for node in cluster.masters() if node is not source)
    source.call("SET", "foo", "bar")
    cluster.move_slot(12182, target)
    assert target.call("GET", "foo") == b"bar"
    with pytest.raises(RefusedError, match="MOVED"):
        source.call("GET", "foo")
    cluster.move_slot(12182, source)
    assert source.call("GET", "foo") == b"bar"
