"""A Mooncake master and storage nodes on loopback, and tiers on them.

Each server is a process of its own that ends with this one.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.shared.ceph import Daemon
from tests.shared.s3_world import KEY_ID, MODEL
from tests.tier_makers import fresh_prefix, kept
from tests.waiting import free_port, is_listening, wait_until

from kvtier.errors import TierError
from kvtier.tier.base import Read, Write
from kvtier.tier.mooncake.client import _idle
from kvtier.tier.mooncake.kind import KIND, MooncakeSettings, _raw
from kvtier.tier.mooncake.raw_client import RawMooncake
from kvtier.tier.registry import TierContext
from kvtier.types import ObjectName

SEGMENT_BYTES = 256 << 20
TTL_S = 3
"""After so long without a sign of life the master forgets a node; 10 by default."""
START_DEADLINE_S = 60.0
_NODE = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 64 << 20, "tcp", "", sys.argv[1])
if code:
    sys.exit(f"setup: {code}")
print("ready", flush=True)
while True:
    time.sleep(3600)
"""


class MooncakeStore:
    """A master with further `flags` and `nodes` storage nodes of `segment_bytes` each."""

    def __init__(
        self, folder: Path, nodes: int = 2, segment_bytes: int = SEGMENT_BYTES, flags: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self.folder, self._segment_bytes = folder, segment_bytes
        metrics = free_port()
        program = str(Path(sys.executable).parent / "mooncake_master")
        self.master = Daemon(
            [
                program,
                f"--rpc_port={self.port}",
                "--rpc_address=127.0.0.1",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={metrics}",
                f"--client_ttl={TTL_S}",
                *flags,
            ],
            folder / "master.log",
            dict(os.environ),
        )
        self.nodes = [self._node(number) for number in range(nodes)]

    def start(self) -> None:
        """Start all of them."""
        self.start_master()
        for node in self.nodes:
            node.start()
        for node in self.nodes:
            self.wait_node(node)

    def start_master(self) -> None:
        """Start the master, which knows no objects then."""
        self.master.start()
        wait_until(lambda: is_listening(self.port), "the master", START_DEADLINE_S)

    def restart_master(self) -> None:
        """Start the master again, and wait until every node takes part."""
        self.start_master()
        self.wait()

    def restart_node(self, node: Daemon) -> None:
        """Start the node again, with empty memory."""
        node.log.write_bytes(b"")
        node.start()
        self.wait_node(node)

    def wait_node(self, node: Daemon) -> None:
        """Wait until its memory is part of the store."""
        wait_until(lambda: "ready" in node.log.read_text() or not node.is_running, "a node", START_DEADLINE_S)
        assert node.is_running, node.log.read_text()[-2000:]

    def heal(self) -> None:
        """Let everything run that was started, and wait until the master has forgotten what was killed."""
        _idle.clear()  # engines may have connections that were cut: the first transfer on each of them fails
        is_whole = self.master.is_running and all(node.is_running for node in self.nodes)
        was_paused = any(daemon._is_paused for daemon in (self.master, *self.nodes))
        self.master.resume()
        if not self.master.is_running:
            self.start_master()
        for node in self.nodes:
            node.resume()
            if not node.is_running:
                self.restart_node(node)
        if not is_whole or was_paused:
            self.wait()

    def wait(self) -> None:
        """Wait until every node takes objects and gives them back."""
        tier = self.tier(copies=len(self.nodes))
        single = self.tier()
        try:
            wait_until(lambda: _is_healthy(tier) and _is_healthy(single), "the store", START_DEADLINE_S)
        finally:
            tier.close()
            single.close()

    def close(self) -> None:
        """End all processes."""
        for daemon in (*self.nodes, self.master):
            daemon.kill()

    def settings(self, **settings) -> MooncakeSettings:
        """Of a tier with short deadlines and a prefix that no other test uses."""
        common = {"transfer_deadline_s": 4.0, "probe_deadline_s": 1.0, "prefix": fresh_prefix()}
        return MooncakeSettings(master=f"127.0.0.1:{self.port}", **common | settings)

    def tier(self, memory=(), **settings):
        """An open tier, which is closed after the test."""
        return kept(KIND.open(self.settings(**settings), context(memory)))

    def raw(self, settings: MooncakeSettings) -> RawMooncake:
        """The library alone."""
        return _raw(settings, context())

    def _node(self, number: int) -> Daemon:
        command = [sys.executable, "-c", _NODE, f"127.0.0.1:{self.port}", str(self._segment_bytes)]
        return Daemon(command, self.folder / f"node-{number}.log", dict(os.environ))


def _is_healthy(tier) -> bool:
    names = [ObjectName(os.urandom(32)) for _ in range(16)]
    try:
        if tier.write_many([Write(name, memoryview(bytes(4096))) for name in names]) != [True] * len(names):
            return False
        reads = [Read(name, memoryview(bytearray(4096))) for name in names]
        return tier.read_many(reads) == [4096] * len(names)
    except TierError:
        return False


def context(memory=()) -> TierContext:
    return TierContext(layout=None, key_id=KEY_ID, model=MODEL, memory=tuple(memory))
