"""Ranks in this process and in others, and both ends of a connection. For the tests of ranks."""

import socket
import threading
import time
from contextlib import contextmanager
from types import MappingProxyType

import pytest
from tests.rig import DEADLINE_S, FINGERPRINT, LAYOUT, Engine, config

from kvtier.runtime import rank_server
from kvtier.runtime.open import open_core
from kvtier.runtime.protocol import decode
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer, connect
from kvtier.types import ChunkKey, Direction, RequestId, Transfer

NEVER_S = float("inf")


@contextmanager
def opened(directory, started, *, disk=None, limits=MappingProxyType({}), **options):
    below = connect([worker.handshake for worker in started], **options)
    settings = config(directory, host_chunks=8 * len(started), disk=disk, **limits)
    layouts = [worker.engine["layout"] for worker in started]
    kv = open_core(settings, layouts[0], FINGERPRINT, below, layouts=layouts)
    try:
        yield kv, below
    finally:
        kv.session.close(5.0)


def a_transfer(direction, number=1, slot=0, blocks=(0, 1, 2, 3)):
    is_copy = direction in (Direction.GATHER, Direction.SCATTER)
    return Transfer(
        number,
        direction,
        ChunkKey(bytes(32)),
        0,
        slot,
        "" if is_copy else "directory",
        RequestId("r") if is_copy else None,
        blocks if is_copy else (),
        None,
        0,
        NEVER_S,
        None,
    )


def take(mover, count):
    answers = []
    end_s = time.monotonic() + DEADLINE_S
    while len(answers) < count:
        assert time.monotonic() < end_s, f"{len(answers)} of {count} answers came"
        answers += mover.take(0.1)
    return answers


class Gate:
    """A copier whose scatters wait."""

    def __init__(self, copier):
        self.gather, self.done, self._copier = copier.gather, copier.done, copier
        self.held = threading.Semaphore(0)
        self.hold = threading.Event()

    def scatter(self, *arguments):
        self.held.release()
        assert self.hold.wait(DEADLINE_S)
        return self._copier.scatter(*arguments)


@pytest.fixture
def served(tmp_path):
    gate = Gate(Engine(64).copier())
    rank = open_rank(config(tmp_path / "kv"), LAYOUT, FINGERPRINT, gate)
    notes = []
    server = RankServer(rank, notes.append)
    server.gate, server.notes = gate, notes
    yield server
    gate.hold.set()
    rank.close(DEADLINE_S)
    assert server.close(DEADLINE_S)
    assert server.close(DEADLINE_S)


def greeted(server):
    """A core's end of a connection, by hand."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(DEADLINE_S)
    connection.connect(f"\0{server.address}")
    rank_server._greet(connection, bytes.fromhex(server.handshake["key"]))
    return connection


def received(connection):
    """Everything until the other side hangs up."""
    frames, messages = rank_server.MessageReader(), []
    while data := connection.recv(1 << 16):
        messages += [decode(body) for body in frames.feed(data)]
    return messages
