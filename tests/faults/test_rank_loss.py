"""If a rank in another process, or the core, fails, every command is completed and no block is overwritten."""

import itertools
import logging
import os
import signal
import socket
import struct
import time
from contextlib import suppress

import pytest
from tests.completions import taking
from tests.faults.rank_world import NEVER_S, a_transfer, greeted, opened, received, served, take
from tests.rank_worker import workers
from tests.rig import CHUNK_TOKENS, DEADLINE_S, load_places, loaded, looked_up, places_of, prefix_of, stored
from tests.system import in_child, until

from kvtier.runtime import rank_server, remote_rank
from kvtier.runtime.mover import Mover
from kvtier.runtime.protocol import MESSAGE_BYTES_MAX, CompletionMessage, Note, Ping, encode
from kvtier.runtime.rank_server import connect
from kvtier.runtime.remote_rank import RemoteRank
from kvtier.types import Cancel, ChunkKey, Direction, Drop, LoadDone, Outcome, Presence, Probe, RequestId

__all__ = ["served"]

# ---- the other side dies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_worker_ends_the_load_at_once_and_the_session_goes_on(tmp_path, caplog, count):
    directory, gate = tmp_path / "kv", tmp_path / "gate"
    with workers(directory, count, seed=1, gate=gate) as started, opened(directory, started) as (kv, below):
        prefix = prefix_of(12, kv.root)
        stored(kv.session, "a", prefix, places_of(range(12)))
        gate.touch()
        tokens = looked_up(kv.session, "b", prefix).tokens
        assert tokens == 12 * CHUNK_TOKENS
        kv.session.load(RequestId("b"), prefix, tokens, load_places(tokens))
        until(gate.with_suffix(".held").exists)
        started[-1].signal(signal.SIGKILL)
        if count == 2:
            gate.unlink()  # the other rank's copies do end
        began_s = time.monotonic()
        events = []
        while not any(isinstance(event, LoadDone) for event in events):
            events += kv.session.poll(1.0)
            assert time.monotonic() - began_s < DEADLINE_S
        (done,) = [event for event in events if isinstance(event, LoadDone)]
        assert done.tokens < tokens
        assert (
            f"rank {count - 1} (process {started[-1].process.pid}) is lost: its process has ended"
            in below.executor.lost
        )
        assert loaded(kv.session, "c", prefix, CHUNK_TOKENS, load_places(CHUNK_TOKENS)).tokens == 0
        store = stored(kv.session, "d", prefix_of(3, kv.root, seed=5), places_of(range(3)))
        assert (store.stored, store.dropped) == (0, 6)
        assert looked_up(kv.session, "e", prefix_of(3, kv.root, seed=6)).presence is Presence.ABSENT
        kv.session.close(5.0)
    assert sum("is lost" in record.message for record in caplog.records if record.levelno == logging.ERROR) == 1


def test_a_death_is_seen_although_a_child_keeps_the_connection_open(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        mover = taking(connect([worker.handshake for worker in started]).executor)
        child = started[0].ask("fork")
        try:
            started[0].signal(signal.SIGKILL)
            until(lambda: mover.lost)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_on_either_side_ends_nothing_of_its_parents(tmp_path):
    with workers(tmp_path / "kv", 2) as started:
        assert started[0].ask("fork and close") == 0  # before the core has come
        with opened(tmp_path / "kv", started) as (kv, below):
            for seed in range(5):
                assert in_child(lambda: kv.session.close(1.0).lost) == 0
                assert started[1].ask("fork and close") == 0
                done = stored(kv.session, f"a{seed}", prefix_of(2, kv.root, seed=seed), places_of(range(2)))
                assert done.stored == 4
            assert not below.executor.lost


def test_a_stopped_worker_is_given_up_but_its_transfers_wait_for_its_end(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    with workers(tmp_path / "kv", 1, gate=gate) as started:
        mover = taking(connect([worker.handshake for worker in started], hung_s=0.3).executor)
        transfers = [
            a_transfer(Direction.SCATTER, 1),
            a_transfer(Direction.GATHER, 2, 1),
            a_transfer(Direction.PROMOTE, 3, 2),
        ]
        mover.submit(transfers[0])
        mover.flush()
        until(gate.with_suffix(".held").exists)
        started[0].stop()
        mover.submit(*transfers[1:], drop := Drop("directory", ChunkKey(bytes(32)), 0))
        assert [(it.command, it.outcome) for it in take(mover, 1)] == [(drop, Outcome.FAILED)]
        assert "has not answered" in mover.lost
        mover.submit(late := a_transfer(Direction.GATHER, 4))
        (completion,) = mover.take()
        assert (completion.command, completion.outcome) == (late, Outcome.FAILED)
        assert mover.take(0.5) == []  # it may wake up and go on writing to the engine's blocks, or to shared slots
        gate.unlink()
        started[0].signal(signal.SIGCONT)
        outcomes = {it.command: it.outcome for it in take(mover, 3)}
        assert outcomes.keys() == set(transfers)
        assert outcomes[transfers[0]] is Outcome.DONE
        assert mover.close(DEADLINE_S)
        assert started[0].end()


def test_a_stopped_worker_that_is_killed_then_frees_its_transfers(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    with workers(tmp_path / "kv", 1, gate=gate) as started:
        mover = taking(connect([worker.handshake for worker in started], hung_s=0.2).executor)
        mover.submit(a_transfer(Direction.SCATTER, 1))
        mover.flush()
        until(gate.with_suffix(".held").exists)
        started[0].stop()
        until(lambda: mover.lost)
        started[0].signal(signal.SIGKILL)
        assert take(mover, 1)[0].outcome is Outcome.FAILED


def test_a_worker_that_reads_nothing_for_a_while_gets_everything_later(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_rank, "SILENCE_S", 0.05)
    with workers(tmp_path / "kv", 1) as started:
        mover = taking(connect([worker.handshake for worker in started]).executor)
        started[0].stop()
        commands = [Probe(n, "directory", ((ChunkKey(bytes(32)), 0),) * 30, NEVER_S) for n in range(1000)]
        began_s = time.monotonic()
        for command in commands:
            mover.submit(command)
        assert not mover.flush()
        assert mover.take(DEADLINE_S) == []  # comes back early to try again
        assert time.monotonic() - began_s < DEADLINE_S / 2
        time.sleep(0.3)  # several silences, but not yet too many
        started[0].signal(signal.SIGCONT)
        assert {completion.outcome for completion in take(mover, 1000)} == {Outcome.DONE}
        assert mover.lost == ""


def test_a_silent_worker_without_work_is_left_alone(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        mover = taking(connect([worker.handshake for worker in started], hung_s=0.2).executor)
        mover.submit(Probe(1, "directory", (), NEVER_S))
        take(mover, 1)
        time.sleep(0.8)
        mover.submit(Probe(2, "directory", (), NEVER_S))
        assert take(mover, 1)[0].outcome is Outcome.DONE
        assert mover.lost == ""


# ---- the core's side goes away -------------------------------------------------------------------------------------


def test_when_the_core_goes_what_waits_is_withdrawn_and_what_runs_ends_first(served):
    with greeted(served) as connection:
        for number in range(4):
            connection.sendall(encode(rank_server.CommandMessage(number, a_transfer(Direction.SCATTER, number))))
            if number < 2:  # each of the two threads has one, and no batch
                assert served.gate.held.acquire(timeout=DEADLINE_S)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            received(connection)
        connection.settimeout(DEADLINE_S)
        served.gate.hold.set()
        assert [message.outcome for message in received(connection)] == [Outcome.DONE] * 2


def test_a_core_that_does_not_read_is_given_up(served, monkeypatch):
    monkeypatch.setattr(rank_server, "SEND_S", 0.1)
    order = encode(rank_server.CommandMessage(1, Probe(1, "directory", ((ChunkKey(bytes(32)), 0),) * 2000, NEVER_S)))
    with greeted(served) as connection, suppress(BrokenPipeError):
        while not served._is_mute:
            connection.sendall(order)
    until(lambda: served._is_mute)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 4,  # a length beyond all limits
        struct.pack("<I", MESSAGE_BYTES_MAX + 1),
        struct.pack("<I", 5) + b"hello",
        struct.pack("<I", 0),
        encode(CompletionMessage(1, Outcome.DONE)),  # valid, but not a message to a rank
    ],
)
def test_a_rank_disconnects_after_an_invalid_message(served, garbage, caplog):
    with greeted(served) as connection:
        connection.sendall(encode(Ping()) + garbage)
        assert received(connection) == [Ping()]
    assert "closes the connection to the core" in caplog.text


# ---- messages to the core ------------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    mover = taking(RemoteRank(ours, "rank 0", hung_s=DEADLINE_S))
    yield mover, theirs
    theirs.close()
    assert mover.close(DEADLINE_S)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff" * 4,
        struct.pack("<I", 5) + b"hello",
        encode(Note("load this")),
        encode(CompletionMessage(1, Outcome.DONE, (True,))),  # one answer to two questions
        encode(CompletionMessage(1, Outcome.DONE, (True,) * 3)),
    ],
)
def test_a_rank_is_lost_after_an_invalid_message(pair, garbage, caplog):
    mover, theirs = pair
    mover.submit(probe := Probe(1, "directory", ((ChunkKey(bytes(32)), 0),) * 2, NEVER_S))
    mover.submit(a_transfer(Direction.SCATTER, 2))
    mover.flush()
    theirs.sendall(garbage)
    (completion,) = take(mover, 1)
    assert (completion.command, completion.outcome) == (probe, Outcome.FAILED)
    theirs.sendall(encode(CompletionMessage(2, Outcome.DONE)))  # nothing more is believed
    assert mover.take(0.1) == []
    theirs.close()
    assert take(mover, 1)[0].outcome is Outcome.FAILED
    assert sum("is lost" in record.message for record in caplog.records) == 1


def test_a_completion_of_no_open_command_is_ignored(pair):
    mover, theirs = pair
    mover.submit(Probe(1, "directory", (), NEVER_S))
    mover.flush()
    theirs.sendall(encode(CompletionMessage(7, Outcome.DONE)) + encode(CompletionMessage(1, Outcome.DONE)) * 2)
    assert len(take(mover, 1)) == 1
    assert mover.take(0.05) == []
    assert mover.lost == ""


def test_what_is_too_long_for_a_message_fails_alone(pair):
    mover, _ = pair
    mover.submit(Probe(1, "directory", ((ChunkKey(bytes(32)), 0),) * (MESSAGE_BYTES_MAX // 60), NEVER_S))
    (completion,) = mover.take()
    assert completion.outcome is Outcome.FAILED
    assert "allowed: at most" in completion.detail
    assert mover.lost == ""


def test_the_outbox_has_an_end(pair, monkeypatch):
    monkeypatch.setattr(remote_rank, "OUTBOX_BYTES_MAX", 1000)
    mover, _ = pair
    for number in range(10):
        mover.submit(a_transfer(Direction.GATHER, number))
    answers = mover.take()
    assert 0 < len(answers) < 10
    assert {completion.outcome for completion in answers} == {Outcome.FAILED}
    mover.submit(Cancel(tuple(range(1000))))
    mover.send_note(Note("x" * 2000))  # neither may raise


# ---- our own mistakes ----------------------------------------------------------------------------------------------


def once(monkeypatch, owner, name, *, after=0):
    """The call behind the first `after` ones raises."""
    real, calls = getattr(owner, name), itertools.count()

    def wrong(*arguments, **named):
        if next(calls) == after:
            raise KeyError("planted")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, wrong)


@pytest.mark.parametrize(
    ("owner", "name"), [(remote_rank, "decode"), (RemoteRank, "_receive"), (remote_rank, "Completion")]
)
def test_an_internal_error_of_the_reader_loses_the_rank_and_leaves_nothing_open(
    served, monkeypatch, caplog, owner, name
):
    with greeted(served) as connection:
        mover = taking(RemoteRank(connection.dup(), "rank 0", hung_s=DEADLINE_S))
        connection.close()
        once(monkeypatch, owner, name)
        mover.submit(scatter := a_transfer(Direction.SCATTER, 1))
        mover.flush()
        assert served.gate.held.acquire(timeout=DEADLINE_S)
        mover.submit(probe := Probe(2, "directory", ((ChunkKey(bytes(32)), 0),), NEVER_S))
        mover.flush()
        until(lambda: mover.lost)
        (completion,) = take(mover, 1)
        assert (completion.command, completion.outcome) == (probe, Outcome.FAILED)
        assert not mover.take(0.05), "the scatter still writes"
        served.gate.hold.set()
        (completion,) = take(mover, 1)
        assert (completion.command, completion.outcome) == (scatter, Outcome.FAILED)
        assert mover.close(DEADLINE_S)
    assert "internal error" in caplog.text


@pytest.mark.parametrize("error", [KeyError, MemoryError])
def test_an_answer_that_the_core_does_not_take_is_given_once_more_as_failed(served, error):
    taken = []

    def put(completion):
        if completion.outcome is not Outcome.FAILED:
            raise error("planted")
        taken.append(completion)

    with greeted(served) as connection:
        mover = taking(RemoteRank(connection.dup(), "rank 0", hung_s=DEADLINE_S))
        connection.close()
        mover.complete_to(put)
        mover.submit(Probe(2, "directory", ((ChunkKey(bytes(32)), 0),), NEVER_S))
        mover.flush()
        until(lambda: taken)
        assert mover.close(DEADLINE_S)
    assert len(taken) == 1
    assert not mover.lost


@pytest.mark.parametrize("name", ["_answer", "encode", "submit"])
def test_an_internal_error_of_a_rank_disconnects_and_leaves_nothing_open(served, monkeypatch, caplog, name):
    with greeted(served) as connection:
        mover = taking(RemoteRank(connection.dup(), "rank 0", hung_s=DEADLINE_S))
        connection.close()
        if name == "submit":
            once(monkeypatch, served._rank.mover, "submit", after=1)
        elif name == "encode":
            once(monkeypatch, rank_server, "encode")
        else:
            once(monkeypatch, Mover, "_complete")
        for number in range(3):
            mover.submit(a_transfer(Direction.SCATTER, number))
        mover.flush()
        served.gate.hold.set()
        answers = take(mover, 3)
        assert Outcome.FAILED in {completion.outcome for completion in answers}
        assert len({completion.command.id for completion in answers}) == 3
        assert mover.close(DEADLINE_S)
    until(lambda: "ERROR" in caplog.text)
