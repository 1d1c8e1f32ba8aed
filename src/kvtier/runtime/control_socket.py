"""A Unix-domain socket on which an engine answers questions about its cache: one line of JSON each way, then the end.

    kvtier cache, scripts          {"version": 1, "command": "find", "deadline_s": 10, "arguments": {...}}
    ControlSocket                  {"version": 1, "result": {...}}   or   {"version": 1, "error": "..."}

One thread accepts. Each connection has a thread of its own, which takes the call lock to make a call. So calls are made
one at a time, and a call that waits keeps its deadline. `health` has a lock of its own: a probe never waits for another
call. Calls take the session's lock like any other caller. The file has mode 0600, in a directory in which other users
cannot write. Processes of other users but root are refused.
"""

import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from kvtier.errors import ConfigError, KvError, UnusablePathError
from kvtier.runtime.remote_rank import peer_of
from kvtier.tier.safe_open import close_in_children, folder_at, make_root
from kvtier.tier.store_lock import lock_file

logger = logging.getLogger(__name__)

VERSION: Final = 1
SETTING: Final = "control.socket"
PID: Final = "{pid}"
"""In a path: the number of the engine's process."""
CONNECTIONS_MAX: Final = 16
"""A further connection ends the oldest that has sent no request yet, or is refused."""
CALLS_MAX: Final = CONNECTIONS_MAX // 2
"""Calls that wait or are made; a further one is refused, so that connections are left for probes."""
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
"""The thread that accepts checks for the end at this interval."""
START_S: Final = 2.0
"""How long a start waits for another one at the same directory."""
BUSY_S: Final = 0.02
"""Pause before what failed is tried again: no descriptor or place in a queue was left."""
ERROR_CHARACTERS_MAX: Final = 2000
"""An error of an engine is cut to this length."""
NUMBER_MAX: Final = 1 << 53
HEALTH: Final = "health"
OTHER_FORM: Final = "the answer of {} has another form than that of this release; use the kvtier of its environment"
ENDED: Final = "the engine at {} ended the connection without an answer: it is closing, or has too many connections"

_INT, _TEXT, _BOOL, _SECONDS = (int,), (str,), (bool,), (int, float)
_FETCHED: Final = {"tokens": _INT, "stored_tokens": _INT, "host_tokens": _INT}
FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "find": {
        "tokens": _INT,
        "chunk_tokens": _INT,
        "hit_tokens": _INT,
        "end": _TEXT,
        "silent": {str: _TEXT},
        "ranges": [{"from": _INT, "to": _INT, "places": {str: _TEXT}}],
    },
    "why": {
        "request": _TEXT,
        "engine_request": _TEXT,
        "ended_ago_s": (*_SECONDS, type(None)),
        "prompt_tokens": _INT,
        "resident_tokens": _INT,
        "found_tokens": {str: _INT},
        "loaded_tokens": {str: _INT},
        "computed_tokens": _INT,
        "reasons": [{"code": _TEXT, "text": _TEXT}],
        "missing_chunk_now": [_TEXT, type(None)],
    },
    "prefetch": _FETCHED,
    "pin": {**_FETCHED, "pinned_tokens": _INT, "seconds": _SECONDS},
    "unpin": {"tokens": _INT, "unpinned_tokens": _INT},
    "clear": {"freed_objects": _INT, "kept_objects": _INT, "notes": [_TEXT]},
    HEALTH: {
        "live": _BOOL,
        "ready": _BOOL,
        "problem": _TEXT,
        "up_s": _SECONDS,
        "tiers": {str: {"reads": _BOOL, "writes": _BOOL, "detail": _TEXT}},
    },
}
"""The form of each call's result: types that a value may have, lists, and objects with known or with any names."""

Answer = Callable[[str, dict[str, Any], float], dict[str, Any]]
"""(command, arguments, end of its time) -> result. Raises `KvError` for a request that is wrong."""


class ControlError(KvError):
    """A call failed: no engine listens, it did not answer in time, or it refused the request."""


class ControlSocket:
    """The socket and its threads.

    Args:
        path: of the socket; ``{pid}`` in it stands for this process. Its directory is created if missing.
        answer: makes a call, in a thread of this server; `health` also while another call is under way.

    Raises:
        ConfigError: the path is too long for every socket.
        UnusablePathError: it cannot be used, or another process listens there.
        RuntimeError: the system cannot start a thread.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = Path(str(path).replace(PID, str(os.getpid())))
        self._answer = answer
        self._listener, self._status = _listen(self.path)
        self._process = os.getpid()
        self._clients: dict[socket.socket, bool] = {}
        """Open connections, oldest first, and whether each has sent its request."""
        self._clients_lock = threading.Lock()
        self._calls = threading.Lock(), threading.Semaphore(CALLS_MAX)
        self._probes = threading.Lock(), threading.Semaphore(CONNECTIONS_MAX)
        self._is_closing = False
        self._thread = threading.Thread(target=self._accept, name="kvtier control", daemon=True)
        self._thread.start()
        logger.info("%s: kvtier answers on %s", SETTING, self.path)

    def close(self) -> None:
        """Remove the file and end all connections. A call that is under way gets no answer. Idempotent."""
        if self._is_closing or self._process != os.getpid():
            return
        self._is_closing = True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as waker:
            if os.path.samestat(self.path.lstat(), self._status):
                waker.settimeout(0)
                waker.connect_ex(os.fsencode(self.path))  # wakes the thread that accepts
                self.path.unlink()
        self._thread.join(CLOSE_S)
        with self._clients_lock:
            for connection in self._clients:
                _end(connection)
        lock, _ = self._calls
        if lock.acquire(timeout=CLOSE_S):  # the call under way has ended
            lock.release()

    # ---- the thread that accepts -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closing:
                try:
                    connection, _ = self._listener.accept()
                    close_in_children(connection)
                except OSError:  # no client came, this socket is closed, or no descriptor is left and the client waits
                    time.sleep(BUSY_S)
                    continue
                try:
                    if self._admits(connection):
                        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                    else:
                        connection.close()
                except RuntimeError:  # the system gives no more threads
                    self._forget(connection)

    def _admits(self, connection: socket.socket) -> bool:
        user = peer_of(connection)[1]
        if user not in {0, os.geteuid()}:
            logger.warning("a process of user %d was refused at the control socket %s", user, self.path)
            return False
        with self._clients_lock:
            if len(self._clients) >= CONNECTIONS_MAX:
                silent = next((it for it, has_asked in self._clients.items() if not has_asked), None)
                if silent is None:
                    return False
                del self._clients[silent]
                _end(silent)
            self._clients[connection] = False
        return True

    def _forget(self, connection: socket.socket) -> None:
        with self._clients_lock:
            self._clients.pop(connection, None)
        connection.close()

    # ---- the thread of a connection --------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        """Take one request, and answer it."""
        try:
            with suppress(OSError):  # the client has gone, or takes too long
                received = _received(connection, REQUEST_BYTES_MAX, time.monotonic() + EXCHANGE_S)
                with self._clients_lock:
                    if not received or connection not in self._clients:
                        return
                    self._clients[connection] = True
                line = self._made(received)
                connection.settimeout(EXCHANGE_S)
                connection.sendall(line)
        finally:
            self._forget(connection)

    def _made(self, received: bytes) -> bytes:
        """The line that answers a request."""
        try:
            line = _line({"result": self._called(*_read(received))})
        except KvError as error:
            return _line({"error": str(error)})
        except Exception as error:
            logger.exception("internal error: a control call has failed")
            return _line({"error": f"internal error: {type(error).__name__}; the engine's log has more"})
        if len(line) > ANSWER_BYTES_MAX:
            return _line({"error": f"the answer has {len(line)} bytes; allowed: {ANSWER_BYTES_MAX}"})
        return line

    def _called(self, command: str, arguments: dict[str, Any], until_s: float) -> dict[str, Any]:
        """The result of a call, made in its turn.

        Raises:
            KvError: it is wrong, its turn has not come in time, or too many others wait.
        """
        lock, places = self._probes if command == HEALTH else self._calls
        if not places.acquire(blocking=False):
            raise ControlError(f"the engine is busy with {CALLS_MAX} other calls; ask again later")
        try:
            if not lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
                raise ControlError("the engine was busy with other calls until the deadline")
            try:
                if self._is_closing:
                    raise ControlError("the engine is closing")
                return self._answer(command, arguments, until_s)
            finally:
                lock.release()
        finally:
            places.release()


def ask(
    path: Path, command: str, arguments: Mapping[str, Any], deadline_s: float = DEADLINE_S, form: object = None
) -> dict[str, Any]:
    """Make a call of the engine that listens at `path`; its result.

    Args:
        path: of the socket. Nothing is sent to an engine of another user.
        command: of the call.
        arguments: of the call.
        deadline_s: seconds until the answer.
        form: one of `FORMS`. The result has it and nothing else, and its texts are safe to print. None: any form.

    Raises:
        ControlError: no engine of this user or root listens there, or the answer is late, of another form or an error.
    """
    until_s = time.monotonic() + deadline_s
    line = _line({"command": command, "deadline_s": deadline_s, "arguments": arguments})
    if len(line) > REQUEST_BYTES_MAX:
        raise ControlError(f"the request has {len(line)} bytes; allowed: {REQUEST_BYTES_MAX}. Send fewer tokens")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            _connect(connection, path, until_s)
            _check_peer(connection, path)
            connection.settimeout(_left_s(until_s))
            connection.sendall(line)
            received = _received(connection, ANSWER_BYTES_MAX, until_s)
    except TimeoutError:
        raise ControlError(f"the engine at {path} has not answered within {deadline_s:g} s") from None
    except (BrokenPipeError, ConnectionResetError):
        raise ControlError(ENDED.format(path)) from None
    except OSError as error:
        raise ControlError(f"no engine listens at {path} ({SETTING}): {error.strerror or error}") from None
    if not received:
        raise ControlError(ENDED.format(path))
    answer = _object(received, f"the answer of {path}")
    if "error" not in answer and not isinstance(answer.get("result"), dict):
        raise ControlError(f"the answer of {path} has no result")
    try:
        if "error" in answer:
            raise ControlError(_formed(answer["error"], _TEXT)[:ERROR_CHARACTERS_MAX])
        result = _formed(answer["result"], form or (dict,))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ControlError(OTHER_FORM.format(path)) from None
    return result


def _formed(found: Any, form: Any) -> Any:  # noqa: ANN401 - JSON
    """`found`, if it has the form `form`: with known names only, and with texts that a terminal can show.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it has another form.
    """
    if hasattr(form, "keys"):
        named = dict.fromkeys(found.keys(), form[str]) if str in form else form
        return {_printable(name): _formed(found[name], it) for name, it in named.items()}
    if {type(form), type(found)} == {list}:
        return [_formed(it, form[0]) for it in found]
    if type(found) not in form or (isinstance(found, int | float) and not abs(found) < NUMBER_MAX):
        raise ValueError
    return _printable(found) if isinstance(found, str) else found


def _printable(text: str) -> str:
    """`text` with escapes for control characters, which would steer a terminal, and for halves of surrogate pairs."""
    return "".join(it if it.isprintable() else repr(it)[1:-1] for it in text)


def _connect(connection: socket.socket, path: Path, until_s: float) -> None:
    """Connect, again while the server's queue is full. Raises `OSError`."""
    while _left_s(until_s):
        try:
            return connection.connect(os.fsencode(path))
        except BlockingIOError:
            time.sleep(BUSY_S)
    return None


def _check_peer(connection: socket.socket, path: Path) -> None:
    """Check that an engine of this user or root listens: a prompt and its salt are for no other.

    Raises:
        ControlError: another user listens, or can replace the socket.
        OSError: the socket is gone.
    """
    status, user = path.stat(), peer_of(connection)[1]
    if not {status.st_uid, user} <= {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ControlError(
            f"nothing was sent to {path}: user {user} listens there, and the socket belongs to user {status.st_uid}, "
            f"with mode {stat.S_IMODE(status.st_mode):o}; allowed: this user or root, and no other that can write to it"
            f"; if that is your engine, run this as user {user}"
        )


def _received(connection: socket.socket, bytes_max: int, until_s: float) -> bytes:
    """A line, or more than `bytes_max` bytes of it; empty if the connection ends before. Raises `OSError`."""
    received, data = bytearray(), b""
    while b"\n" not in data and len(received) <= bytes_max:
        connection.settimeout(_left_s(until_s))
        data = connection.recv(1 << 16)
        if not data:
            return b""
        received += data
    return bytes(received)


def _left_s(until_s: float) -> float:
    """Seconds until then. Raises `TimeoutError`."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _end(connection: socket.socket) -> None:
    """Wake the thread that waits for this socket: it gets the end of the stream, or an error."""
    with suppress(OSError):  # it is closed
        connection.shutdown(socket.SHUT_RDWR)


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
        version: Any = fields.get("version")
        shown = str(version)[:40] if type(version) is int else type(version).__name__
        raise ControlError(f"{origin} has version {shown}; allowed: {VERSION}")
    return fields


def _read(line: bytes) -> tuple[str, dict[str, Any], float]:
    """A request: its command, its arguments, and the end of its time.

    Raises:
        ControlError: it is too long, or not in the form above.
    """
    if len(line) > REQUEST_BYTES_MAX:
        raise ControlError(f"a request is longer than {REQUEST_BYTES_MAX} bytes")
    fields = _object(line, "the request")
    if unknown := sorted(fields.keys() - {"version", "command", "deadline_s", "arguments"}):
        raise ControlError(f"the request has {unknown}; allowed: version, command, deadline_s, arguments")
    command, arguments = fields.get("command"), fields.get("arguments", {})
    if not isinstance(command, str) or not isinstance(arguments, dict):
        raise ControlError("command must be a text and arguments an object")
    deadline_s: Any = fields.get("deadline_s", DEADLINE_S)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s <= DEADLINE_S_MAX:
        raise ControlError(f"deadline_s = {str(deadline_s)[:40]}; allowed: above 0, up to {DEADLINE_S_MAX:g}")
    return command, cast("dict[str, Any]", arguments), time.monotonic() + deadline_s


# ---- the file --------------------------------------------------------------------------------------------------------


def _listen(path: Path) -> tuple[socket.socket, os.stat_result]:
    """A listening socket at `path`, and the status of its file.

    A file that a dead process has left is replaced, under a lock on the directory, so that two starts cannot both.

    Raises:
        ConfigError: see `ControlSocket`.
    """
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(f"{SETTING} = {str(path)!r} has more than {PATH_BYTES_MAX} bytes, Linux's limit for a socket")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(listener)  # otherwise it would listen as long as a child lives
    try:
        make_root(path.parent)
        with folder_at(path.parent) as directory:
            _check_directory(path, os.fstat(directory))
            lock_file(directory, fcntl.LOCK_EX, START_S)  # a process that keeps the lock does not prevent this start
            _remove_stale(path)
            os.fchmod(listener.fileno(), 0o600)  # Linux creates the file with the mode of the socket
            listener.bind(os.fsencode(path))
            listener.listen(CONNECTIONS_MAX)  # before the lock ends: until then it looks like one of a dead process
        listener.settimeout(IDLE_S)
        return listener, path.lstat()
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise UnusablePathError(f"{SETTING} = {str(path)!r} cannot be used: {error.strerror or error}") from error
        raise


def _check_directory(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {0, os.geteuid()} or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusablePathError(
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
        raise UnusablePathError(f"{SETTING} = {str(path)!r} is not a socket; allowed: a path without a file")
    if not is_listened(path):
        path.unlink()
        return
    raise UnusablePathError(
        f"{SETTING} = {str(path)!r}: another engine listens there; allowed: a path for each engine, with {PID} in it"
    )


def is_listened(path: Path) -> bool:
    """Whether a process listens at a socket; False after its death. Raises `OSError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a process whose queue is full listens, too
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            pass
    return True
