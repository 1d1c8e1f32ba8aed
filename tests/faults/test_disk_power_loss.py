"""Power is lost at any write: what was synced is found, nothing wrong is ever given, and the accounts are exact."""

import random
import shutil

import pytest
from disk_world import (
    CAPACITY_BYTES,
    SEGMENT_BYTES,
    Recorder,
    abandon,
    check_accounts,
    look,
    open_tier,
    sealed,
    write_all,
)

from kvtier.testing.tier_contract import object_name
from kvtier.tier.disk.segment import Segment

NAMES = 90


class Run:
    """A tier at work, and what it had promised at each entry of the device's log."""

    def __init__(self, root, monkeypatch, seed, steps):
        self.recorder = Recorder(monkeypatch)
        self.promised: list[tuple[int, set[int]]] = [
            (0, set())
        ]  # (entries in the log, numbers that were synced by then)
        self.held_at: list[tuple[int, set[int]]] = [(0, set())]
        self.generations: set[int] = set()
        chance = random.Random(seed)
        tier = open_tier(root)
        for _ in range(steps):
            what = chance.randrange(20)
            number = min(int(chance.expovariate(1 / 25)), NAMES - 1)
            if what < 3:
                write_all(tier, {min(number + more, NAMES - 1) for more in range(4)})
            elif what < 10:
                assert tier.write(object_name(number), sealed(number))
            elif what < 16:
                assert look(tier, number) in {"right", "absent"}
            elif what < 17:
                tier.delete(object_name(number))
            elif what < 19:
                tier.sync()
                self.promised.append((len(self.recorder.log), self._held(tier)))
            else:
                tier._pool.prepare()
            self.held_at.append((len(self.recorder.log), self._held(tier)))
        self.tier = tier

    @staticmethod
    def _held(tier):
        return {number for number in range(NAMES) if tier._pool.contains([object_name(number)])[0]}

    def owed(self, stop):
        """Numbers that must be found after a loss of power behind `stop` entries: synced, and held ever since."""
        when, synced = [pair for pair in self.promised if pair[0] <= stop][-1]
        owed = set(synced)
        for at, held in self.held_at:
            # What the step under way at the cut gives up may be gone already.
            if at >= when:
                owed &= held
            if at > stop:
                break
        return owed


def replay(run, root, place, rounds, seed):
    found, refused = 0, 0
    chance = random.Random(seed)
    for _ in range(rounds):
        stop = chance.randrange(len(run.recorder.log) + 1)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copy(root / "kvtier-disk.json", place)
        run.recorder.play(place, stop, SEGMENT_BYTES, chance)
        tier = open_tier(place)
        check_accounts(tier, place)
        seen = {number: look(tier, number) for number in range(NAMES)}
        assert "wrong" not in seen.values()
        missing = {number for number in run.owed(stop) if seen[number] != "right"}
        assert not missing, (stop, missing)
        found += sum(what == "right" for what in seen.values())
        refused += sum(what == "refused" for what in seen.values())
        # And it goes on from there.
        number = chance.randrange(NAMES)
        tier.delete(object_name(number))
        assert tier.write(object_name(number), sealed(number))
        assert look(tier, number) == "right"
        check_accounts(tier, place)
        abandon(tier)
    return found, refused


def lose_power(tmp_path, monkeypatch, seed, steps, rounds):
    run = Run(tmp_path / "store", monkeypatch, seed, steps)
    assert run.tier.evictions > 50
    abandon(run.tier)
    monkeypatch.undo()
    found, refused = replay(run, tmp_path / "store", tmp_path / "after", rounds, seed)
    assert found > 8 * rounds
    assert refused < found / 10


@pytest.mark.parametrize("seed", range(2))
def test_nothing_synced_is_lost_and_nothing_is_wrong(tmp_path, monkeypatch, seed):
    lose_power(tmp_path, monkeypatch, seed, 450, 15)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 120))
def test_nothing_synced_is_lost_over_and_over(tmp_path, monkeypatch, seed):
    lose_power(tmp_path, monkeypatch, seed, 900, 60)


def test_without_the_flush_before_the_index_frames_would_be_missing(tmp_path, monkeypatch):
    """The negative control: the promise rests on the order of the sync."""
    monkeypatch.setattr(Segment, "flush", lambda _segment: None)
    run = Run(tmp_path / "store", monkeypatch, 0, 400)
    abandon(run.tier)
    run.recorder.log = [entry for entry in run.recorder.log if entry[2] is not None]
    run.promised = [(0, set())]
    monkeypatch.undo()
    _, refused = replay(run, tmp_path / "store", tmp_path / "after", 15, 0)
    assert refused > 0


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_what_the_index_names_was_on_the_device_before(tmp_path, monkeypatch, step):
    """With room for everything no entry is stale, so that nothing at all is refused, wherever the power went."""
    root, place, roomy = tmp_path / "store", tmp_path / "after", 40 * SEGMENT_BYTES
    recorder, chance = Recorder(monkeypatch), random.Random(3)
    tier = open_tier(root, roomy)
    for number in range(NAMES):
        assert tier.write(object_name(number), sealed(number))
        if chance.random() < 0.2:
            tier.sync()
    abandon(tier)
    monkeypatch.undo()
    found = 0
    for stop in range(0, len(recorder.log), step):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copy(root / "kvtier-disk.json", place)
        recorder.play(place, stop, SEGMENT_BYTES, chance)
        tier = open_tier(place, roomy)
        seen = [look(tier, number) for number in range(NAMES)]
        assert set(seen) <= {"right", "absent"}
        found += seen.count("right")
        abandon(tier)
    assert found > 100


def test_the_cap_holds_while_segments_are_turned(tmp_path, open_disk):
    """Six segments, of which one is kept spare once it is full."""
    tier = open_disk(tmp_path / "store")
    for number in range(NAMES):
        assert tier.write(object_name(number), sealed(number))
        tier._pool.prepare()
        assert tier.used_bytes <= CAPACITY_BYTES
    assert tier.used_bytes == CAPACITY_BYTES
