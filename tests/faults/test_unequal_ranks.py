"""Two ranks with different layers, as pipeline stages have them: a chunk counts when both have it, whatever happens."""

import shutil
import signal
import time

import pytest
from tests.faults.rank_world import opened
from tests.rank_worker import workers
from tests.rig import CHUNK_TOKENS, DEADLINE_S, STAGES, load_places, loaded, looked_up, places_of, prefix_of, stored
from tests.system import until

from kvtier.codec.frame import frame_bytes
from kvtier.codec.frame_header import read_head
from kvtier.observe.metric_definitions import CAPACITY_BYTES
from kvtier.runtime import rank_group
from kvtier.runtime.rank_server import ProtocolError, connect
from kvtier.types import SEVERITY, LoadDone, RequestId, StoreDone

CHUNKS = 12


def ended(session, kind):
    """The next event of this kind."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        for event in session.poll(0.1):
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory):
    """A store with a prefix of two stages, whose blocks have the seeds 1 and 2."""
    directory = tmp_path_factory.mktemp("stages") / "kv"
    with workers(directory, 2, seed=1, shape="stages") as started, opened(directory, started) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        stored(kv.session, "a", prefix, places_of(range(CHUNKS)))
        assert kv.session.close(DEADLINE_S).flushed
    return directory, prefix


@pytest.fixture
def kept(stored_once, tmp_path):
    directory, prefix = stored_once
    return shutil.copytree(directory, tmp_path / "kv"), prefix


def reads_all(directory, prefix):
    """Whether two other ranks find all of it, with the bytes of the first ones."""
    with workers(directory, 2, seed=11, shape="stages") as started:
        with opened(directory, started) as (kv, _):
            tokens = looked_up(kv.session, "b", prefix).tokens
            assert loaded(kv.session, "b", prefix, tokens, load_places(tokens)).tokens == tokens
        assert [it.ask("same", 1 + rank, tokens) for rank, it in enumerate(started)] == [True, True]
        return tokens == CHUNKS * CHUNK_TOKENS


def test_a_chunk_takes_the_bytes_of_both_and_the_same_slots_on_each(tmp_path):
    with workers(tmp_path / "kv", 2, shape="stages") as started:
        (slots,) = {tuple(it.handshake["slots"]) for it in started}
        with opened(tmp_path / "kv", started) as (kv, _):
            until(lambda: kv.metrics.get(CAPACITY_BYTES, place="host"))
            taken = sum(
                count * frame_bytes(group) for it in STAGES for count, group in zip(slots, it.groups, strict=True)
            )
            assert kv.metrics.get(CAPACITY_BYTES, place="host") == taken
            assert kv.session._cache.host.object_bytes == (
                STAGES[0].groups[0].payload_bytes,
                STAGES[1].groups[1].payload_bytes,
            )


def test_ranks_with_the_same_part_are_refused_with_both_named(tmp_path):
    with workers(tmp_path / "kv", 2, shape="stages") as started:
        handshakes = [it.handshake for it in started]
        handshakes[1] = handshakes[1] | {"parts": [handshakes[0]["parts"][0], handshakes[1]["parts"][1]]}
        with pytest.raises(
            ProtocolError, match=r"rank 0 holds \('layers 0-1, copy 0', .* and rank 1 \('layers 0-1, copy 0'"
        ):
            connect(handshakes)


def ended_after(act, worker, gate, session, kind):
    """The end of a store or load, in which `worker` is killed, or stopped and continued."""
    until(gate.with_suffix(".held").exists)
    worker.signal(act)
    gate.unlink()
    if act is signal.SIGSTOP:
        assert not [it for it in session.poll(0.3) if isinstance(it, kind)]
        worker.signal(signal.SIGCONT)
    return ended(session, kind)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_stops_in_a_load_lets_nothing_wrong_through(kept, tmp_path, rank, act):
    directory, prefix = kept
    gate, tokens = tmp_path / "gate", CHUNKS * CHUNK_TOKENS
    gate.touch()
    with workers(directory, 2, seed=21, gate=gate, shape="stages") as started:
        with opened(directory, started) as (kv, _):
            assert looked_up(kv.session, "b", prefix).tokens == tokens
            kv.session.load(RequestId("b"), prefix, tokens, load_places(tokens))
            done = ended_after(act, started[rank], gate, kv.session, LoadDone)
        if act is signal.SIGSTOP:
            assert done.tokens == tokens
            assert [it.ask("same", 1 + number, tokens) for number, it in enumerate(started)] == [True, True]
        else:
            assert done.tokens < tokens
    assert reads_all(directory, prefix)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("act", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_dies_or_stops_in_a_store_leaves_nothing_wrong_behind(tmp_path, rank, act):
    directory, gate = tmp_path / "kv", tmp_path / "gate"
    gate.write_text("gather")
    here = {"seed": 1, "gate": gate, "shape": "stages"}
    with workers(directory, 2, **here) as started, opened(directory, started) as (kv, _):
        prefix = prefix_of(CHUNKS, kv.root)
        kv.session.store(RequestId("a"), prefix, places_of(range(CHUNKS)))
        done = ended_after(act, started[rank], gate, kv.session, StoreDone)
        assert kv.session.close(DEADLINE_S)
    if act is signal.SIGSTOP:
        assert (done.stored, done.dropped) == (2 * CHUNKS, 0)
        assert reads_all(directory, prefix)
    else:
        assert done.stored < 2 * CHUNKS
        reads_all(directory, prefix)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_chunk_that_one_stage_has_lost_is_no_hit(kept, monkeypatch, is_planted):
    """Planted: a chunk counts when one rank has it. Then a load says that it is complete, and one stage lacks it."""
    directory, prefix = kept
    lost = [path for path in (directory / "objects").rglob("*") if path.is_file() and is_of(path, STAGES[1], 2)]
    assert len(lost) == 1
    lost[0].unlink()
    (directory / "index").unlink(missing_ok=True)
    if is_planted:
        monkeypatch.setattr(rank_group, "merged", best)
    with workers(directory, 2, seed=31, shape="stages") as started:
        with opened(directory, started) as (kv, _):
            tokens = looked_up(kv.session, "b", prefix).tokens
            assert tokens == (CHUNKS if is_planted else 2) * CHUNK_TOKENS
            assert loaded(kv.session, "b", prefix, tokens, load_places(tokens)).tokens == tokens
        assert [it.ask("same", 1 + rank, tokens) for rank, it in enumerate(started)] == [True, not is_planted]


def is_of(path, layout, depth):
    """Whether a file holds the history of the rank with `layout`, with `depth` chunks before it."""
    identity = read_head(memoryview(path.read_bytes())).identity
    return (identity.group, identity.part, identity.depth) == (0, layout.part(0), depth)


def best(one, other):
    """What a rank group must not do: the better of two completions."""
    return min(one, other, key=lambda it: (SEVERITY[it.outcome], -sum(it.present)))
