"""The control group of a server, on the kernel's own."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.runtime.open import CHUNK_TOKENS_MIN
from kvtier.tools.bench.serve import machine_limits
from kvtier.tools.bench.serve.arms import chunk_tokens, parse_arms, server_command, transfer_config
from kvtier.tools.bench.serve.machine_limits import Drive, MachineLimits, drive_of
from kvtier.tools.bench.serve.server import ServerError, ServerProcess, VllmPython, await_health, get, session_pids
from kvtier.tools.machine_facts import Mount

READ = """
import mmap, os, sys, time
number = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
began = time.monotonic()
while os.readv(number, [mmap.mmap(-1, 1 << 20)]): pass
print(time.monotonic() - began)
"""
BYTES = 8 << 20
RATE = 4e6


def limits_or_skip(directory: Path) -> MachineLimits:
    try:
        return MachineLimits(64 << 20, drive_of(directory))
    except ConfigError as error:
        pytest.skip(f"no control groups here: {error}")


@pytest.fixture
def limits(tmp_path: Path) -> Iterator[MachineLimits]:
    made = limits_or_skip(tmp_path)
    with closing(made):
        yield made
    assert not any(entry.exists() for entry in made.entries)


def wait_while(holds: Callable[[], object]) -> None:
    until_s = time.monotonic() + 60
    while holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def within(limits: MachineLimits, *command: str) -> subprocess.CompletedProcess[str]:
    enter = "; ".join(f"echo 0 > {entry}" for entry in limits.entries)
    shell = ["sh", "-c", f'{enter}; exec "$@"', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_reads_of_the_drive_are_throttled_and_without_it_are_faster(limits: MachineLimits, tmp_path: Path) -> None:
    file = tmp_path / "data"
    with file.open("wb") as out:
        out.write(os.urandom(BYTES))
        os.fsync(out.fileno())
    limits.throttle(RATE)
    least_s = 0.8 * BYTES / RATE
    assert float(within(limits, sys.executable, "-c", READ, str(file)).stdout) > least_s
    limits.throttle(None)
    assert float(within(limits, sys.executable, "-c", READ, str(file)).stdout) < least_s


def test_memory_has_a_limit_that_counts_the_page_cache(limits: MachineLimits, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(100 << 20))
    os.sync()
    cached = within(limits, sys.executable, "-c", f"open({str(tmp_path / 'large')!r}, 'rb').read(100 << 20); input()")
    assert cached.returncode != 0
    assert limits.out_of_memory() == 1, "100 MiB in a limit of 64"
    walked = f"file = open({str(tmp_path / 'large')!r}, 'rb')\nwhile file.read(1 << 20): pass"
    assert within(limits, sys.executable, "-c", walked).returncode == 0
    used = limits.memory_used()
    assert used is not None
    assert used <= 64 << 20


def test_the_group_goes_with_its_processes(tmp_path: Path) -> None:
    limits = limits_or_skip(tmp_path)
    with suppress(ZeroDivisionError), closing(limits):
        server = ServerProcess(
            ["sleep", "600"], "http://127.0.0.1:1", tmp_path / "log", environment={}, cores=[], limits=limits
        )
        wait_while(lambda: not limits.entries[0].read_text().split())
        _ = 1 / 0
    assert not any(entry.exists() for entry in limits.entries)
    with pytest.raises(ServerError, match="was killed by signal 9"):
        await_health(server)
    server.close()


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from kvtier.tools.bench.serve.server import ServerProcess
server = ServerProcess(["sleep", "600"], "", Path({str(tmp_path / "log")!r}), environment={{}}, cores=[], limits=None)
while not (pids := server.pids()) or not Path(f"/proc/{{pids[0]}}/cmdline").read_text().startswith("sleep"):
    time.sleep(0.01)
print(*pids, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        session = int(bench.stdout.readline())
        assert session_pids(session) == [session]
        bench.kill()
    wait_while(lambda: session_pids(session))


@pytest.mark.parametrize("kind", ["cgroup", "cgroup2", "ext4"])
def test_without_rights_or_controllers_the_error_names_the_way_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount("/proc/fs", kind, kind, frozenset({"memory", "blkio"}), "0:1")
    monkeypatch.setattr(machine_limits, "read_mounts", lambda: [mount])
    with pytest.raises(ConfigError, match="--no-limits"):
        MachineLimits(64 << 20, Drive("vda", "254:0"))


def test_empty_groups_of_killed_processes_are_removed(limits: MachineLimits) -> None:
    parent = limits.entries[0].parent.parent
    with subprocess.Popen(["true"]) as process:
        pass
    abandoned = parent / f"{machine_limits.PREFIX}{process.pid}-0"
    abandoned.mkdir()
    with closing(MachineLimits(64 << 20, Drive("none", "0:0"))):
        assert not abandoned.exists()
        assert limits.entries[0].parent.exists(), "of a live process"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_what_a_server_leaves_in_shared_memory_ends_with_it(tmp_path: Path) -> None:
    left = Path("/dev/shm") / f"kvtier-test-{os.getpid()}"
    script = f"import time; print(open({str(left)!r}, 'wb').write(b'kv'), flush=True); time.sleep(600)"
    log = tmp_path / "log"
    with closing(ServerProcess([sys.executable, "-c", script], "", log, environment={}, cores=[], limits=None)):
        wait_while(lambda: log.read_text() != "2\n")
        assert not left.exists()
    assert not left.exists()


def test_a_directory_in_memory_has_no_drive() -> None:
    with pytest.raises(ConfigError, match="is on no block device"):
        drive_of(Path("/proc"))


def test_a_server_keeps_its_log_and_ends_with_its_children(tmp_path: Path) -> None:
    script = "import subprocess, sys; print('one line'); sys.stdout.flush(); subprocess.run(['sleep', '600'])"
    cores = [min(os.sched_getaffinity(0))]
    started = ServerProcess(
        [sys.executable, "-c", script], "http://127.0.0.1:1", tmp_path / "log", environment={}, cores=cores, limits=None
    )
    with closing(started) as server:
        wait_while(lambda: len(server.pids()) < 2)
        assert all(len(os.sched_getaffinity(pid)) == 1 for pid in server.pids())
        session = server.pids()[0]
        with pytest.raises(ServerError, match=r"did not answer within 0 s: .*refused"):
            await_health(server, limit_s=0.3)
    assert session_pids(session) == []
    assert "one line" in server.why_over()
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:1/metrics"):
        get("http://127.0.0.1:1/metrics")


def test_an_error_whose_body_is_cut_off_is_a_server_error():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            taken, _ = listening.accept()
            taken.recv(1000)
            taken.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 100\r\n\r\npart")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets
            taken.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ServerError, match=r"answered 503|does not answer"):
            get(f"http://127.0.0.1:{listening.getsockname()[1]}/metrics")
        thread.join(10)


@pytest.mark.parametrize(
    ("arms", "settings", "message"),
    [
        (["mooncake"], {}, "--arm mooncake is not an arm; allowed: none, native, lmcache, kvtier, or NAME=URL"),
        (["a=ftp://host"], {}, "--arm a=ftp"),
        (["native=http://host:1"], {}, "that of a built-in arm"),
        (["_mine=http://host:1"], {}, "begins with a letter or a digit"),
        (["a=http://user:hidden@host"], {}, "has a user, a password"),
        (["none", "none"], {}, "given twice"),
        (["none"], {"host.capacity_bytes": 1}, "add --arm kvtier"),
    ],
)
def test_a_wrong_arm_is_named_with_what_is_allowed(arms: list[str], settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_arms(arms, settings)
    assert "hidden" not in str(caught.value)


def test_both_tiered_arms_get_the_same_host_memory_and_place(tmp_path: Path) -> None:
    none, native, kvtier = parse_arms(["none", "native", "kvtier"], {"planner.enabled": False})
    assert transfer_config(none, tmp_path, 1, 2, is_cpu=True) is None
    theirs, ours = (
        transfer_config(arm, tmp_path, 1 << 20, 1 << 30, is_cpu=True)["kv_connector_extra_config"]
        for arm in (native, kvtier)
    )
    assert theirs["cpu_bytes_to_use"] == ours["host.capacity_bytes"] == 1 << 20
    assert theirs["secondary_tiers"][0]["root_dir"] in ours["tiers"][0]
    assert ours["planner.enabled"] is False
    assert theirs["block_size"] == chunk_tokens([native, kvtier]) == CHUNK_TOKENS_MIN
    assert chunk_tokens(parse_arms(["native", "kvtier"], {"store.chunk_tokens": 512})) == 512
    assert "memcpy" in native.means(is_cpu=True)
    assert "memcpy" not in native.means(is_cpu=False)
    python = VllmPython(tmp_path, "1", is_cpu=True)
    sizes = {"device_kv_bytes": 1, "context_tokens": 2, "running": 3}
    plain, tiered = (server_command(python, 8, tmp_path, it, **sizes) for it in (None, {"a": 1}))
    assert tiered == [*plain, "--kv-transfer-config", '{"a": 1}']
