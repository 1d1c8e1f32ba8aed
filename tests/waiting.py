"""Waits for other processes and threads, and gives ports to servers on this machine."""

import random
import socket
import time
from collections.abc import Callable

DEADLINE_S = 90.0


PORTS = 12_000, 22_000
"""Range below the kernel's own (`net.ipv4.ip_local_port_range`), because a server may start much later."""

_given: list[socket.socket] = []
"""Each socket reserves a port on this machine until this process ends."""


def free_port() -> int:
    """Return a free TCP port on loopback that no other test gets."""
    while True:
        port, held = random.SystemRandom().randrange(*PORTS), socket.socket(socket.AF_UNIX)
        try:
            held.bind(f"\0kvtier-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _given.append(held)
        return port


def wait_until(
    is_ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, *, pause_s: float = 0.05
) -> None:
    """Call `is_ready` until it returns True. Raises `TimeoutError`."""
    end_s = time.monotonic() + deadline_s
    while not is_ready():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {deadline_s} s")
        time.sleep(pause_s)


def is_listening(port: int) -> bool:
    """Whether a server accepts connections at `port` of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
