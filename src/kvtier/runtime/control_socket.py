"""A Unix-domain socket on which an engine answers questions about its cache: one line of JSON each way, then the end.

    kvtier cache, scripts          {"version": 1, "command": "find", "deadline_s": 10, "arguments": {...}}
    ControlSocket                  {"version": 1, "result": {...}}   or   {"version": 1, "error": "..."}

One thread reads and writes, for all connections together. It answers `health` itself, so that a probe never waits for
another call. A second thread makes all other calls, one at a time. Neither decides: calls take the session's lock like
any other caller. The file has mode 0600, in a directory in which other users cannot write. Processes of other users but
root are refused.
"""

import fcntl
import json
import logging
import os
import queue
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from kvtier.errors import ConfigError, KvError
from kvtier.runtime.remote_rank import peer_of
from kvtier.tier.safe_open import make_root

logger = logging.getLogger(__name__)

VERSION: Final = 1
SETTING: Final = "control.socket"
PID: Final = "{pid}"
"""In a path: the number of the engine's process."""
CONNECTIONS_MAX: Final = 16
"""A further connection ends the oldest that has sent no request yet, or is refused."""
REQUEST_BYTES_MAX: Final = 1 << 20
"""Of a request: a prompt of about 150,000 tokens. Parsing it holds Python's lock for 15 ms."""
ANSWER_BYTES_MAX: Final = 1 << 24
EXCHANGE_S: Final = 5.0
"""How long a client may take to send its request, and to receive the answer."""
DEADLINE_S: Final = 10.0
DEADLINE_S_MAX: Final = 60.0
PATH_BYTES_MAX: Final = 107
"""Of Linux (`sun_path`)."""
CLOSE_S: Final = 1.0
IDLE_S: Final = 60.0
"""A thread that waits for a call checks for the end at this interval."""
START_S: Final = 2.0
"""How long a start waits for another one at the same directory."""
BUSY_S: Final = 0.02
"""Pause before what failed is tried again: no descriptor or place in a queue was left, or another start was there."""
HEALTH: Final = "health"

Answer = Callable[[str, dict[str, Any], float], dict[str, Any]]
"""(command, arguments, end of its time) -> result. Raises `KvError` for a request that is wrong."""


class ControlError(KvError):
    """A call failed: no engine listens, it did not answer in time, or it refused the request."""


@dataclass(slots=True, eq=False)
class _Client:
    """One connection."""

    connection: socket.socket
    until_s: float
    """The end of the present phase: of receiving, or of sending."""
    received: bytearray = field(default_factory=bytearray)
    has_asked: bool = False
    """Its request is complete; a call is under way until `unsent` has the answer."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))


class ControlSocket:
    """The socket and its two threads.

    Args:
        path: of the socket; ``{pid}`` in it stands for this process. Its directory is created if missing.
        answer: makes a call, in a thread of this server; `health` in the thread that serves all connections.

    Raises:
        ConfigError: the path cannot be used, or another process listens there.
        RuntimeError: the system cannot start a thread.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = Path(str(path).replace(PID, str(os.getpid())))
        self._answer = answer
        self._listener, self._file = _listen(self.path)
        self._process = os.getpid()
        self._clients: dict[socket.socket, _Client] = {}
        self._calls: queue.Queue[tuple[_Client, dict[str, Any]] | None] = queue.Queue(CONNECTIONS_MAX + 1)
        """At most one of each connection, and the end."""
        self._answers: deque[tuple[_Client, bytes]] = deque()
        self._is_closing = False
        self._wakes, self._waker = socket.socketpair()
        for each in (self._wakes, self._waker):
            each.settimeout(0)
        self._threads = [
            threading.Thread(target=run, name=f"kvtier control {name}", daemon=True)
            for name, run in (("socket", self._serve), ("calls", self._make_calls))
        ]
        for thread in self._threads:
            thread.start()
        logger.info("%s: kvtier answers on %s", SETTING, self.path)

    def close(self) -> None:
        """End both threads and remove the file. A call that is under way gets no answer. Idempotent."""
        if self._is_closing or self._process != os.getpid():
            return
        self._is_closing = True
        with suppress(OSError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) == self._file:
                self.path.unlink()
        self._calls.put_nowait(None)
        self._wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_S)

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake, or has ended
            self._waker.send(b"\0")

    # ---- the thread of calls ---------------------------------------------------------------------------------------

    def _make_calls(self) -> None:
        while not self._is_closing:
            with suppress(queue.Empty):
                if call := self._calls.get(timeout=IDLE_S):
                    self._answers.append((call[0], self._made(call[1])))
                    self._wake()

    def _made(self, request: Mapping[str, Any]) -> bytes:
        """The line that answers a request."""
        try:
            if time.monotonic() >= request["until_s"]:
                raise ControlError("the engine was busy with other calls until the deadline")  # noqa: TRY301
            result = self._answer(request["command"], request["arguments"], request["until_s"])
            line = _line({"result": result})
        except KvError as error:
            return _line({"error": str(error)})
        except Exception as error:
            logger.exception("internal error: a control call has failed")
            return _line({"error": f"internal error: {type(error).__name__}; the engine's log has more"})
        if len(line) > ANSWER_BYTES_MAX:
            return _line({"error": f"the answer has {len(line)} bytes; allowed: {ANSWER_BYTES_MAX}"})
        return line

    # ---- the thread of the socket ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._listener, self._wakes, self._waker, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wakes, selectors.EVENT_READ)
            try:
                while not self._is_closing:
                    self._round(selector)
            except Exception:
                logger.exception("internal error: the control socket is closed; requests are served as before")
            for connection in self._clients:
                connection.close()

    def _round(self, selector: selectors.BaseSelector) -> None:
        timed = [it.until_s for it in self._clients.values() if not it.has_asked or it.unsent]
        wait_s = max(0.0, min(timed) - time.monotonic()) if timed else IDLE_S
        for key, _ in selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept(selector)
            elif key.fileobj is self._wakes:
                self._wakes.recv(4096)
            elif client := self._clients.get(cast("socket.socket", key.fileobj)):
                (self._send if client.unsent else self._receive)(client, selector)
        while self._answers:
            self._give(*self._answers.popleft(), selector)
        now_s = time.monotonic()
        for client in [it for it in self._clients.values() if it.until_s <= now_s]:
            if client.unsent or not client.has_asked:
                self._drop(client, selector)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client has gone
        except OSError:
            time.sleep(BUSY_S)  # no descriptor is left; the client still waits
            return
        connection.settimeout(0)
        user = peer_of(connection)[1]
        idle = next((it for it in self._clients.values() if not it.has_asked), None)
        if user not in {0, os.geteuid()}:
            logger.warning("a process of user %d was refused at the control socket %s", user, self.path)
            connection.close()
            return
        if len(self._clients) >= CONNECTIONS_MAX:
            if idle is None:
                connection.close()
                return
            self._drop(idle, selector)
        self._clients[connection] = _Client(connection, time.monotonic() + EXCHANGE_S)
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, client: _Client, selector: selectors.BaseSelector) -> None:
        data = b""
        with suppress(OSError):
            data = client.connection.recv(1 << 16)
        client.received += data
        if not data:
            self._drop(client, selector)
        elif len(client.received) > REQUEST_BYTES_MAX:
            self._ask(client, selector, f"a request is longer than {REQUEST_BYTES_MAX} bytes")
        elif b"\n" in data:
            self._ask(client, selector)

    def _ask(self, client: _Client, selector: selectors.BaseSelector, problem: str = "") -> None:
        """The request is complete, or too long. Make its call, or have it made; nothing is read meanwhile."""
        client.has_asked = True
        selector.unregister(client.connection)
        try:
            if problem:
                raise ControlError(problem)
            request = _read(bytes(client.received))
        except KvError as error:
            self._give(client, _line({"error": str(error)}), selector)
            return
        client.received.clear()
        if request["command"] == HEALTH:
            self._give(client, self._made(request), selector)
        else:
            self._calls.put_nowait((client, request))

    def _give(self, client: _Client, line: bytes, selector: selectors.BaseSelector) -> None:
        client.unsent, client.until_s = memoryview(line), time.monotonic() + EXCHANGE_S
        selector.register(client.connection, selectors.EVENT_WRITE)

    def _send(self, client: _Client, selector: selectors.BaseSelector) -> None:
        try:
            client.unsent = client.unsent[client.connection.send(client.unsent) :]
        except OSError:  # the client has gone
            client.unsent = memoryview(b"")
        if not client.unsent:
            self._drop(client, selector)

    def _drop(self, client: _Client, selector: selectors.BaseSelector) -> None:
        del self._clients[client.connection]
        selector.unregister(client.connection)
        client.connection.close()


def ask(path: Path, command: str, arguments: Mapping[str, Any], deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """Make a call of the engine that listens at `path`; its result.

    Raises:
        ControlError: nothing listens there, the answer did not come in time, or it is an error.
    """
    until_s = time.monotonic() + deadline_s
    line = _line({"command": command, "deadline_s": deadline_s, "arguments": arguments})
    if len(line) > REQUEST_BYTES_MAX:
        raise ControlError(f"the request has {len(line)} bytes; allowed: {REQUEST_BYTES_MAX}. Send fewer tokens")
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            _connect(connection, path, until_s)
            connection.sendall(line)
            while not received.endswith(b"\n") and len(received) <= ANSWER_BYTES_MAX:
                connection.settimeout(max(0.001, until_s - time.monotonic()))
                if not (data := connection.recv(1 << 16)):
                    break
                received += data
    except TimeoutError:
        raise ControlError(f"the engine at {path} has not answered within {deadline_s:g} s") from None
    except OSError as error:
        raise ControlError(f"no engine listens at {path} ({SETTING}): {error.strerror or error}") from None
    answer = _object(bytes(received), f"the answer of {path}")
    if "error" in answer or "result" not in answer:
        raise ControlError(str(answer.get("error", f"the answer of {path} has no result")))
    return answer["result"]


def _connect(connection: socket.socket, path: Path, until_s: float) -> None:
    """Connect, again while the server's queue is full. Raises `OSError`."""
    while True:
        try:
            connection.connect(os.fsencode(path))
        except BlockingIOError:
            if time.monotonic() >= until_s:
                raise TimeoutError from None
            time.sleep(BUSY_S)
        else:
            return


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode() + b"\n"


def _object(line: bytes, origin: str) -> dict[str, Any]:
    """A line as an object of this version.

    Raises:
        ControlError: it is none.
    """
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ControlError(f"{origin} is not a JSON object in one line")
    fields = cast("dict[str, Any]", found)
    if fields.get("version") != VERSION:
        raise ControlError(f"{origin} has version {fields.get('version')!r}; allowed: {VERSION}")
    return fields


def _read(line: bytes) -> dict[str, Any]:
    """A request: `command`, `arguments` and `until_s`, the end of its time.

    Raises:
        ControlError: it is not in the form above.
    """
    fields = _object(line, "the request")
    if unknown := sorted(fields.keys() - {"version", "command", "deadline_s", "arguments"}):
        raise ControlError(f"the request has {unknown}; allowed: version, command, deadline_s, arguments")
    command, arguments = fields.get("command"), fields.get("arguments", {})
    if not isinstance(command, str) or not isinstance(arguments, dict):
        raise ControlError("command must be a text and arguments an object")
    deadline_s: Any = fields.get("deadline_s", DEADLINE_S)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s <= DEADLINE_S_MAX:
        raise ControlError(f"deadline_s = {str(deadline_s)[:40]}; allowed: above 0, up to {DEADLINE_S_MAX:g}")
    return {"command": command, "arguments": arguments, "until_s": time.monotonic() + deadline_s}


# ---- the file --------------------------------------------------------------------------------------------------------


def _listen(path: Path) -> tuple[socket.socket, tuple[int, int]]:
    """A listening socket at `path`, and device and inode of its file.

    A file that a dead process has left is replaced, under a lock on the directory, so that two starts cannot both.

    Raises:
        ConfigError: see `ControlSocket`.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(f"{SETTING} = {str(path)!r} has more than {PATH_BYTES_MAX} bytes, Linux's limit for a socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_root(path.parent)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _check_directory(path, os.fstat(directory))
            _lock(directory)
            _remove_stale(path)
            os.fchmod(listener.fileno(), 0o600)  # Linux creates the file with the mode of the socket
            listener.bind(os.fsencode(path))
            listener.listen(CONNECTIONS_MAX)  # before the lock ends: until then it looks like one of a dead process
        finally:
            os.close(directory)
        listener.settimeout(0)
        status = path.lstat()
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise ConfigError(f"{SETTING} = {str(path)!r} cannot be used: {error.strerror or error}") from error
        raise
    return listener, (status.st_dev, status.st_ino)


def _lock(directory: int) -> None:
    """Lock out other starts. A process that keeps the lock does not prevent this start."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(BUSY_S)
        else:
            return


def _check_directory(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {0, os.geteuid()} or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{SETTING} = {str(path)!r}: its directory has mode {mode:o} and belongs to user {status.st_uid}; allowed: "
            "one of this user or root in which no other can write"
        )


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"{SETTING} = {str(path)!r} is not a socket; allowed: a path without a file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a process whose queue is full listens, too
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"{SETTING} = {str(path)!r}: another engine listens there; allowed: a path for each engine, with {PID} in it"
    )
