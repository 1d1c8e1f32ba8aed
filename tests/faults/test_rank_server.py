"""A rank in another process: it stores and loads, keeps the order of notes, and only its core may connect."""

import itertools
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.completions import taking
from tests.faults.rank_world import NEVER_S, a_transfer, greeted, opened, served, take, until
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

from kvtier.observe.metrics import Metrics
from kvtier.runtime import rank_server
from kvtier.runtime.counters import TierGauges
from kvtier.runtime.mover import CLOSED, Mover
from kvtier.runtime.open import open_core
from kvtier.runtime.protocol import MessageReader, Note, Ping, ProtocolError, TierReport, decode, encode
from kvtier.runtime.rank_group import RankGroup
from kvtier.runtime.rank_server import connect
from kvtier.runtime.remote_rank import RemoteRank, set_timeout
from kvtier.types import WRITE_KINDS, ChunkKey, Drop, Figures, Link, Outcome, Probe, RequestId

__all__ = ["served"]

OF_TIERS = ("kvtier_held_bytes", "kvtier_capacity_bytes", "kvtier_evictions", "kvtier_tier_write_bytes")

# ---- what it is for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_what_was_stored_comes_back_in_new_processes(tmp_path, count):
    directory = tmp_path / "kv"
    with workers(directory, count, seed=1) as started, opened(directory, started) as (kv, _):
        root, prefix = kv.root, prefix_of(12, kv.root)
        assert stored(kv.session, "a", prefix, places_of(range(12))).held == 24
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
        assert 'kvtier_transfers_total{link="scatter",outcome="done"} 14' in kv.metrics.render()


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
        for number in range(5):
            mover.submit(a_transfer(Link.SCATTER, number))
        mover.flush()
        held = gate.with_suffix(".held")
        until(lambda: held.exists() and held.stat().st_size == 2)
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
        name: value for name, value in metrics.snapshot().items() if name.startswith(OF_TIERS) and "host" not in name
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
        assert "a rank does not send TierReport" in mover.lost
        assert mover.views["elsewhere"].figures == Figures()
        assert mover.close(DEADLINE_S)


FOREIGN = {
    "address": "/nowhere/rank",
    "key": "11" * 32,
    "pid": 1,
    "rank": 0,
    "ranks": 1,
    "slots": [2, 2],
    "tiers": [],
    "remote": [],
    "down": [],
}


# ---- authentication ------------------------------------------------------------------------------------------------


def test_the_socket_lies_in_a_private_directory_that_goes_when_it_is_taken(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        folder = Path(started[0].handshake["address"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        mover = taking(connect([started[0].handshake]).executor)
        until(lambda: not folder.exists())
        assert mover.close(DEADLINE_S)


def test_a_process_that_ends_before_anybody_came_leaves_nothing(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        folder = Path(started[0].handshake["address"]).parent
        assert folder.exists()
        started[0].process.stdin.close()  # it ends, without having closed anything
        started[0].process.wait(DEADLINE_S)
        assert not folder.exists()


def test_a_wrong_key_is_refused_and_the_right_one_still_gets_in(tmp_path):
    with workers(tmp_path / "kv", 1) as started:
        (handshake,) = [worker.handshake for worker in started]
        with pytest.raises(ProtocolError, match=r"rank 0 \(process \d+\) cannot be reached"):
            connect([handshake | {"key": "00" * 32}])
        mover = taking(connect([handshake]).executor)
        with pytest.raises(ProtocolError, match="cannot be reached"):
            connect([handshake])  # the first is the only one
        assert mover.close(DEADLINE_S)


def test_a_rank_that_does_not_know_the_key_is_refused(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "rank"))
    listener.listen(1)

    def impostor():
        peer, _ = listener.accept()
        with peer:
            peer.sendall(rank_server._MAGIC + bytes(32))
            proof = rank_server._receive(peer, 64, time.monotonic() + DEADLINE_S)[32:]
            peer.sendall(proof + struct.pack("<d", time.monotonic()))  # shown back what was shown to it

    thread = threading.Thread(target=impostor)
    thread.start()
    handshake = FOREIGN | {"address": str(tmp_path / "rank")}
    with pytest.raises(ProtocolError, match="does not know the key"):
        connect([handshake])
    thread.join(DEADLINE_S)
    listener.close()


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(64)])
def test_strangers_neither_get_in_nor_keep_others_out(served, monkeypatch, greeting):
    monkeypatch.setattr(rank_server, "GREETING_S", 0.2)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(served.address)
        stranger.sendall(greeting)
        with greeted(served) as connection:
            connection.sendall(encode(Ping()))
            assert connection.recv(100) == encode(Ping())
    assert served.notes == []


@pytest.mark.parametrize("count", [2, 64])
def test_silent_connections_hold_up_no_core(served, monkeypatch, count):
    monkeypatch.setattr(rank_server, "GREETING_S", 4 * DEADLINE_S)
    with ExitStack() as strangers:
        for number in range(count):
            stranger = strangers.enter_context(socket.socket(socket.AF_UNIX))
            set_timeout(stranger, socket.SO_SNDTIMEO, DEADLINE_S)
            stranger.connect(served.address)
            stranger.sendall(bytes(number % 64))  # nothing, or a part of an answer
        began_s = time.monotonic()
        mover = taking(connect([served.handshake | {"pid": 0}], DEADLINE_S).executor)
        mover.submit(Drop("directory", ChunkKey(bytes(32)), 0))
        assert [completion.outcome for completion in take(mover, 1)] == [Outcome.DONE]
        assert time.monotonic() - began_s < DEADLINE_S / 2
        greeting = f"kvtier rank {served.handshake['rank']} greeting"
        until(lambda: all(thread.name != greeting for thread in threading.enumerate()))
        assert mover.close(DEADLINE_S)


def test_only_so_many_connections_authenticate_themselves_at_once(served):
    with ExitStack() as strangers:
        silent = [strangers.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3 * rank_server.GREETINGS_MAX)]
        for stranger in silent:
            stranger.settimeout(DEADLINE_S)
            stranger.connect(served.address)
            assert stranger.recv(8) == rank_server._MAGIC
        for stranger in silent[: -rank_server.GREETINGS_MAX]:
            while stranger.recv(100):
                pass  # the rest of the greeting, until the end
        until(lambda: sum("greeting" in thread.name for thread in threading.enumerate()) <= rank_server.GREETINGS_MAX)


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_another_clock_is_refused(served, monkeypatch, ahead_s):
    class Other(struct.Struct):
        def pack(self, now_s):
            return super().pack(now_s + ahead_s)

    monkeypatch.setattr(rank_server, "_CLOCK", Other("<d"))
    with pytest.raises(ProtocolError, match=r"\d+\.\d s ahead of ours; they must share"):
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
