"""Starts a server process under limits, waits until it is healthy, and ends it.

Run as a program, this module joins the control groups, sets its cores and replaces itself with the given command.
"""

import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvtier
from kvtier.errors import ConfigError, KvError
from kvtier.tools.bench.serve.machine_limits import MachineLimits

_IMPORT_S = 300.0
END_S = 60.0
_POLL_S = 0.2
_ANSWER_S = 30.0
_LAST_LINES = 30
_BODY_MAX = 500
_PR_SET_PDEATHSIG = 1
"""An operation of prctl(2): send a signal when the parent ends. It stays in effect after execve(2)."""
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000
"""Flags of unshare(2) and mount(2)."""
_STATE_SESSION = 3
"""Index of the session in /proc/PID/stat, counted from the state. The state follows the command's name."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_COLOR": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Otherwise vLLM spends twelve seconds on compiling the helpers of its sampling.
    "TORCHDYNAMO_DISABLE": "1",
}


LMCACHE_CONNECTOR = "lmcache.integration.vllm.lmcache_mp_connector"
LMCACHE_ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}


class ServerError(KvError):
    """A server did not start, did not answer in time, or ended."""


class Server:
    """A server that was started elsewhere and answers at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def pids(self) -> list[int]:
        """Return the server's processes: none, because it was started elsewhere."""
        return []

    def why_over(self) -> str:
        """Return why the server will never answer again, or an empty string while it may."""
        return ""


class ServerProcess(Server):
    """A process that serves at `url`, in its own session, until it is closed.

    Args:
        command: the program and its arguments.
        url: address at which the server will answer.
        log: file for the output of the server.
        environment: variables that override this process's.
        cores: cores on which the process and its children run.
        limits: control group that the process joins.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        environment: Mapping[str, str],
        cores: Sequence[int],
        limits: MachineLimits | None,
    ) -> None:
        super().__init__(url)
        self.command = list(command)
        self._log = log
        self._limits = limits
        start = {
            "command": self.command,
            "environment": dict(environment),
            "cores": list(cores),
            "entries": [] if limits is None else [str(it) for it in limits.entries],
        }
        with log.open("wb") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtier.tools.bench.serve.server", json.dumps(start)],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """Return the server's processes."""
        return session_pids(self._process.pid)

    def why_over(self) -> str:
        """Return why the server will never answer again, with the end of its log, or an empty string while it may."""
        code = self._process.poll()
        if code is None:
            return ""
        cause = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if self._limits is not None and self._limits.out_of_memory():
            cause += f"; its memory limit of {self._limits.memory_bytes:,} bytes was exceeded"
        return "\n".join([f"the server {cause}; the last lines of {self._log}:", *self._last_lines()])

    def close(self) -> None:
        """End the server and its children. Kill the processes that do not end in time."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        until_s = time.monotonic() + END_S
        while left := self.pids():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            if time.monotonic() > until_s:
                raise ServerError(f"processes {left} of the server did not end within {END_S:.0f} s")
            time.sleep(_POLL_S / 4)
        self._process.wait(END_S)

    def _last_lines(self) -> list[str]:
        with suppress(OSError):
            return self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        return []


def await_health(server: Server, path: str = "/health", limit_s: float = 30.0) -> None:
    """Wait until the server answers.

    Raises:
        ServerError: the server ended, or does not answer within `limit_s`.
    """
    until_s = time.monotonic() + limit_s
    problem = ""
    while time.monotonic() < until_s:
        if reason := server.why_over():
            raise ServerError(reason)
        try:
            get(server.url + path)
        except ServerError as error:
            problem = str(error)
            time.sleep(_POLL_S)
        else:
            return
    raise ServerError(f"{server.url}{path} did not answer within {limit_s:.0f} s: {problem}")


def get(url: str, body: object = None, limit_s: float = _ANSWER_S) -> str:
    """Return the answer to a GET request, or to a POST request if there is a `body`.

    Raises:
        ServerError: the server does not answer, or answers with an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310 - arms check it
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:  # noqa: S310 - see above
            return answer.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        text = ""
        with suppress(OSError, http.client.HTTPException):
            text = error.read(_BODY_MAX).decode(errors="replace")
        raise ServerError(f"{url} answered {error.code}: {text}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{url} does not answer: {error}") from error


def session_pids(session: int) -> list[int]:
    """Return the live processes of a session in ascending order."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError):
                fields = (place / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z" and int(fields[_STATE_SESSION]) == session:
                    found.append(int(place.name))
    return sorted(found)


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of this machine that are free now."""
    with ExitStack() as probes:
        servers = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


@dataclass(frozen=True, slots=True)
class VllmPython:
    """A Python with vLLM."""

    python: Path
    version: str
    is_cpu: bool
    """Whether vLLM computes on the CPU."""


@dataclass(frozen=True, slots=True)
class LmcachePackages:
    """A folder for PYTHONPATH with LMCache and the packages that it requires in addition to vLLM's."""

    folder: Path
    version: str


def python_output(python: Path, *arguments: str, limit_s: float, packages: Path | None = None) -> str:
    """Run a Python interpreter in the folder ``/``, with `packages`, if any, on its path. Return its output.

    Raises:
        ServerError: the interpreter does not start, fails or takes too long. The message has the last printed line.
    """
    command = [str(python), *arguments]
    added = {} if packages is None else LMCACHE_ENVIRONMENT | {"PYTHONPATH": str(packages)}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=True, cwd="/", env=os.environ | added
        ).stdout
    except subprocess.CalledProcessError as error:
        raise ServerError((error.stderr.strip().splitlines() or ["it failed"])[-1]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(str(error)) from error


def find_vllm(given: Path | None) -> VllmPython:
    """Return the Python `given`, else the running one if it has vLLM, else that in the checkout's ``.venv-vllm``.

    Raises:
        ConfigError: none of them can import vLLM.
    """
    beside = Path(kvtier.__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    asked = "import json, vllm, vllm.platforms as p; print(json.dumps([vllm.__version__, p.current_platform.is_cpu()]))"
    tried: list[str] = []
    for python in [given] if given is not None else [Path(sys.executable), beside]:
        program = shutil.which(str(python))
        if program is None:
            tried.append(f"{python} is not a program")
            continue
        place = Path(program).absolute()  # not resolved, because a resolved path leaves the virtual environment
        try:
            version, is_cpu = json.loads(python_output(place, "-c", asked, limit_s=_IMPORT_S).splitlines()[-1])
            return VllmPython(place, version, is_cpu)
        except (ServerError, ValueError, IndexError) as error:
            tried.append(f"{python}: {error}")
    raise ConfigError(
        f"no Python with vLLM was found ({'; '.join(tried)}); give one that can import vllm with --vllm PYTHON"
    )


def find_lmcache(given: Path | None, vllm: VllmPython) -> LmcachePackages:
    """Return the folder `given`, else the checkout's ``.lmcache``, if the LMCache in it works in vLLM's Python.

    Raises:
        ConfigError: LMCache's connector cannot be imported from the folder.
    """
    folder = given or Path(kvtier.__file__).parents[2] / ".lmcache"
    asked = f"import {LMCACHE_CONNECTOR}; from importlib.metadata import version; print(version('lmcache'))"
    try:
        found = python_output(vllm.python, "-c", asked, limit_s=_IMPORT_S, packages=folder.absolute())
        return LmcachePackages(folder.absolute(), found.split()[-1])
    except (ServerError, IndexError) as error:
        raise ConfigError(
            f"--lmcache {folder}: {error}; allowed: a folder that pip install --target has filled from "
            "tests/vllm/lmcache.txt"
        ) from error


def write_packages(directory: Path, entry_points: Mapping[str, str]) -> Path:
    """Write a folder for PYTHONPATH with this kvtier, and with entry points that no other server sees.

    Args:
        directory: directory in which to make the folder.
        entry_points: maps a group to ``name = module:object``.
    """
    folder = directory / "packages"
    information = folder / "kvtier_bench_serve-1.dist-info"
    information.mkdir(parents=True)
    (folder / "kvtier").symlink_to(Path(kvtier.__file__).parent)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvtier-bench-serve\nVersion: 1\n", "ascii")
    text = "".join(f"[{group}]\n{line}\n" for group, line in entry_points.items())
    (information / "entry_points.txt").write_text(text, encoding="ascii")
    return folder


def vllm_environment(
    python: VllmPython, packages: Path, cores: Sequence[int], lmcache: LmcachePackages | None = None
) -> dict[str, str]:
    """Return the environment of vLLM's server, and of LMCache's server, which is a child of it."""
    found = ENVIRONMENT | {"PYTHONPATH": str(packages)}
    if lmcache is not None:
        found |= LMCACHE_ENVIRONMENT | {"PYTHONPATH": f"{packages}{os.pathsep}{lmcache.folder}"}
    if python.is_cpu:
        found |= {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    return found


def _become(start: Mapping[str, Any]) -> None:
    """Join the control groups, set the cores, and replace this process with the command.

    The command is terminated when the parent process ends.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _own_shared_memory()
    for entry in start["entries"]:
        Path(entry).write_text("0", encoding="ascii")
    if start["cores"]:
        os.sched_setaffinity(0, start["cores"])
    os.execvpe(start["command"][0], start["command"], os.environ | start["environment"])  # noqa: S606 - as asked


def _own_shared_memory() -> None:
    """Give this process and its children a private /dev/shm, which disappears with the last of these processes.

    Otherwise each server of vLLM would leave a host tier of hundreds of megabytes in /dev/shm. Without the right to
    mount, nothing changes.
    """
    call = ctypes.CDLL(None)
    if call.unshare(_CLONE_NEWNS) == 0 and call.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0:
        call.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


if __name__ == "__main__":
    _become(json.loads(sys.argv[1]))
