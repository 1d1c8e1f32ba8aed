"""A rank that leaves announces it, and pending writes reach its tiers first."""

import threading
from dataclasses import replace

import pytest
from tests.faults.rank_world import opened
from tests.rank_worker import workers
from tests.rig import DEADLINE_S, FINGERPRINT, LAYOUT, Engine, config, looked_up, places_of, prefix_of, stored
from tests.system import until

from kvtier.config.sections import StoreConfig
from kvtier.runtime.open import open_core
from kvtier.runtime.protocol import Note
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_server import RankServer, connect


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_owed_is_flushed_before_a_rank_ends(tmp_path, count):
    directory = tmp_path / "kv"
    with workers(directory, count, seed=1) as started:
        below = connect([worker.handshake for worker in started])
        settings = config(directory, host_chunks=8 * count)
        settings = replace(settings, store=StoreConfig(write_policy="back"))
        kv = open_core(settings, LAYOUT, FINGERPRINT, below)
        prefix = prefix_of(4, kv.root)
        assert stored(kv.session, "a", prefix, places_of(range(4))).stored == 8
        assert not [path for path in (directory / "objects").rglob("*") if path.is_file()]
        closers = []

        def close() -> None:
            closers.append(threading.Thread(target=kv.session.close, args=[DEADLINE_S]))
            closers[-1].start()

        below.executor.when_leaving(close)
        assert [worker.ask("leave") for worker in started] == [True] * count
        assert closers
        for closer in closers:
            closer.join(DEADLINE_S)
        assert all(worker.end() for worker in started)
    with workers(directory, count, seed=11) as started, opened(directory, started) as (kv, _):
        assert looked_up(kv.session, "b", prefix).tokens == prefix.tokens


def test_a_core_that_does_not_care_costs_the_rank_its_patience_only(tmp_path):
    rank = open_rank(config(tmp_path / "kv"), LAYOUT, FINGERPRINT, Engine(64).copier())
    server = RankServer(rank, lambda _note: None)
    below = connect([server.handshake])
    assert server.is_here
    assert not server.leave(0.05)
    assert below.executor.close(DEADLINE_S)
    assert server.leave(DEADLINE_S)
    rank.close(DEADLINE_S)
    assert server.close(DEADLINE_S)


def test_a_rank_without_a_connection_leaves_at_once(tmp_path):
    rank = open_rank(config(tmp_path / "kv"), LAYOUT, FINGERPRINT, Engine(64).copier())
    server = RankServer(rank, lambda _note: None)
    assert server.leave(0.0)
    rank.close(DEADLINE_S)
    assert server.close(DEADLINE_S)


def test_leaving_of_any_rank_is_announced(tmp_path):
    with workers(tmp_path / "kv", 2) as started:
        below = connect([worker.handshake for worker in started])
        received = []
        below.executor.when_leaving(lambda: received.append(1))
        asking = threading.Thread(target=started[1].ask, args=["leave"])
        asking.start()
        until(lambda: received == [1])
        below.executor.send_note(Note("still here"))
        assert below.executor.close(DEADLINE_S)
        asking.join(DEADLINE_S)
