"""Mooncake's client library lives in the engine's process: it must not print, listen, take signals or hang there."""

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster.hostile import Hostile
from tests.cluster.mooncake_store import KEY_ID, context
from tests.refusals import refuses
from tests.waiting import free_port

from kvtier.errors import ConfigError, TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.mooncake import client as mooncake_client
from kvtier.tier.mooncake.kind import KIND, MooncakeSettings
from kvtier.tier.mooncake.socket_filter import NodeError, data_port, shut_out
from kvtier.tier.registry import TierContext

_ENGINE = """
import signal, sys
from kvtier.tier.mooncake.kind import KIND, MooncakeSettings
from kvtier.tier.registry import TierContext

def caught():
    status = open("/proc/self/status").read()
    bits = int(status.split("SigCgt:")[1].split()[0], 16)
    return {number for number in range(1, 32) if bits >> (number - 1) & 1}

taken = []
signal.signal(signal.SIGTERM, lambda number, _: taken.append(number))
signal.signal(signal.SIGUSR1, lambda number, _: taken.append(number))
before, table = caught(), {number: signal.getsignal(number) for number in signal.valid_signals()}
tier = KIND.open(MooncakeSettings(master=sys.argv[1]), TierContext(layout=None, key_id=bytes(16)))
assert tier.contains([bytes(32)]) == [False]
assert tier.read(bytes(32), memoryview(bytearray(100))) is None
tier.delete(bytes(32))
assert table == {number: signal.getsignal(number) for number in signal.valid_signals()}
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.raise_signal(number)
assert taken == [signal.SIGTERM, signal.SIGUSR1]
print(list(map(int, sorted(caught() - before))))
"""


@pytest.mark.cluster_core
def test_it_prints_nothing_and_takes_no_signal_that_ends_a_program(mooncake):
    """The library's part in Go wants the signals of program errors, and passes on those that are not its own."""
    done = subprocess.run(
        [sys.executable, "-c", _ENGINE, f"127.0.0.1:{mooncake.port}"],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), "without close, it also ends"
    taken = {signal.Signals(number) for number in json.loads(done.stdout)}
    assert taken <= {signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGURG, signal.SIGPIPE}


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except OSError:
        return False
    return True


@pytest.mark.cluster_core
def test_none_can_connect_to_the_client_and_so_reach_the_slots(mooncake, monkeypatch):
    tier = mooncake.tier(memory=[frame_of(1)])
    ports = tier._client.ports
    assert len(ports) == 2, "for handshakes, and for data"
    assert not any(map(_connects, ports))
    tier.close()

    # The control: without the filters both answer, and the first one names the memory.
    monkeypatch.setattr(mooncake_client, "_idle", {})
    monkeypatch.setattr(mooncake_client, "shut_out", lambda _port: [])
    tier = mooncake.tier(memory=[frame_of(1)])
    port = tier._client.engine.get_rpc_port()
    assert _connects(port)
    assert _connects(data_port(f"127.0.0.1:{port}", 1.0))
    tier.close()


def test_only_the_sockets_that_the_client_names_are_shut_and_no_other_file_is_touched():
    """A client of RDMA names no data port. What else listens, and what else is open, belongs to the engine."""
    with (
        contextlib.closing(asyncio.new_event_loop()),  # it has a pair of sockets without addresses
        socket.create_server(("127.0.0.1", 0)) as local,
        socket.create_server(("", 0)) as other,
        socket.create_server(("", 0)) as mine,
        tempfile.TemporaryFile() as locked,
    ):
        fcntl.lockf(locked, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends when any descriptor of the file is closed
        count = len(os.listdir("/proc/self/fd"))
        port = mine.getsockname()[1]
        socket.setdefaulttimeout(2.0)
        try:
            assert shut_out(port) == [port]
            assert shut_out(local.getsockname()[1]) == []
        finally:
            socket.setdefaulttimeout(None)
        assert len(os.listdir("/proc/self/fd")) == count
        assert os.get_blocking(mine.fileno())
        assert not _connects(port)
        assert _connects(other.getsockname()[1])
        assert _connects(local.getsockname()[1])
        probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        path = f"/proc/{os.getpid()}/fd/{locked.fileno()}"
        assert subprocess.run([sys.executable, "-c", probe, path], check=False, stderr=subprocess.DEVNULL).returncode


@pytest.mark.cluster_core
def test_other_threads_may_close_sockets_while_those_of_the_client_are_looked_for():
    ended = threading.Event()

    def churn():
        while not ended.is_set():
            for each in [socket.socket() for _ in range(50)]:
                each.close()

    with ThreadPoolExecutor(1) as thread:
        churning = thread.submit(churn)
        try:
            for _ in range(300):
                assert shut_out(free_port()) == []
        finally:
            ended.set()
        churning.result(5.0)


_EXITS = """
import itertools, mmap, sys, threading, time
from kvtier.tier.mooncake.kind import KIND, MooncakeSettings
from kvtier.tier.registry import TierContext

memory = memoryview(mmap.mmap(-1, 16 << 20))
settings = MooncakeSettings(master=sys.argv[1], prefix="exits")
tier = KIND.open(settings, TierContext(layout=None, key_id=bytes(16), memory=(memory,)))
threading.excepthook = lambda _: None
numbers = itertools.count()

def work(slot):
    while True:
        name = next(numbers).to_bytes(32, "little")
        tier.write(name, slot)
        tier.read(name, slot)
        tier.delete(name)

for number in range(4):
    slot = memory[number << 22 : (number + 1) << 22]
    threading.Thread(target=work, args=(slot,), daemon=True).start()
time.sleep(0.5)
exec(sys.argv[2])
"""


@pytest.mark.cluster_core
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("import os; os._exit(4)", 4, ""),
        ("import os; os.kill(os.getpid(), 15); time.sleep(5)", -15, ""),
    ],
)
def test_an_engine_that_ends_without_close_in_the_middle_of_transfers_just_ends(mooncake, how, code, last):
    """Python ends a thread that returns to it then, and the library answers that with `abort`."""
    done = subprocess.run(
        [sys.executable, "-c", _EXITS, f"127.0.0.1:{mooncake.port}", how],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.strip().rpartition("\n")[2]) == (code, last), done.stderr


_FORKS = """
import gc, os, signal, sys
from kvtier.errors import TierError
from kvtier.tier.mooncake.kind import KIND, MooncakeSettings
from kvtier.tier.registry import TierContext

tier = KIND.open(MooncakeSettings(master=sys.argv[1]), TierContext(layout=None, key_id=bytes(16)))
assert tier.write(bytes(32), memoryview(b"frame"))
child = os.fork()
if not child:
    signal.alarm(20)
    for act in (lambda: tier.read(bytes(32), memoryview(bytearray(5))), lambda: tier.contains([bytes(32)])):
        try:
            act()
        except TierError as error:
            assert "fork" in str(error), error
        else:
            sys.exit(3)
    tier.close()
    act = tier = None
    gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
into = memoryview(bytearray(5))
assert tier.read(bytes(32), into) == 5 and into == b"frame"
tier.close()
"""


@pytest.mark.cluster_core
def test_a_forked_child_uses_nothing_of_it_and_ends(mooncake):
    """Without the care for children, one that exits as usual ends with SIGSEGV."""
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, f"127.0.0.1:{mooncake.port}"],
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.cluster_core
def test_it_is_opened_and_closed_as_often_as_one_likes_and_twice_at_once(mooncake):
    def held() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    other = mooncake.tier(prefix="other")
    counts, ports = [], []
    for number in range(6):
        tier = mooncake.tier(prefix="one", memory=[frame_of(number)])
        assert tier.write(object_name(number), frame_of(number))
        assert other.contains([object_name(number)]) == [False]
        tier.close()
        tier.close()
        counts.append(held())
        ports.append(tier._client.ports)
    assert ports == ports[:1] * 6, "the engine is kept: freeing it would stop all Python threads"
    assert counts[-1][0] <= counts[1][0]
    assert counts[-1][1] <= counts[1][1] + 4
    assert other.write(object_name(1), frame_of(1))
    into = empty_frame(2 * BLOCK_BYTES)
    assert other.read(object_name(1), into) == 2 * BLOCK_BYTES
    other.close()


def test_a_master_that_is_away_or_no_master_is_an_error_that_names_it():
    port = free_port()
    start_s = time.monotonic()
    with pytest.raises(TierError, match=f"no Mooncake master at 127.0.0.1:{port}"):
        KIND.open(MooncakeSettings(master=f"127.0.0.1:{port}"), context())
    assert time.monotonic() - start_s < 5
    with refuses("store.secret_file", "tier 'mooncake'"):
        KIND.open(MooncakeSettings(master="127.0.0.1"), TierContext(layout=None))
    for wrong in ("", "a b", "host:0", "host:99999", "host:", "http://host:1", "a" * 300):
        with refuses("tiers.mooncake.master", allowed="host:port" if wrong and len(wrong) < 257 else ""):
            MooncakeSettings(master=wrong)
    for wrong in ("", "/a", "a//b", "a b", "a*"):
        with refuses("tiers.mooncake.prefix", value=repr(wrong)):
            MooncakeSettings(master="host", prefix=wrong)


@pytest.mark.cluster_core
def test_no_other_thread_waits_while_a_silent_master_is_opened(mooncake):
    """The library's `setup` keeps Python's lock for half a minute then."""
    longest_s, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest_s
        while not stop.is_set():
            start_s = time.monotonic()
            time.sleep(0.005)
            longest_s = max(longest_s, time.monotonic() - start_s)

    thread = threading.Thread(target=tick)
    thread.start()
    mooncake.master.pause()
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            link, _ = other.accept()
            with link:
                link.sendall(b"220 mail")

        greeter = threading.Thread(target=greet)
        greeter.start()
        for port in (mooncake.port, silent.getsockname()[1], other.getsockname()[1]):
            with pytest.raises(TierError, match=f"no Mooncake master at 127.0.0.1:{port}"):
                KIND.open(MooncakeSettings(master=f"127.0.0.1:{port}"), context())
        greeter.join(5)
    stop.set()
    thread.join(5)
    assert longest_s < 1.0


_HANGS_UP = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        link, _ = server.accept()
        link.recv(100)
        link.close()
"""


def test_what_only_looks_like_a_master_costs_no_sockets_at_each_try():
    counts = []
    # A process of its own: the library keeps Python's lock while it waits.
    with subprocess.Popen([sys.executable, "-c", _HANGS_UP], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        port = int(server.stdout.readline())
        for _ in range(4):
            with pytest.raises(TierError, match="does not answer as a Mooncake master"):
                KIND.open(MooncakeSettings(master=f"127.0.0.1:{port}"), context())
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        server.kill()
    assert counts[3] <= counts[1]


def test_a_node_that_answers_byte_by_byte_is_given_up_in_time():
    say = [(1000).to_bytes(8, "little"), *[part for _ in range(100) for part in (0.1, b" ")]]
    with Hostile(lambda _: say) as node:
        start_s = time.monotonic()
        with pytest.raises(NodeError, match="TimeoutError"):
            data_port(f"127.0.0.1:{node.port}", 0.5)
        assert time.monotonic() - start_s < 3.0


@pytest.mark.parametrize("answer", [b"", b"\0" * 8, b"\xff" * 8, b"\x05" + bytes(7) + b"\x01nono", b"HTTP/1.1 400 Bad"])
def test_a_node_that_speaks_nonsense_is_no_node(answer):
    with Hostile(lambda _: [answer]) as node, pytest.raises(NodeError):
        data_port(f"127.0.0.1:{node.port}", 1.0)


_WITHOUT = """
import importlib.util as util
find = util.find_spec
util.find_spec = lambda name, *rest: None if name == "mooncake" else find(name, *rest)
from kvtier.errors import ConfigError
from kvtier.tier.registry import built_in, by_name
assert "mooncake" not in built_in()
try:
    by_name("mooncake")
except ConfigError as error:
    print(error)
"""


def test_without_the_package_only_this_kind_is_missing():
    done = subprocess.run([sys.executable, "-c", _WITHOUT], timeout=60, check=True, capture_output=True, text=True)
    assert done.stdout.strip().endswith(
        "No module named 'mooncake'; pip install mooncake-transfer-engine-non-cuda==0.3.13.post1"
    )


def test_a_library_of_the_system_that_is_missing_is_an_error_with_its_name(monkeypatch):
    """Such as libibverbs, which Mooncake's wheel does not bring."""
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    hangs_up = lambda _: ()  # noqa: E731 - it takes an attribute
    hangs_up.closes = True
    with Hostile(hangs_up) as master, pytest.raises(ConfigError, match=r"cannot be loaded.*mooncake\.store"):
        KIND.open(MooncakeSettings(master=f"127.0.0.1:{master.port}"), context())


@pytest.mark.cluster_core
def test_keys_carry_the_secret_and_the_model(mooncake):
    one = mooncake.tier(prefix="same")
    assert one.write(object_name(1), frame_of(1))
    settings = mooncake.settings(prefix="same")
    for stranger in (
        TierContext(layout=None, key_id=bytes(16), model=context().model),
        TierContext(layout=None, key_id=KEY_ID, model=bytes(16)),
    ):
        other = KIND.open(settings, stranger)
        assert other.contains([object_name(1)]) == [False]
        other.close()
    assert one._client.exist([f"same/{KEY_ID.hex()}/{context().model.hex()}/{object_name(1).hex()}"], 1.0) == [True]
    one.close()
