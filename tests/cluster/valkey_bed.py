"""Valkey servers on loopback for the tests: one server, a cluster with replicas, and one with TLS.

Data are in memory. All servers are children of this process and end with it.
"""

import os
import platform
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.shared.ceph import Daemon, NotInstalledError, apt_install
from tests.waiting import free_port, is_listening, wait_until

PACKAGES = ["valkey-server", "valkey-tools", "libjemalloc2", "liblzf1", "libatomic1"]
"""Of Debian's backports. They are unpacked into a folder of their own: the system stays as it is."""
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvtier-tests" / "valkey-8.0.1"
SERVER_VARIABLE = "KVTIER_TEST_VALKEY"
"""Environment variable: program of another server to test with, such as `redis-server`."""
INSTALL_DEADLINE_S = 300.0
START_DEADLINE_S = 60.0
NODE_TIMEOUT_S = 1.5
"""A cluster replaces a master that is silent for longer."""
MASTERS, REPLICAS = 3, 1
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Program(NamedTuple):
    """The server's program and the folder of its libraries."""

    path: str
    libraries: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | ({"LD_LIBRARY_PATH": str(self.libraries)} if self.libraries else {})


def install() -> Program:
    """Valkey, where it is installed or can be; otherwise Redis.

    Raises:
        NotInstalledError: neither is there, with the reason.
    """
    if chosen := os.environ.get(SERVER_VARIABLE):
        found = shutil.which(chosen)
        if found is None:
            raise NotInstalledError(f"no program {chosen!r}, which {SERVER_VARIABLE} names")
        return Program(found)
    if found := shutil.which("valkey-server"):
        return Program(found)
    reason = ""
    if shutil.which("apt-get") and "bookworm" in platform.freedesktop_os_release().get("VERSION_CODENAME", ""):
        try:
            return _unpacked(CACHE)
        except (subprocess.SubprocessError, OSError) as error:
            reason = f"Valkey of Debian's backports: {error}; "
    for program in ("valkey-server", "redis-server"):
        if shutil.which(program) is None:
            with suppress(NotInstalledError, subprocess.TimeoutExpired):
                apt_install(program)
        if found := shutil.which(program):
            return Program(found)
    raise NotInstalledError(f"{reason}neither valkey-server nor redis-server is installed")


def _unpacked(folder: Path) -> Program:
    """Debian's packages, downloaded with lists of their own and unpacked into `folder`."""
    root = folder / "root"
    program = Program(str(root / "usr/bin/valkey-server"), root / "usr/lib" / f"{platform.machine()}-linux-gnu")
    if not Path(program.path).exists():
        shutil.rmtree(folder, ignore_errors=True)
        for part in ("lists/partial", "cache/archives/partial", "packages", "unpacking"):
            (folder / part).mkdir(parents=True)
        sources = "".join(
            f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian {suite} main\n"
            for suite in ("bookworm", "bookworm-backports")
        )
        (folder / "sources.list").write_text(sources)
        places = {
            "Dir::Etc::sourcelist": "sources.list",
            "Dir::Etc::sourceparts": "none",
            "Dir::State::lists": "lists",
            "Dir::Cache": "cache",
        }
        options = [f"-o{key}={folder / value}" for key, value in places.items()]
        for command in (["update", "-qq"], ["-t", "bookworm-backports", "download", "-qq", *PACKAGES]):
            subprocess.run(
                ["apt-get", *options, *command],
                cwd=folder / "packages",
                timeout=INSTALL_DEADLINE_S,
                check=True,
                capture_output=True,
            )
        for package in (folder / "packages").glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(folder / "unpacking")], timeout=60, check=True)
        (folder / "unpacking").rename(root)
    subprocess.run([program.path, "--version"], env=program.environment, timeout=10, check=True, capture_output=True)
    return program


CLOCK_SOURCE = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
static volatile long *offset;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    offset = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
}
int gettimeofday(struct timeval *time, void *zone) {
    long result = syscall(SYS_gettimeofday, time, zone);
    if (offset && offset != MAP_FAILED) time->tv_sec += *offset;
    return result;
}
"""


class Clock:
    """A wall clock of its own for a server; libfaketime and jemalloc wait for each other.

    Args:
        folder: for its files.

    Raises:
        NotInstalledError: there is no C compiler.
    """

    def __init__(self, folder: Path) -> None:
        if shutil.which("cc") is None:
            raise NotInstalledError("no C compiler")
        source, library, self._offset = folder / "clock.c", folder / "clock.so", folder / "offset"
        source.write_text(CLOCK_SOURCE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], timeout=60, check=True)
        self._offset.write_bytes(bytes(4096))
        self.variables = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}

    def jump_to(self, offset_s: int) -> None:
        """Be so many seconds ahead of the true time."""
        with self._offset.open("r+b") as stream:
            stream.write(offset_s.to_bytes(8, "little", signed=True))


class RefusedError(Exception):
    """A server's error reply."""


class Line:
    """A plain connection to a server, for tests to look at it and to change it."""

    def __init__(self, port: int, deadline_s: float = 10.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=deadline_s)
        self._stream = self._socket.makefile("rb")

    def call(self, *parts: object):
        """Send one command and return its reply; bytes for strings."""
        coded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
        self._socket.sendall(b"*%d\r\n" % len(coded) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in coded))
        return self._reply()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def _reply(self):
        line = self._stream.readline()
        if not line:
            raise ConnectionResetError("the server has closed")
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RefusedError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"+":
            return rest
        count = int(rest)
        if count < 0:
            return None
        if kind == b"*":
            return [self._reply() for _ in range(count)]
        return self._stream.read(count + 2)[:-2]


class Server(Daemon):
    """One server process. `restart` brings it back, empty, after `kill`."""

    def __init__(self, root: Path, program: Program, *settings: str, **variables: str) -> None:
        self.port = new_port()
        self.root = root / str(self.port)
        self.root.mkdir(parents=True)
        command = [
            *(program.path, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.root)),
            *("--save", "", "--appendonly", "no", "--enable-debug-command", "yes", *settings),
        ]
        super().__init__(command, self.root / "log", program.environment | variables)

    def call(self, *parts: object):
        """One command on a connection of its own."""
        line = Line(self.port)
        try:
            return line.call(*parts)
        finally:
            line.close()

    def restart(self) -> None:
        """Start it, and wait until it answers."""
        self.start()
        self.wait()

    def wait(self) -> None:
        """Until it answers."""
        wait_until(self._answers, f"server {self.port}", START_DEADLINE_S)

    def info(self, section: str) -> dict[str, str]:
        """The lines of INFO."""
        lines = self.call("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def calls(self, command: str) -> int:
        """How often `command` has run since the server's start or CONFIG RESETSTAT."""
        row = self.info("commandstats").get(f"cmdstat_{command}", "calls=0,")
        return int(row.split("calls=")[1].split(",")[0])

    def _answers(self) -> bool:
        try:
            return self.is_running and self.call("PING") == b"PONG"
        except (OSError, RefusedError):
            return False


class Cluster:
    """Masters with replicas. Node `n` of `nodes` is a master at first for n < MASTERS; replicas follow."""

    def __init__(self, root: Path, program: Program, *settings: str) -> None:
        own = (
            *("--cluster-enabled", "yes", "--cluster-replica-validity-factor", "0"),
            *("--cluster-node-timeout", str(int(NODE_TIMEOUT_S * 1000))),
            *("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1"),
        )
        self.nodes = [Server(root, program, *own, *settings) for _ in range(MASTERS * (1 + REPLICAS))]

    def start(self) -> None:
        """Start all nodes and give each master a third of the slots."""
        for node in self.nodes:
            node.start()
        for number, node in enumerate(self.nodes):
            node.wait()
            node.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.nodes[1:]:
            node.call("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for number, node in enumerate(self.nodes[:MASTERS]):
            first, end = (16384 * n // MASTERS for n in (number, number + 1))
            node.call("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        count = len(self.nodes)
        wait_until(lambda: all(len(node_rows(node)) == count for node in self.nodes), "the nodes' acquaintance")
        for number, node in enumerate(self.nodes[MASTERS:]):
            node.call("CLUSTER", "REPLICATE", self.nodes[number % MASTERS].call("CLUSTER", "MYID"))
        self.wait()

    def wait(self) -> None:
        """Until all running nodes see the same masters, all of them well, and every replica has its master's data."""
        wait_until(
            lambda: all(map(self._is_well, self.running())) and len(set(map(_masters_seen, self.running()))) == 1,
            "the cluster",
            START_DEADLINE_S,
        )

    def running(self) -> list[Server]:
        return [node for node in self.nodes if node.is_running]

    def masters(self) -> list[Server]:
        """The nodes that call themselves masters with slots, in no order."""
        return [node for node in self.running() if (row := own_row(node)) and "master" in row[2] and len(row) > 8]

    def master_of(self, slot: int) -> Server:
        """The master of `slot`, as the cluster sees it."""
        port = next(row[2][1] for row in self.running()[0].call("CLUSTER", "SLOTS") if row[0] <= slot <= row[1])
        return next(node for node in self.nodes if node.port == port)

    def replica_of(self, master: Server) -> Server:
        """A replica of `master`."""
        own = own_row(master)[0]
        return next(node for node in self.running() if own_row(node)[3] == own)

    def wait_replicated(self, master: Server) -> None:
        """Until the replica of `master` has all of its objects. WAIT covers only the writes of its own connection."""
        replica, end = self.replica_of(master), int(master.info("replication")["master_repl_offset"])
        wait_until(lambda: int(replica.info("replication")["slave_repl_offset"]) >= end, "the replica's objects")

    def move_slot(self, slot: int, target: Server, keys_at_once: int = 10) -> None:
        """Move `slot` and its keys to another master, while clients use it."""
        source = self.master_of(slot)
        if source is target:
            return
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", own_row(source)[0])
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", own_row(target)[0])
        while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, keys_at_once):
            source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for node in (target, source, *(each for each in self.masters() if each not in (source, target))):
            node.call("CLUSTER", "SETSLOT", slot, "NODE", own_row(target)[0])

    def close(self) -> None:
        for node in self.nodes:
            node.kill()

    def _is_well(self, node: Server) -> bool:
        try:
            if b"cluster_state:ok" not in node.call("CLUSTER", "INFO"):
                return False
            if "slave" not in own_row(node)[2]:
                return True
            return node.info("replication")["master_link_status"] == "up"
        except (OSError, RefusedError, KeyError):
            return False


def _masters_seen(node: Server) -> tuple[tuple[int, int, int], ...]:
    return tuple(sorted((first, last, master[1]) for first, last, master, *_ in node.call("CLUSTER", "SLOTS")))


def node_rows(node: Server) -> list[list[str]]:
    """The rows of CLUSTER NODES: id, address, flags, master, ping, pong, epoch, link, slots."""
    return [line.split() for line in node.call("CLUSTER", "NODES").decode().splitlines()]


def own_row(node: Server) -> list[str]:
    """The row of `node` itself."""
    return next(row for row in node_rows(node) if "myself" in row[2])


def new_port() -> int:
    """A free port whose partner for a cluster's own traffic, 10000 higher, is free, too."""
    while True:
        port = free_port()
        if not is_listening(port + 10000):
            return port


class Authority(NamedTuple):
    """A throw-away authority and a server certificate for 127.0.0.1 and localhost."""

    ca_file: Path
    certificate: Path
    key: Path


def make_authority(folder: Path) -> Authority:
    """Made with openssl, valid for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Authority(folder / "ca.pem", folder / "server.pem", folder / "server.key")

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], cwd=folder, timeout=60, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca_key, request = folder / "ca.key", folder / "server.csr"
    openssl(*new, "-x509", "-days", 1, "-subj", "/CN=kvtier test", "-keyout", ca_key, "-out", made.ca_file)
    openssl(*new, "-subj", "/CN=localhost", "-keyout", made.key, "-out", request)
    (folder / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signed = ("-CA", made.ca_file, "-CAkey", ca_key, "-CAcreateserial", "-extfile", "extensions")
    openssl("x509", "-req", "-days", 1, "-in", request, *signed, "-out", made.certificate)
    return made


def tls_settings(authority: Authority, port: int, *, asks_clients: bool = False) -> Sequence[str]:
    """Settings of a server that speaks TLS at `port`, besides its plain port."""
    return (
        *("--tls-port", str(port), "--tls-cert-file", str(authority.certificate)),
        *("--tls-key-file", str(authority.key), "--tls-ca-cert-file", str(authority.ca_file)),
        *("--tls-auth-clients", "yes" if asks_clients else "no"),
    )
