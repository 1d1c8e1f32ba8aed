"""The control socket answers whatever comes, bounded in time and number, and only to this user and root."""

import errno
import json
import os
import signal
import socket
import stat
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.refusals import refuses
from tests.system import until

from kvtier.errors import ConfigError
from kvtier.runtime import control_socket as module
from kvtier.runtime import local_server
from kvtier.runtime.control_socket import ControlError, ControlSocket, ask

IS_ROOT = os.geteuid() == 0


class Calls:
    """What the server was asked, and which calls have ended; `hang` waits for `go`."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict]] = []
        self.ended: list[str] = []
        self.go = threading.Event()

    def answer(self, command: str, arguments: dict, _until_s: float) -> dict:
        self.made.append((command, arguments))
        if command == "hang":
            self.go.wait(30.0)
        self.ended.append(command)
        if command == "wrong":
            raise ControlError("wrong is not allowed")
        if command == "bug":
            raise RuntimeError("token 4711")
        return {"large": "x" * int(arguments.get("size", 0)), "command": command}


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder / "s"


@pytest.fixture
def served(path, calls):
    server = ControlSocket(path, calls.answer)
    yield server
    calls.go.set()
    server.close()


def raw(path: Path, data: bytes, *, is_half: bool = False) -> bytes:
    """Everything that comes back for `data`."""
    with connected(path) as connection:
        connection.sendall(data)
        if is_half:
            connection.shutdown(socket.SHUT_WR)
        return received(connection)


def connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20.0)
    module._connect(connection, path, time.monotonic() + 20.0)
    return connection


def received(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


def error_of(line: bytes) -> str:
    return json.loads(line)["error"]


def line(**fields) -> bytes:
    return json.dumps({"version": 1, "command": "find", **fields}).encode() + b"\n"


def test_a_call_is_answered_and_its_file_goes_with_the_server(path, calls):
    server = ControlSocket(path, calls.answer)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert ask(path, "find", {"tokens": [1]}) == {"large": "", "command": "find"}
    assert ask(path, "find", {"size": 8 << 20})["large"] == "x" * (8 << 20)
    assert calls.made[0] == ("find", {"tokens": [1]})
    with pytest.raises(ControlError, match=r"the answer has 16777\d+ bytes; allowed: at most 16777216"):
        ask(path, "find", {"size": module.ANSWER_BYTES_MAX})
    server.close()
    server.close()
    assert server._server.join(0.0), "no thread is left"
    assert not path.exists()
    with pytest.raises(ControlError, match=f"no engine listens at {path} .control.socket.: No such file"):
        ask(path, "find", {})


@pytest.mark.parametrize(
    ("request_line", "error"),
    [
        (b"\n", "is not a JSON object on one line"),
        (b"GET / HTTP/1.1\r\n\r\n", "is not a JSON object"),
        (b"[1]\n", "is not a JSON object"),
        (b"\xff\xfe\n", "is not a JSON object"),
        (b"[" * 100_000 + b"\n", "is not a JSON object"),
        (b"\x80\x04\x95\n", "is not a JSON object"),
        (b'{"version": 2}\n', "has version 2; allowed: 1"),
        (b'{"version": 1}\n', "command must be a string"),
        (line(arguments=[]), "arguments must be an object"),
        (line(more=1), "has the unknown fields ['more']; allowed: version, command"),
        (line(deadline_s=0), "deadline_s = 0; allowed: above 0, up to 60"),
        (line(deadline_s=1e9), "deadline_s = 1000000000.0"),
        (line(deadline_s="1"), "deadline_s = 1"),
        (line(deadline_s=True), "deadline_s = True"),
        (b'{"version": 1, "command": "find", "deadline_s": NaN}\n', "deadline_s = nan"),
        (line(command="wrong"), "wrong is not allowed"),
        (b"x" * (module.REQUEST_BYTES_MAX + 1), "more than 1048576 bytes"),
    ],
)
def test_bad_requests_get_a_clear_error(served, calls, request_line, error):
    assert error in error_of(raw(served.path, request_line))
    assert ask(served.path, "find", {})["command"] == "find"


def test_an_internal_error_is_logged_and_its_text_stays_here(served, caplog):
    assert error_of(raw(served.path, line(command="bug"))) == "internal error: RuntimeError; the engine's log has more"
    assert "token 4711" in caplog.text


def test_half_a_line_makes_no_call_and_a_half_closed_connection_gets_its_answer(served, calls):
    assert raw(served.path, line()[:-1], is_half=True) == b""
    assert calls.made == []
    assert json.loads(raw(served.path, line(), is_half=True))["result"]["command"] == "find"


def test_a_client_that_sends_or_reads_nothing_is_dropped_and_holds_no_other_up(served, monkeypatch):
    monkeypatch.setattr(module, "EXCHANGE_S", 1.0)
    with connected(served.path) as silent, connected(served.path) as deaf:
        deaf.sendall(line(arguments={"size": 8 << 20}))
        silent.sendall(b"{")
        began_s = time.monotonic()
        assert ask(served.path, "find", {})["command"] == "find"
        assert time.monotonic() - began_s < 5.0
        assert received(silent) == b""
        until(lambda: not served._server._clients)
        assert len(received(deaf)) < 8 << 20


def test_a_request_in_pieces_is_one_request(served):
    with connected(served.path) as connection:
        for byte in line():
            connection.sendall(bytes([byte]))
        assert json.loads(received(connection))["result"]["command"] == "find"


@pytest.mark.parametrize("count", [module.CONNECTIONS_MAX, 200])
def test_many_silent_connections_do_not_keep_others_out(served, count, monkeypatch):
    monkeypatch.setattr(module, "EXCHANGE_S", 60.0)
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(served.path)) for _ in range(count)]
        assert ask(served.path, "find", {})["command"] == "find"
        assert len(served._server._clients) <= module.CONNECTIONS_MAX
        assert received(silent[0]) == b"", "the oldest has ended"


def test_health_is_answered_while_another_call_hangs_and_a_call_that_waits_keeps_its_deadline(served, calls):
    with connected(served.path) as hanging, connected(served.path) as late:
        hanging.sendall(line(command="hang", deadline_s=30))
        until(lambda: calls.made)
        late.sendall(line(deadline_s=0.05))
        began_s = time.monotonic()
        assert ask(served.path, module.HEALTH, {})["command"] == module.HEALTH
        assert time.monotonic() - began_s < 5.0
        assert "busy with other calls until the deadline" in error_of(received(late))
        calls.go.set()
        assert json.loads(received(hanging))["result"]["command"] == "hang"
    assert ("find", {}) not in calls.made


def test_calls_that_wait_leave_connections_for_a_probe(served, calls):
    with ExitStack() as stack:
        waiting = [stack.enter_context(connected(served.path)) for _ in range(module.CALLS_MAX)]
        for connection in waiting:
            connection.sendall(line(command="hang", deadline_s=30))
        until(lambda: [*served._server._clients.values()] == [True] * module.CALLS_MAX)
        until(lambda: served._calls[1]._value == 0)
        for _ in range(module.CONNECTIONS_MAX):
            with pytest.raises(ControlError, match="busy with 8 other calls; ask again later"):
                ask(served.path, "find", {})
            assert ask(served.path, module.HEALTH, {})["command"] == module.HEALTH
        calls.go.set()
        assert [json.loads(received(it))["result"]["command"] for it in waiting] == ["hang"] * module.CALLS_MAX
    assert ask(served.path, "find", {})["command"] == "find"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "ended the connection without an answer"),
        (b'{"version": 1}\n', "has no result"),
        (b'{"version": 1, "result": 5}\n', "has no result"),
        (b'{"version": 2, "result": {}}\n', "has version 2; allowed: 1"),
    ],
)
def test_another_program_at_the_socket_is_a_clear_error(path, answer, error):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(20.0)

        def answer_one() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        with pytest.raises(ControlError, match=error):
            ask(path, "find", {})
        thread.join(20.0)


def test_a_call_that_waits_is_not_made_once_the_server_closes(path, calls, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.1)
    server = ControlSocket(path, calls.answer)
    with connected(path) as hanging, connected(path) as waiting:
        hanging.sendall(line(command="hang", deadline_s=30))
        until(lambda: calls.made)
        waiting.sendall(line(deadline_s=30))
        until(lambda: [*server._server._clients.values()] == [True, True])
        server.close()
        assert (received(hanging), received(waiting)) == (b"", b"")
        calls.go.set()
        until(lambda: not server._server._clients)
    assert calls.made == [("hang", {})]


def test_closing_waits_for_the_call_under_way(path, calls):
    """It may use the session, which closes next."""
    server = ControlSocket(path, calls.answer)
    with connected(path) as hanging:
        hanging.sendall(line(command="hang", deadline_s=30))
        until(lambda: calls.made)
        threading.Timer(0.2, calls.go.set).start()
        server.close()
        assert calls.ended == ["hang"]


def test_a_server_that_accepts_nothing_costs_a_client_its_deadline(path):
    with socket.socket(socket.AF_UNIX) as listener, ExitStack() as stack:
        listener.bind(str(path))
        listener.listen(0)
        stack.enter_context(connected(path))
        began_s = time.monotonic()
        with pytest.raises(ControlError, match=r"did not answer within 0\.3 s"):
            ask(path, "find", {}, 0.3)
        assert time.monotonic() - began_s < 5.0


def test_a_client_waits_no_longer_than_its_deadline(served):
    began_s = time.monotonic()
    with pytest.raises(ControlError, match=r"did not answer within 0\.2 s"):
        ask(served.path, "hang", {}, 0.2)
    assert time.monotonic() - began_s < 5.0


def test_a_request_that_no_server_would_take_is_not_sent(served, calls):
    with pytest.raises(ControlError, match="allowed: at most 1048576"):
        ask(served.path, "find", {"tokens": [100_000] * 200_000})
    assert calls.made == []


def test_processes_of_other_users_are_refused(served, calls, monkeypatch, caplog):
    monkeypatch.setattr(local_server, "peer_of", lambda _peer: (1, os.geteuid() + 1))
    with connected(served.path) as connection:
        assert received(connection) == b""
    until(lambda: f"{served.path}: a connection was refused: process 1 belongs to user" in caplog.text)
    monkeypatch.undo()
    assert ask(served.path, "find", {})["command"] == "find"
    assert calls.made == [("find", {})]


def test_a_client_that_cannot_be_identified_ends_no_server(served, monkeypatch, caplog):
    monkeypatch.setattr(local_server, "peer_of", MagicMock(side_effect=OSError(errno.ENOTCONN, "not connected")))
    with connected(served.path) as connection:
        assert received(connection) == b""
    until(lambda: f"{served.path}: a connection was refused: OSError: [Errno 107]" in caplog.text)
    monkeypatch.undo()
    assert ask(served.path, "find", {})["command"] == "find"


@pytest.mark.skipif(not IS_ROOT, reason="only root can be another user")
def test_another_user_can_neither_connect_nor_is_believed_when_the_mode_is_wrong(tmp_path, calls):
    """The mode keeps others out; where it does not, as after a chmod, the user of the process counts."""
    folder = Path("/tmp") / f"kvtier-test-{os.getpid()}"
    folder.mkdir(mode=0o755)
    try:
        server = ControlSocket(folder / "s", calls.answer)
        assert _tried_as(65534, folder / "s") == "PermissionError"
        (folder / "s").chmod(0o666)
        assert _tried_as(65534, folder / "s") == "b''"
        server.close()
    finally:
        folder.rmdir()
    assert calls.made == []


@pytest.mark.parametrize(("change", "who"), [("owner", 65534), ("mode", 0), ("peer", 65534)])
def test_a_client_sends_nothing_to_a_socket_that_another_user_holds_or_can_replace(path, change, who):
    """A prompt and its salt are for the engine alone, and root asks as well as its user."""
    if not IS_ROOT:
        pytest.skip("only root can be another user")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(who if change == "peer" else 0)  # a client sees the user at the time of `listen`
        try:
            listener.listen(1)
        finally:
            os.seteuid(0)
        if change == "owner":
            os.chown(path, who, who)
        path.chmod(0o622 if change == "mode" else 0o600)
        with pytest.raises(
            ControlError,
            match=f"nothing was sent to {path}: user .*allowed: a socket of this user or root.*run this as user",
        ):
            ask(path, "find", {"tokens": [1], "salt": "tenant"})
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(1) == b"", "the connection ends, and nothing came"


def test_the_client_asks_an_engine_of_root(served, monkeypatch):
    """The control of the test above."""
    assert ask(served.path, "find", {})["command"] == "find"
    monkeypatch.setattr(module, "peer_of", lambda _peer: (1, 0))
    assert ask(served.path, "find", {})["command"] == "find"


def test_a_forked_child_keeps_no_listener_and_no_connection(path, calls):
    """Else the socket of a killed engine would listen, and its clients would wait, as long as a child lives."""
    reader, writer = os.pipe()
    engine = os.fork()
    if engine == 0:
        ControlSocket(path, calls.answer)
        with connected(path) as waiting:
            waiting.sendall(line(command="hang", deadline_s=30))
            until(lambda: calls.made)
            child = os.fork()
            if child:
                os.write(writer, b"%d" % child)
            time.sleep(60)
        os._exit(0)
    child = int(os.read(reader, 20))
    try:
        with connected(path) as client:
            os.kill(engine, signal.SIGKILL)
            os.waitpid(engine, 0)
            with suppress(ConnectionResetError):
                assert received(client) == b""
        server = ControlSocket(path, calls.answer)
        assert ask(path, "find", {})["command"] == "find"
        server.close()
    finally:
        os.kill(child, signal.SIGKILL)


def _tried_as(user: int, path: Path) -> str:
    """What a process of `user` gets for a request."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(user)
        try:
            answer = repr(raw(path, line()))
        except OSError as error:
            answer = "b''" if isinstance(error, BrokenPipeError | ConnectionResetError) else type(error).__name__
        os.write(writer, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return file.read()


def test_the_socket_of_a_dead_process_is_replaced_and_one_of_a_living_is_not(path, calls):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = ControlSocket(path, calls.answer)
    with refuses("control.socket", "another engine listens there", value=str(path), allowed="{pid}"):
        ControlSocket(path, calls.answer)
    assert ask(path, "find", {})["command"] == "find"
    server.close()


def test_two_starts_at_once_give_one_server(path, calls, monkeypatch):
    """A socket that does not listen yet looks like that of a dead process."""

    class Slow(socket.socket):
        def listen(self, *given: int) -> None:
            time.sleep(0.1)
            super().listen(*given)

    monkeypatch.setattr(module.socket, "socket", Slow)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    servers, errors = [], []

    def start() -> None:
        try:
            servers.append(ControlSocket(path, calls.answer))
        except ConfigError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(servers), len(errors)) == (1, 7)
    assert ask(path, "find", {})["command"] == "find"
    servers[0].close()


def test_a_server_does_not_remove_the_socket_of_another(path, calls):
    first = ControlSocket(path, calls.answer)
    path.unlink()
    second = ControlSocket(path, calls.answer)
    first.close()
    assert ask(path, "find", {})["command"] == "find"
    second.close()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_directory_in_which_others_can_write_is_refused(path, calls, mode):
    path.parent.chmod(mode)
    with refuses("control.socket", f"mode {mode:o} ", value=str(path), allowed="a directory of this user or root"):
        ControlSocket(path, calls.answer)
    assert not path.exists()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_no_socket_is_refused_and_kept(path, calls, kind):
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to(path.parent / "other")
    else:
        path.mkdir()
    with refuses("control.socket", "is not a socket", value=str(path), allowed="a path where no file exists"):
        ControlSocket(path, calls.answer)
    assert path.is_symlink() or path.exists()
    assert not (path.parent / "other").exists()


def test_a_path_may_name_the_process_and_is_not_too_long(path, calls):
    server = ControlSocket(path.with_name("kv-{pid}.sock"), calls.answer)
    assert server.path == path.with_name(f"kv-{os.getpid()}.sock")
    server.close()
    with refuses("control.socket", "more than 107 bytes", value="x" * 120):
        ControlSocket(path.with_name("x" * 120), calls.answer)


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_whatever_the_umask_no_other_user_may_connect(path, calls, umask):
    before = os.umask(umask)
    try:
        server = ControlSocket(path.parent / "new" / "s", calls.answer)
    finally:
        os.umask(before)
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700
    server.close()
