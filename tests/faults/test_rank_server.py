"""A rank in another process: it stores and loads, keeps the order of notes, and only its core may connect."""

import itertools
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.completions import taking
from tests.faults.rank_world import NEVER_S, a_transfer, greeted, opened, served, take
from tests.metric_values import values_of
from tests.rank_worker import workers
from tests.rig import (
    CHUNK_TOKENS,
    DEADLINE_S,
    FINGERPRINT,
    LAYOUT,
    config,
    load_places,
    loaded,
    looked_up,
    places_of,
    prefix_of,
    stored,
)
from tests.system import until

from kvtier.observe.metrics import Metrics
from kvtier.runtime import local_server, rank_server
from kvtier.runtime.local_server import set_timeout
from kvtier.runtime.mover import CLOSED, Mover
from kvtier.runtime.observers.transfer_metrics import TierGauges
from kvtier.runtime.open import open_core
from kvtier.runtime.protocol import MessageReader, Note, Ping, ProtocolError, TierReport, decode, encode
from kvtier.runtime.rank_group import RankGroup
from kvtier.runtime.rank_server import connect
from kvtier.runtime.remote_rank import RemoteRank
from kvtier.types import WRITE_KINDS, ChunkKey, Direction, Drop, Figures, Outcome, Probe, RequestId

__all__ = ["served"]

OF_TIERS = ("kvtier_held_bytes", "kvtier_capacity_bytes", "kvtier_evictions", "kvtier_tier_write_bytes")

# ---- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_stored_comes_back_in_new_processes(tmp_path, count):
    directory = tmp_path / "kv"
    with workers(directory, count, seed=1) as started, opened(directory, started) as (kv, _):
        root, prefix = kv.root, prefix_of(12, kv.root)
        assert stored(kv.session, "a", prefix, places_of(range(12))).stored == 24
        assert kv.session.close().flushed
        assert all(worker.end() for worker in started)
    with workers(directory, count, seed=11) as started, opened(directory, started) as (kv, _):
        assert kv.root == root
        answer = looked_up(kv.session, "b", prefix)
        assert (answer.tokens, answer.ready_tokens) == (12 * CHUNK_TOKENS, 0)
        done = loaded(kv.session, "b", prefix, answer.tokens, load_places(answer.tokens))
        assert done.tokens == answer.tokens
        assert [worker.ask("same", 1 + rank, done.tokens) for rank, worker in enumerate(started)] == [True] * count
        assert [
            worker.ask("same", 1 + rank, done.tokens + 3 * CHUNK_TOKENS) for rank, worker in enumerate(started)
        ] == [False] * count
        assert values_of(kv.metrics)['kvtier_transfers_total{link="scatter",outcome="done"}'] == 14


def test_notes_arrive_in_order(tmp_path):
    notes = [Note("loaded", RequestId(f"request {n}"), (n, -1), flag=bool(n % 2)) for n in range(200)]
    with workers(tmp_path / "kv", 2) as started:
        below = connect([worker.handshake for worker in started])
        for note in notes:
            below.executor.send_note(note)
        for worker in started:
            until(lambda worker=worker: len(worker.ask("notes")) == 200)
            assert [Note(*note[:2], tuple(note[2]), note[3]) for note in worker.ask("notes")] == notes
        assert below.executor.close(DEADLINE_S)


def test_five_hundred_commands_are_each_answered_once(tmp_path):
    with workers(tmp_path / "kv", 2) as started:
        mover = taking(connect([worker.handshake for worker in started]).executor)
        commands = [Probe(n, "directory", ((ChunkKey(bytes(32)), 0),) * 3, NEVER_S) for n in range(500)]
        for command in commands:
            mover.submit(command)
        answers = take(mover, 500)
        assert {id(completion.command) for completion in answers} == {id(command) for command in commands}
        assert {(completion.outcome, completion.present) for completion in answers} == {(Outcome.DONE, (False,) * 3)}
        assert mover.close(DEADLINE_S)
        mover.submit(commands[0])
        assert [(completion.outcome, completion.detail) for completion in mover.take()] == [
            (Outcome.CANCELLED, CLOSED)
        ] * 1


def test_a_tier_that_the_rank_does_not_have_fails_the_command(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        mover = taking(connect([worker.handshake for worker in started]).executor)
        mover.submit(Drop("elsewhere", ChunkKey(bytes(32)), 0))
        (completion,) = take(mover, 1)
        assert completion.outcome is Outcome.FAILED
        assert "no tier 'elsewhere'" in completion.detail


def test_closing_withdraws_what_has_not_begun_and_waits_for_what_has(tmp_path):
    gate = tmp_path / "gate"
    gate.touch()
    with workers(tmp_path / "kv", 1, gate=gate) as started:
        mover = taking(connect([worker.handshake for worker in started]).executor)
        held = gate.with_suffix(".held")
        for number in range(5):
            mover.submit(a_transfer(Direction.SCATTER, number))
            mover.flush()
            if number < 2:  # each of the two threads has one, and no batch
                until(lambda count=number + 1: held.exists() and held.stat().st_size == count)
        assert not mover.close(0.2)
        gate.unlink()
        outcomes = [completion.outcome for completion in take(mover, 5)]
        assert sorted(outcomes, key=lambda outcome: outcome.value) == [Outcome.CANCELLED] * 3 + [Outcome.DONE] * 2
        assert mover.close(DEADLINE_S)
        assert started[0].end()


# ---- the tiers' figures ------------------------------------------------------------------------------------------


def exported(metrics):
    """Fill level, evictions and written bytes of the tiers, by series."""
    return {
        name: value for name, value in values_of(metrics).items() if name.startswith(OF_TIERS) and "host" not in name
    }


@pytest.mark.parametrize("count", [1, 2])
def test_the_figures_of_tiers_in_other_processes_are_in_the_cores_metrics(tmp_path, count):
    directory, disk = tmp_path / "directory", tmp_path / "disk"
    with workers(directory, count, disk=disk) as started:
        below = connect([worker.handshake for worker in started])
        kv = open_core(config(directory, host_chunks=8 * count, disk=disk), LAYOUT, FINGERPRINT, below)
        seeds = itertools.count()

        def expected():
            """The fill level of each rank's own disk adds up, the directory is one for all."""
            by_tier = {name: [worker.ask("figures")[name] for worker in started] for name in ("disk", "directory")}
            if any(None in figures[:3] or not figures[0] for each in by_tier.values() for figures in each):
                stored(kv.session, "r", prefix_of(4, kv.root, seed=next(seeds)), places_of(range(4)))
                return None
            wanted = {}
            for tier, (held, capacity, evictions, written) in {
                name: list(zip(*each, strict=True)) for name, each in by_tier.items()
            }.items():
                wanted[f'kvtier_held_bytes{{place="{tier}"}}'] = sum(held) if tier == "disk" else max(held)
                wanted[f'kvtier_capacity_bytes{{place="{tier}"}}'] = 64 << 20
                assert sum(capacity) == (64 << 20) * (1 if tier == "disk" else count)
                wanted[f'kvtier_evictions_total{{place="{tier}"}}'] = sum(evictions)
                for what in WRITE_KINDS if tier == "disk" else ():
                    name = f'kvtier_tier_write_bytes_total{{tier="{tier}",what="{what}"}}'
                    wanted[name] = sum(each[what] for each in written)
            return wanted

        assert exported(kv.metrics) == {}
        until(lambda: expected() is not None)
        until(lambda: exported(kv.metrics) == expected())
        last = exported(kv.metrics)
        assert last['kvtier_tier_write_bytes_total{tier="disk",what="frames"}'] > 0
        started[-1].signal(signal.SIGKILL)
        until(lambda: below.executor.lost)
        after = Metrics()
        TierGauges(after, below.views, lambda _: True, {"directory"})()
        assert exported(after) == last
        kv.session.close(5.0)


def test_figures_are_sent_when_they_have_changed_and_at_most_once_a_second(served):
    view = served._rank.mover.views["directory"]
    with greeted(served) as connection:
        began_s, frames, heard = time.monotonic(), MessageReader(), []
        for number in range(200):
            view.figures = Figures(number, 300, 0)
            connection.sendall(encode(Ping()))
            while heard.count(Ping()) <= number:
                heard += [decode(body) for body in frames.feed(connection.recv(1 << 16))]
        assert 1 <= len(heard) - 200 <= 1 + time.monotonic() - began_s
        while heard[-1] != TierReport("directory", Figures(199, 300, 0), 0):
            heard += [decode(body) for body in frames.feed(connection.recv(1 << 16))]
        connection.settimeout(1.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        view.stuck_queues = lambda: 2  # without a command, as when all calls hang
        assert decode(next(frames.feed(connection.recv(1 << 16)))) == TierReport("directory", Figures(199, 300, 0), 2)


def test_figures_of_a_tier_that_no_rank_has_lose_the_rank(served):
    with greeted(served) as connection:
        mover = taking(RemoteRank(connection.dup(), "rank 0", ["elsewhere"], hung_s=DEADLINE_S))
        served._rank.mover.views["directory"].figures = Figures(1, 2, 3)
        until(lambda: mover.lost)
        assert "the rank has sent an unexpected TierReport" in mover.lost
        assert mover.views["elsewhere"].figures == Figures()
        assert mover.close(DEADLINE_S)


FOREIGN = {
    "address": "/nowhere/rank",
    "key": "11" * 32,
    "pid": 1,
    "rank": 0,
    "ranks": 1,
    "slots": [2, 2],
    "parts": ["layers 0-2, copy 0", "layers 0-0, copy 0"],
    "tiers": [],
    "remote": [],
    "down": [],
}


# ---- authentication ------------------------------------------------------------------------------------------------


def test_a_rank_listens_until_its_core_has_come(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        address = f"@{started[0].handshake['address']}"
        assert address in Path("/proc/net/unix").read_text()
        mover = taking(connect([started[0].handshake]).executor)
        until(lambda: not any(line.split()[3:6:2] == ["00010000", "01"] for line in listed(address)))
        assert mover.close(DEADLINE_S)


def listed(address):
    """The lines of the system's sockets with this address."""
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if address in line]


def test_a_wrong_key_is_refused_and_the_right_one_still_gets_in(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        (handshake,) = [worker.handshake for worker in started]
        with pytest.raises(ProtocolError, match=r"rank 0 \(process \d+\) cannot be reached"):
            connect([handshake | {"key": "00" * 32}])
        mover = taking(connect([handshake]).executor)
        with pytest.raises(ProtocolError, match="cannot be reached"):
            connect([handshake])  # the first is the only one
        assert mover.close(DEADLINE_S)


def test_a_rank_that_does_not_know_the_key_is_refused():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0kvtier-rank-impostor")
    listener.listen(1)

    def impostor():
        peer, _ = listener.accept()
        with peer:
            proof = peer.recv(100)[32:]
            peer.sendall(proof + struct.pack("<d", time.monotonic()))  # shown back what was shown to it

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ProtocolError, match="does not know the key"):
        connect([FOREIGN | {"address": "kvtier-rank-impostor"}])
    thread.join(DEADLINE_S)
    listener.close()


def test_a_silent_rank_costs_no_more_than_the_deadline():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0kvtier-rank-silent")
        listener.listen(1)
        began_s = time.monotonic()
        with pytest.raises(ProtocolError, match="cannot be reached at kvtier-rank-silent"):
            connect([FOREIGN | {"address": "kvtier-rank-silent"}], 0.2)
        assert time.monotonic() - began_s < DEADLINE_S / 2


def test_processes_of_other_users_are_refused(served, monkeypatch, caplog):
    monkeypatch.setattr(local_server, "peer_of", lambda _peer: (1, rank_server.os.geteuid() + 1))
    with pytest.raises(ProtocolError, match="cannot be reached"):
        connect([served.handshake | {"pid": 0}])
    until(lambda: "process 1 belongs to user" in caplog.text)
    monkeypatch.undo()
    with greeted(served):
        pass


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_strangers_neither_get_in_nor_keep_others_out(served, greeting):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{served.address}")
        stranger.sendall(greeting)
        with greeted(served) as connection:
            connection.sendall(encode(Ping()))
            assert connection.recv(100) == encode(Ping())
    assert served.notes == []


@pytest.mark.parametrize("count", [2, 64])
def test_silent_connections_hold_up_no_core(served, count):
    with ExitStack() as strangers:
        for number in range(count):
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
            set_timeout(stranger, socket.SO_SNDTIMEO, DEADLINE_S)
            stranger.connect(f"\0{served.address}")
            if number % 2:
                with suppress(OSError):
                    stranger.sendall(bytes(number))  # a part of a greeting
        began_s = time.monotonic()
        mover = taking(connect([served.handshake | {"pid": 0}], DEADLINE_S).executor)
        mover.submit(Drop("directory", ChunkKey(bytes(32)), 0))
        assert [completion.outcome for completion in take(mover, 1)] == [Outcome.DONE]
        assert time.monotonic() - began_s < DEADLINE_S / 2
        assert mover.close(DEADLINE_S)


def test_only_so_many_connections_may_be_silent_at_once(served):
    with ExitStack() as strangers:
        silent = [
            strangers.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3 * local_server.CONNECTIONS_MAX)
        ]
        for stranger in silent:
            set_timeout(stranger, socket.SO_SNDTIMEO, DEADLINE_S)
            stranger.connect(f"\0{served.address}")
            stranger.settimeout(DEADLINE_S)
        for stranger in silent[: -local_server.CONNECTIONS_MAX]:
            assert not stranger.recv(100)
        for stranger in silent[-local_server.CONNECTIONS_MAX :]:
            stranger.settimeout(0.01)
            with pytest.raises(TimeoutError):
                stranger.recv(100)


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_another_clock_is_refused(served, monkeypatch, ahead_s):
    class Other(struct.Struct):
        def pack(self, now_s):
            return super().pack(now_s + ahead_s)

    monkeypatch.setattr(rank_server, "_CLOCK", Other("<d"))
    with pytest.raises(ProtocolError, match=r"\d+\.\d s ahead; all ranks must share"):
        connect([served.handshake | {"pid": 0}])


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ProtocolError, match="all ranks must run on one machine"):
        connect([FOREIGN])


def test_when_one_of_several_cannot_be_reached_the_others_are_let_go(tmp_path):
    with workers(tmp_path / "kv", 2) as started:
        handshakes = [worker.handshake for worker in started]
        with pytest.raises(ProtocolError, match="rank 1"):
            connect([handshakes[0], handshakes[1] | {"key": "00" * 32}])
        assert started[0].end()


def test_ranks_here_and_elsewhere_are_one_fleet(tmp_path, served):
    with workers(tmp_path / "kv", 2) as started:
        here = served.take_here()
        assert isinstance(here, Mover)
        elsewhere = connect([worker.handshake for worker in started]).executor
        assert isinstance(elsewhere, RankGroup)
        group = taking(RankGroup([here, *elsewhere._ranks]))
        group.submit(Probe(1, "directory", ((ChunkKey(bytes(32)), 0),), NEVER_S))
        (completion,) = take(group, 1)
        assert (completion.outcome, completion.present) == (Outcome.DONE, (False,))
        assert group.close(DEADLINE_S)
