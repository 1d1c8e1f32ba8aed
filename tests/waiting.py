"""Waits for other processes and threads, and ports of servers on this machine."""

import socket
import time
from collections.abc import Callable

DEADLINE_S = 90.0


_given: set[int] = set()


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago and was not given before. The kernel may draw one again."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _given:
            _given.add(port)
            return port


def wait_until(
    is_ready: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S, *, pause_s: float = 0.05
) -> None:
    """Ask `is_ready` until the answer is yes. Raises `TimeoutError`."""
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
