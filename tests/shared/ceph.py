"""One Ceph cluster on loopback for the tests: object store behind an S3 gateway, and a file system mounted twice.

The packages are Debian's. Data are in memory. All daemons are children of this process and end with it.
"""

import os
import shutil
import signal
import subprocess
import urllib.request
import uuid
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import obstore
from obstore.store import S3Store
from tests.shared.node_network import NodeNetwork, why_not
from tests.waiting import free_port, is_listening, wait_until

PACKAGES = ["ceph-mon", "ceph-mgr", "ceph-osd", "ceph-common", "radosgw", "ceph-mds", "ceph-fuse", "iproute2"]
PROGRAMS = [
    *("ceph-mon", "ceph-mgr", "ceph-osd", "ceph", "radosgw", "radosgw-admin", "ceph-mds", "ceph-fuse"),
    *("setpriv", "ip"),
]
INSTALL_DEADLINE_S = 300.0
START_DEADLINE_S = 90.0
STOP_DEADLINE_S = 10.0
DATA_BYTES = 4 << 30
"""What the object store holds in memory at most. When it is full everything hangs, even deletions: stay well below."""


class NotInstalledError(Exception):
    """The packages are missing and cannot be installed."""


def install() -> None:
    """Install the packages unless their programs are there.

    Raises:
        NotInstalledError: with the reason.
    """
    if not all(map(shutil.which, PROGRAMS)):
        apt_install(*PACKAGES)


def apt_install(*packages: str) -> None:
    """Install Debian's packages, which start no server.

    Raises:
        NotInstalledError: with the reason.
    """
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NotInstalledError(f"only root with apt-get can install {' '.join(packages)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", *arguments],
            check=False,
            env=environment,
            timeout=INSTALL_DEADLINE_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise NotInstalledError(f"apt-get {arguments[0]} ended with {done.returncode}: {done.stdout[-500:]}")


class Daemon:
    """A server process that can be killed, paused and started again. It ends when this process does."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.command, self.log = command, log
        self._environment = environment
        self._process: subprocess.Popen | None = None
        self._is_paused = False

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it. It may need a while until it answers."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._is_paused = False

    def pause(self) -> None:
        """SIGSTOP: its connections stay open and nothing answers. Returns when all threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self._is_paused = True
        threads = list(Path(f"/proc/{self.pid}/task").glob("*/stat"))
        # A busy machine takes its time, and meanwhile the process would answer.
        wait_until(
            lambda: all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in threads), "the stop", STOP_DEADLINE_S
        )

    def resume(self) -> None:
        """SIGCONT."""
        if self.is_running and self._is_paused:
            os.kill(self.pid, signal.SIGCONT)
        self._is_paused = False

    def kill(self) -> None:
        """SIGKILL: its connections are reset."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)


class S3Access(NamedTuple):
    """How to reach the gateway."""

    endpoint: str
    bucket: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def client(self) -> S3Store:
        """A plain client."""
        return S3Store(
            self.bucket,
            endpoint=self.endpoint,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            region=self.region,
            client_options={"allow_http": True, "timeout": "60s"},
        )

    def create_bucket(self) -> None:
        """Create `bucket`: the address of an object without a name is the bucket's."""
        url = obstore.sign(self.client(), "PUT", "", timedelta(minutes=1))
        request = urllib.request.Request(url, method="PUT")
        urllib.request.urlopen(request, timeout=30).close()


class Ceph:
    """A monitor and an object store; the gateway and the file system start when they are asked for first.

    `osd` may be paused, but not killed: its data are in memory. `gateway` and `mds` may be killed and started again.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._environment = os.environ | {"CEPH_CONF": str(root / "ceph.conf")}
        self._daemons: list[Daemon] = []
        self._access: S3Access | None = None
        self._mounts: tuple[Path, Path] | None = None
        self.osd: Daemon
        self.gateway: Daemon
        self.mds: Daemon
        self.clients: list[Daemon] = []
        """The FUSE processes of `mounts`, in the same order."""
        self.no_network = why_not()
        """Why the first mount has no network of its own; empty if it has."""
        self.network: NodeNetwork | None = None if self.no_network else NodeNetwork()
        """Of the first mount's node."""

    def start(self) -> None:
        """Start monitor and object store."""
        for part in ("mon/a", "osd/0", "mgr/x", "mds/a", "run", "log"):
            (self.root / part).mkdir(parents=True)
        cluster, address = str(uuid.uuid4()), f"v2:{self._address}:{free_port()}"
        (self.root / "ceph.conf").write_text(self._settings(cluster, address))
        monitors, place = str(self.root / "monmap"), f"[{address}]"
        self.call("monmaptool", "--create", "--fsid", cluster, "--enable-all-features", "--addv", "a", place, monitors)
        self.call("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        self._daemon("mon", "ceph-mon", "-f", "-i", "a")
        identity = str(uuid.uuid4())
        self.call("ceph", "osd", "new", identity)
        self.call("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
        self.osd = self._daemon("osd", "ceph-osd", "-f", "-i", "0")
        wait_until(lambda: "1 up" in self.call("ceph", "osd", "stat"), "the object store")

    def s3(self) -> S3Access:
        """The gateway, started at the first call, with an empty bucket."""
        if self._access is None:
            access = S3Access(f"http://127.0.0.1:{free_port()}", "kvtier", "TESTKEY" + "A" * 13, uuid.uuid4().hex)
            user = ["--uid", "kv", "--display-name", "kv", "--access-key", access.access_key]
            self.call("radosgw-admin", "-n", "client.rgw.a", "user", "create", *user, "--secret", access.secret_key)
            self.gateway = self._daemon(
                "rgw",
                "radosgw",
                "-f",
                "-n",
                "client.rgw.a",
                f"--rgw-frontends=beast endpoint=127.0.0.1:{access.port} tcp_nodelay=1",
            )
            self._access = access
            self.wait_gateway()
            access.create_bucket()
            obstore.put(access.client(), "first", b"takes seconds: the gateway makes its pools")
        return self._access

    def wait_gateway(self) -> None:
        """Until the gateway answers, after a start."""
        assert self._access is not None
        port = self._access.port
        wait_until(lambda: is_listening(port), "the gateway")

    def mounts(self) -> tuple[Path, Path]:
        """Two mounts of one file system, as two nodes have them; made at the first call."""
        if self._mounts is None:
            self._daemon("mgr", "ceph-mgr", "-f", "-i", "x")  # answers `df`
            self.mds = self._daemon("mds", "ceph-mds", "-f", "-i", "a")
            for pool in ("fs_names", "fs_data"):
                self.call("ceph", "osd", "pool", "create", pool, "8")
            self.call("ceph", "fs", "new", "fs", "fs_names", "fs_data")
            wait_until(lambda: "up:active" in self.call("ceph", "mds", "stat"), "the metadata server")
            self._mounts = (self.mount("node_a", self.network), self.mount("node_b"))
        return self._mounts

    def mount(self, node: str, network: NodeNetwork | None = None) -> Path:
        """One more mount of the file system, perhaps by way of a network of its own."""
        place = self.root / node
        place.mkdir()
        mount = ["ceph-fuse", "-f", f"--admin-socket={self.root}/run/{node}.asok", str(place)]
        self.clients.append(self._daemon(node, *(network.inside if network else []), *mount))
        wait_until(lambda: os.path.ismount(place), f"the mount {node}")
        return place

    def remount(self, place: Path) -> None:
        """Mount a file system again whose client was killed, or was cut off while it was paused."""
        (client,) = [daemon for daemon in self.clients if daemon.command[-1] == str(place)]
        client.kill()
        subprocess.run(["umount", "-l", str(place)], timeout=30, capture_output=True, check=True)
        client.start()
        wait_until(lambda: os.path.ismount(place), f"the mount {place.name}")

    def call(self, *command: str) -> str:
        """Run one of Ceph's programs and return what it prints."""
        done = subprocess.run(
            command, env=self._environment, timeout=START_DEADLINE_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr[-1000:]}")
        return done.stdout

    def close(self) -> None:
        """End all daemons, the last one first."""
        for daemon in reversed(self._daemons):
            if daemon in self.clients:
                # Lazily: a paused server would hold the mount.
                subprocess.run(["umount", "-l", daemon.command[-1]], timeout=30, capture_output=True, check=False)
            daemon.kill()
        self._daemons.clear()
        if self.network:
            self.network.close()

    @property
    def _address(self) -> str:
        return self.network.server_address if self.network else "127.0.0.1"

    def _daemon(self, name: str, *command: str) -> Daemon:
        daemon = Daemon(list(command), self.root / "log" / f"{name}.out", self._environment)
        self._daemons.append(daemon)
        daemon.start()
        return daemon

    def _settings(self, cluster: str, monitor: str) -> str:
        root = self.root
        return f"""
[global]
fsid = {cluster}
mon host = {monitor}
ms bind ipv6 = false
public addr = {self._address}
ms crc data = false
auth cluster required = none
auth service required = none
auth client required = none
auth allow insecure global id reclaim = true
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
run dir = {root}/run
crash dir = {root}
log file = {root}/log/$name.log
pid file = {root}/run/$name.pid
admin socket = {root}/run/$name.$pid.asok
setuser = root
setgroup = root
[mon]
mon data = {root}/mon/$id
# A paused daemon is slow, not gone.
mds beacon grace = 3600
[mgr]
mgr data = {root}/mgr/$id
[osd]
osd data = {root}/osd/$id
osd objectstore = memstore
memstore device bytes = {DATA_BYTES}
[mds]
mds data = {root}/mds/$id
# Its default of 5 s is how long the first open of a file on the other mount waits.
mds tick interval = 0.02
# A node that does not give back what others need is cut off after this long; without it they wait for a minute.
mds cap revoke eviction timeout = 5
[client]
client mount timeout = 30
# How long a client keeps the exclusive use of a closed file; 5 s by default.
client caps release delay = 1
[client.rgw.a]
# Its default, "secure", hangs for 300 s without cephx.
ms mon client mode = crc
rgw enable usage log = false
rgw enable ops log = false
# By default the memory of a deleted object is free after two hours.
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 2
rgw put obj min window size = 16777216
rgw get obj window size = 67108864
"""
