"""A resolver that never answers costs an operation its deadline, not minutes, and one thread for each name."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.system import until

from kvtier.tier import deadline_calls
from kvtier.tier.deadline_calls import connected

_SILENT = """
import fcntl, importlib.util, socket, struct, subprocess, sys, threading, time
from kvtier.errors import TierError
from kvtier.tier.registry import TierContext, by_name

subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
resolver = socket.socket(type=socket.SOCK_DGRAM)
fcntl.ioctl(resolver, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS: up
resolver.bind(("127.0.0.1", 53))
context = TierContext(layout=None, key_id=bytes(16), model=bytes(16))
for kind, settings in (
    ("valkey", {"addresses": "kv.example", "connect_deadline_s": 0.5, "transfer_deadline_s": 1.0}),
    ("mooncake", {"master": "kv.example"}),
):
    if importlib.util.find_spec(kind) is None:
        continue
    found = by_name(kind)
    start_s = time.monotonic()
    try:
        found.open(found.settings(**settings), context)
    except TierError as error:
        print(f"{kind} {time.monotonic() - start_s:.1f} {error}", flush=True)
assert resolver.recv(100), "it was asked"
assert sum(thread.name == "kvtier-name" for thread in threading.enumerate()) == 1, threading.enumerate()
"""


def test_with_a_resolver_that_never_answers_each_tier_fails_within_its_deadline(tmp_path):
    """A real one, in namespaces of its own; the system would wait for it for 90 s."""
    unshare = ["unshare", "--net", "--mount", "--"]
    if os.geteuid() or subprocess.run([*unshare, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs root and namespaces")
    settings = tmp_path / "resolv.conf"
    settings.write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:3\n")
    done = subprocess.run(
        [*unshare, sys.executable, "-c", _SILENT, settings], timeout=30, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all("the address of kv.example was not found in time" in line for line in lines), lines
    assert "valkey" in lines[0]
    assert all(float(line.split()[1]) < 8 for line in lines), lines


def test_all_callers_of_a_name_share_one_search_and_its_late_answer_serves_the_next(monkeypatch):
    goes_on, searches = threading.Event(), []
    look_up = socket.getaddrinfo

    def hanging(host, *rest, flags=0, **options):
        if flags & socket.AI_NUMERICHOST:
            return look_up(host, *rest, flags=flags, **options)
        searches.append(host)
        goes_on.wait(30)
        return look_up("127.0.0.1", *rest, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)

    def late(_number: int) -> float:
        start_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"kv\.example was not found in time"):
            connected("kv.example", 1, start_s + 0.3)
        return time.monotonic() - start_s

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(8) as threads:
        assert max(threads.map(late, range(24))) < 5
        assert searches == ["kv.example"]
        port = server.getsockname()[1]
        connected("127.0.0.1", port, time.monotonic() + 5).close()  # a number needs no search
        waits = threads.submit(connected, "kv.example", port, time.monotonic() + 20)
        goes_on.set()
        waits.result(20).close()
        connected("kv.example", port, time.monotonic() + 20).close()
    assert not deadline_calls._lookups


def test_names_that_hang_take_a_bounded_number_of_threads(monkeypatch):
    goes_on = threading.Event()

    def hanging(_host, *_rest, flags=0, **_options):
        if not flags:
            goes_on.wait(30)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(deadline_calls, "LOOKUPS_MAX", 3)
    for number in range(3):
        with pytest.raises(TimeoutError):
            connected(f"{number}.example", 1, time.monotonic() + 0.05)
    with pytest.raises(OSError, match="too many host names"):
        connected("4.example", 1, time.monotonic() + 0.05)
    goes_on.set()
    until(lambda: not deadline_calls._lookups)
    with pytest.raises(OSError, match="Name or service"):
        connected("4.example", 1, time.monotonic() + 5)


def test_what_is_no_name_of_a_host_is_an_error():
    for wrong in ("a" * 64 + ".example", "\ud800"):
        with pytest.raises(OSError, match="not a host name"):
            connected(wrong, 1, time.monotonic() + 5)
