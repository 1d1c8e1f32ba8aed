"""A Unix-domain socket on which an engine answers queries about its cache: one JSON line each way.

    kvtier cache, scripts          {"version": 1, "command": "find", "deadline_s": 10, "arguments": {...}}
    ControlSocket                  {"version": 1, "result": {...}}   or   {"version": 1, "error": "..."}

`local_server` gives each connection a thread, which takes the call lock to make a call. So only one call runs at a
time, and a waiting call keeps its deadline. `health` has its own lock, so it never waits for a call of another kind.
Calls take the session's lock like any other caller. The file has mode 0600 and lies in a directory to which other users
cannot write.
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
from kvtier.runtime.local_server import BUSY_S, CONNECTIONS_MAX, LocalServer, peer_of
from kvtier.tier.files.safe_open import folder_at, make_root
from kvtier.tier.files.store_lock import lock_file

logger = logging.getLogger(__name__)

VERSION: Final = 1
SETTING: Final = "control.socket"
PID: Final = "{pid}"
"""Stands for the engine's process number in a path."""
CALLS_MAX: Final = CONNECTIONS_MAX // 2
"""Maximum number of calls waiting or in progress. Further calls are refused, to leave connections for `health`."""
REQUEST_BYTES_MAX: Final = 1 << 20
"""Maximum size of a request, enough for a prompt of about 150,000 tokens. Parsing it holds Python's lock for 15 ms."""
ANSWER_BYTES_MAX: Final = 1 << 24
EXCHANGE_S: Final = 5.0
"""How long a client may take to send its request, and again to receive the answer."""
DEADLINE_S: Final = 10.0
DEADLINE_S_MAX: Final = 60.0
PATH_BYTES_MAX: Final = 107
"""Linux's limit for socket paths (`sun_path`)."""
CLOSE_S: Final = 1.0
START_S: Final = 2.0
"""How long one engine's start waits for another's in the same directory."""
ERROR_CHARACTERS_MAX: Final = 2000
"""An engine's error message is truncated to this length."""
NUMBER_MAX: Final = 1 << 53
HEALTH: Final = "health"
OTHER_FORM: Final = (
    "the answer of {} does not have the form of this release; use the kvtier of the engine's environment"
)
ENDED: Final = (
    "the engine at {} ended the connection without an answer, because it is closing or has too many connections"
)

_INT, _TEXT, _BOOL, _SECONDS = (int,), (str,), (bool,), (int, float)
CUT_PARTS: Final = ("before", "earlier", "this")
"""Names of the tokens around a cut, which is where a prompt diverges from an earlier one: the tokens before it, after
it in the earlier prompt, and after it in this prompt."""
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
        "cuts": [
            {
                "request": _TEXT,
                "at_token": _INT,
                "is_exact": _BOOL,
                "lost_tokens": _INT,
                "repeated_tokens": (*_INT, type(None)),
                **{name: {"ids": [_INT], "text": (*_TEXT, type(None))} for name in CUT_PARTS},
            }
        ],
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
"""The form of each call's result: the types of a value, lists, and objects with given or arbitrary names."""

Answer = Callable[[str, dict[str, Any], float], dict[str, Any]]
"""(command, arguments, deadline) -> result. Raises `KvError` for an invalid request."""


class ControlError(KvError):
    """A call failed: no engine listens, it did not answer in time, or it refused the request."""


class ControlSocket:
    """The socket on which an engine answers, and its threads.

    Args:
        path: path of the socket; ``{pid}`` stands for this process's number. The directory is created if missing.
        answer: makes a call in a thread of this server; `health` may run during another call.

    Raises:
        ConfigError: the path is too long for a socket.
        UnusablePathError: the path cannot be used, or another process listens there.
        RuntimeError: the system cannot start a thread.
    """

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = Path(str(path).replace(PID, str(os.getpid())))
        self._answer = answer
        listener, self._status = _listen(self.path)
        self._process = os.getpid()
        self._calls = threading.Lock(), threading.Semaphore(CALLS_MAX)
        self._probes = threading.Lock(), threading.Semaphore(CONNECTIONS_MAX)
        self._is_closing = False
        self._server = LocalServer(f"the control socket {self.path}", listener, self._serve)
        self._server.start()
        logger.info("%s: kvtier answers on %s", SETTING, self.path)

    def close(self) -> None:
        """Remove the file and close all connections. A call in progress gets no answer. Idempotent."""
        if self._is_closing or self._process != os.getpid():
            return
        self._is_closing = True
        with suppress(OSError):
            if os.path.samestat(self.path.lstat(), self._status):
                self.path.unlink()
        self._server.stop(is_whole=True)
        self._server.join(CLOSE_S)  # the call under way may use the session, which closes next

    # ---- the thread of a connection --------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        """Read one request and answer it."""
        with suppress(OSError):  # the client has gone, or takes too long
            received = _received(connection, REQUEST_BYTES_MAX, time.monotonic() + EXCHANGE_S)
            if received and self._server.keep(connection):
                line = self._made(received)
                connection.settimeout(EXCHANGE_S)
                connection.sendall(line)

    def _made(self, received: bytes) -> bytes:
        """Return the line that answers a request."""
        try:
            line = _line({"result": self._called(*_read(received))})
        except KvError as error:
            return _line({"error": str(error)})
        except Exception as error:
            logger.exception("internal error: a control call has failed")
            return _line({"error": f"internal error: {type(error).__name__}; the engine's log has more"})
        if len(line) > ANSWER_BYTES_MAX:
            return _line({"error": f"the answer has {len(line)} bytes; allowed: at most {ANSWER_BYTES_MAX}"})
        return line

    def _called(self, command: str, arguments: dict[str, Any], until_s: float) -> dict[str, Any]:
        """Make a call when its turn comes, and return the result.

        Raises:
            KvError: the call is invalid, its turn does not come in time, or too many others wait.
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
    """Send a call to the engine that listens at `path`, and return its result.

    Args:
        path: path of the socket. Nothing is sent to another user's engine.
        command: name of the call.
        arguments: arguments of the call.
        deadline_s: how many seconds the answer may take.
        form: one of `FORMS`. The result has exactly this form, and its strings are safe to print. None allows any.

    Raises:
        ControlError: no engine of this user or root listens there, or the answer is late, an error or malformed.
    """
    until_s = time.monotonic() + deadline_s
    line = _line({"command": command, "deadline_s": deadline_s, "arguments": arguments})
    if len(line) > REQUEST_BYTES_MAX:
        raise ControlError(
            f"the request has {len(line)} bytes; allowed: at most {REQUEST_BYTES_MAX}. Send fewer tokens"
        )
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(deadline_s)
            _connect(connection, path, until_s)
            _check_peer(connection, path)
            connection.settimeout(_left_s(until_s))
            connection.sendall(line)
            received = _received(connection, ANSWER_BYTES_MAX, until_s)
    except TimeoutError:
        raise ControlError(f"the engine at {path} did not answer within {deadline_s:g} s") from None
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
    """Return `found` reduced to the names in `form`, with strings that are safe to print.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: `found` does not have this form.
    """
    if hasattr(form, "keys"):
        named = dict.fromkeys(found.keys(), form[str]) if str in form else form
        return {printable(name): _formed(found[name], it) for name, it in named.items()}
    if {type(form), type(found)} == {list}:
        return [_formed(it, form[0]) for it in found]
    if type(found) not in form or (isinstance(found, int | float) and not abs(found) < NUMBER_MAX):
        raise ValueError
    return printable(found) if isinstance(found, str) else found


def printable(text: str) -> str:
    """Return `text` with lone surrogates and control characters escaped; these could control a terminal."""
    return "".join(it if it.isprintable() else repr(it)[1:-1] for it in text)


def _connect(connection: socket.socket, path: Path, until_s: float) -> None:
    """Connect; retry while the server's queue is full. Raises `OSError`."""
    while _left_s(until_s):
        try:
            return connection.connect(os.fsencode(path))
        except BlockingIOError:
            time.sleep(BUSY_S)
    return None


def _check_peer(connection: socket.socket, path: Path) -> None:
    """Check that an engine of this user or root listens. No one else may see a prompt or its salt.

    Raises:
        ControlError: another user listens, or can replace the socket.
        OSError: the socket is gone.
    """
    status, user = path.stat(), peer_of(connection)[1]
    if not {status.st_uid, user} <= {0, os.geteuid()} or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ControlError(
            f"nothing was sent to {path}: user {user} listens there, and the socket belongs to user {status.st_uid}, "
            f"with mode {stat.S_IMODE(status.st_mode):o}; allowed: a socket of this user or root that no other user "
            f"can write to; if that is your engine, run this as user {user}"
        )


def _received(connection: socket.socket, bytes_max: int, until_s: float) -> bytes:
    """Return a line, or more than `bytes_max` bytes of a longer one; empty if the connection ends first.

    Raises `OSError`.
    """
    received, data = bytearray(), b""
    while b"\n" not in data and len(received) <= bytes_max:
        connection.settimeout(_left_s(until_s))
        data = connection.recv(1 << 16)
        if not data:
            return b""
        received += data
    return bytes(received)


def _left_s(until_s: float) -> float:
    """Return the seconds left until `until_s`. Raises `TimeoutError` if none are."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode() + b"\n"


def _object(line: bytes, origin: str) -> dict[str, Any]:
    """Parse a line as a JSON object of this version.

    Raises:
        ControlError: the line is not such an object.
    """
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ControlError(f"{origin} is not a JSON object on one line")
    fields = cast("dict[str, Any]", found)
    if fields.get("version") != VERSION:
        version: Any = fields.get("version")
        shown = str(version)[:40] if type(version) is int else type(version).__name__
        raise ControlError(f"{origin} has version {shown}; allowed: {VERSION}")
    return fields


def _read(line: bytes) -> tuple[str, dict[str, Any], float]:
    """Parse a request into its command, its arguments and its deadline.

    Raises:
        ControlError: the request is too long or malformed.
    """
    if len(line) > REQUEST_BYTES_MAX:
        raise ControlError(f"the request has more than {REQUEST_BYTES_MAX} bytes")
    fields = _object(line, "the request")
    if unknown := sorted(fields.keys() - {"version", "command", "deadline_s", "arguments"}):
        raise ControlError(
            f"the request has the unknown fields {unknown}; allowed: version, command, deadline_s, arguments"
        )
    command, arguments = fields.get("command"), fields.get("arguments", {})
    if not isinstance(command, str) or not isinstance(arguments, dict):
        raise ControlError("command must be a string, and arguments must be an object")
    deadline_s: Any = fields.get("deadline_s", DEADLINE_S)
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float) or not 0 < deadline_s <= DEADLINE_S_MAX:
        raise ControlError(f"deadline_s = {str(deadline_s)[:40]}; allowed: above 0, up to {DEADLINE_S_MAX:g}")
    return command, cast("dict[str, Any]", arguments), time.monotonic() + deadline_s


# ---- the file --------------------------------------------------------------------------------------------------------


def _listen(path: Path) -> tuple[socket.socket, os.stat_result]:
    """Return a listening socket at `path`, and the status of its file.

    A socket file that a dead process left is replaced. A lock on the directory keeps two starts from doing so together.

    Raises:
        ConfigError: the path is too long for a socket.
        UnusablePathError: the path cannot be used, or another process listens there.
    """
    about = {"setting": SETTING, "value": repr(str(path))}
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(f"has more than {PATH_BYTES_MAX} bytes, Linux's limit for a socket", **about)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        make_root(path.parent)
        with folder_at(path.parent) as directory:
            _check_directory(path, os.fstat(directory))
            lock_file(directory, fcntl.LOCK_EX, START_S)  # a process that keeps the lock does not prevent this start
            _remove_stale(path, about)
            os.fchmod(listener.fileno(), 0o600)  # Linux creates the file with the mode of the socket
            listener.bind(os.fsencode(path))
            listener.listen(CONNECTIONS_MAX)  # before the lock ends: a socket that does not listen looks stale
        return listener, path.lstat()
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError):
            raise UnusablePathError(f"cannot be used: {error.strerror or error}", **about) from error
        raise


def _check_directory(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {0, os.geteuid()} or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnusablePathError(
            f"its directory has mode {mode:o} and belongs to user {status.st_uid}",
            setting=SETTING,
            value=repr(str(path)),
            allowed="a directory of this user or root that no other user can write to",
        )


def _remove_stale(path: Path, about: dict[str, str]) -> None:
    """Remove the socket of a process that has ended; `about` contains fields for the error."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise UnusablePathError("is not a socket", **about, allowed="a path where no file exists")
    if not is_listened(path):
        path.unlink()
        return
    raise UnusablePathError(
        "another engine listens there",
        **about,
        allowed=f"a separate path for each engine, such as one with {PID} in it",
    )


def is_listened(path: Path) -> bool:
    """Return whether a process listens at the socket `path`; False after it has ended. Raises `OSError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # a process whose queue is full also listens
        try:
            probe.connect(os.fsencode(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            pass
    return True
