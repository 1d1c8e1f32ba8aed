"""The network of one node: a network namespace with one line to this machine, which a test can break."""

import os
import random
import shutil
import subprocess

CALL_DEADLINE_S = 10.0
NO_ONE = "02:00:00:00:00:01"
"""A link address that no interface has: frames to it are lost without an answer."""


def call(*command: str) -> None:
    """Run a program. Raises `RuntimeError` with what it prints when it fails."""
    done = subprocess.run(command, timeout=CALL_DEADLINE_S, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")


def why_not() -> str:
    """Why this machine permits no network namespaces; empty if it does."""
    missing = [program for program in ("ip", "unshare", "nsenter") if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)}"
    try:
        NodeNetwork().close()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


class NodeNetwork:
    """A namespace that ends with this process, even when it is killed."""

    def __init__(self) -> None:
        # 198.18.0.0/15 is for tests (RFC 2544), so no machine of a real network has these addresses.
        host, number = random.randrange(1 << 16), os.urandom(3).hex()
        self.server_address = f"198.18.{host >> 8}.{host & 255}"
        """Of this machine, on the line and on the machine itself."""
        self._address = f"198.19.{host >> 8}.{host & 255}"
        self._here, self._there = f"kvh{number}", f"kvn{number}"
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.inside = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]
        """Before a command that runs on the node."""
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def partition(self) -> None:
        """Packets are lost in both directions without an error, as when a cable is pulled."""
        for inside, interface, other in self._ends():
            call(*inside, "ip", "neigh", "replace", other, "lladdr", NO_ONE, "dev", interface, "nud", "permanent")

    def heal(self) -> None:
        """Forward packets again; what was lost is sent again by TCP."""
        for inside, interface, other in self._ends():
            shown = [*inside, "ip", "neigh", "show", other, "dev", interface, "nud", "permanent"]
            if subprocess.run(shown, timeout=CALL_DEADLINE_S, capture_output=True, check=True).stdout:
                call(*inside, "ip", "neigh", "del", other, "dev", interface)

    def close(self) -> None:
        """End the namespace, and with it the line."""
        self._holder.kill()
        self._holder.communicate(timeout=CALL_DEADLINE_S)

    def _connect(self) -> None:
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        if not self._holder.stdout.readline():  # it is in its namespace once it has printed
            raise RuntimeError(self._holder.stderr.read().decode().strip())
        peer = ["peer", "name", self._there, "netns", str(self._holder.pid)]
        call("ip", "link", "add", self._here, "type", "veth", *peer)
        for inside, interface, address, other in (
            ([], self._here, self.server_address, self._address),
            (self.inside, self._there, self._address, self.server_address),
        ):
            call(*inside, "ip", "address", "add", f"{address}/32", "dev", interface)
            call(*inside, "ip", "link", "set", interface, "up")
            call(*inside, "ip", "route", "add", f"{other}/32", "dev", interface)

    def _ends(self) -> tuple[tuple[list[str], str, str], ...]:
        return ([], self._here, self._address), (self.inside, self._there, self.server_address)
