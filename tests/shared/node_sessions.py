"""Sessions of several nodes over a shared tier: `SessionContract`, which the tests of each kind run."""

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from typing import ClassVar

import pytest
from tests.rig import FINGERPRINT, LAYOUT, Engine, load_places, loaded, looked_up, places_of, prefix_of, stored

from kvtier.config.sections import Config, HostConfig, LimitsConfig, StoreConfig
from kvtier.keys.secret import Secret
from kvtier.runtime.arena import chunk_bytes
from kvtier.runtime.open import open_session
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.registry import TierSettings

CHUNKS = 4
TOKENS = 64
PREFIX = prefix_of(CHUNKS)
DEADLINE_S = 60.0
QUICK = {"transfer_deadline_s": 2.0, "probe_deadline_s": 0.5, "failures": 1, "retry_s": 0.2}
"""Limits of a tier that fails soon and is tried again soon."""

Act = Callable[[], object]


def opened(engine: Engine, *tiers, secret: bytes = bytes(range(32)), open_deadline_s: float = 30.0):
    config = Config(
        host=HostConfig(capacity_bytes=max(1 << 20, 8 * chunk_bytes(LAYOUT))),
        tiers=tiers,
        store=StoreConfig(secret=Secret(secret)),
        limits=LimitsConfig(open_deadline_s=open_deadline_s),
    )
    return open_session(config, LAYOUT, FINGERPRINT, engine.copier()).session


def store(engine: Engine, *tiers) -> None:
    """Store the prefix in sessions of its own, until one has written all. On a busy machine writes miss deadlines."""
    end_s, is_written = time.monotonic() + DEADLINE_S, False
    while not is_written:
        assert time.monotonic() < end_s, "not written"
        session = opened(engine, *tiers)
        stored(session, "store", PREFIX, places_of(range(CHUNKS)))
        is_written = session.close().flushed


def load(session, into: Engine, expected: Engine, request: str = "load") -> int:
    """Tokens that a load brings, all of them right."""
    tokens = looked_up(session, request, PREFIX).tokens
    if tokens:
        tokens = loaded(session, request, PREFIX, tokens, load_places(tokens)).tokens
        assert into.same(expected, load_places(tokens))
    return tokens


def load_until(session, into: Engine, expected: Engine, tokens: int) -> None:
    """Ask again until a load brings `tokens`."""
    end_s = time.monotonic() + DEADLINE_S
    number = 0
    while load(session, into, expected, f"load-{number}") != tokens:
        assert time.monotonic() < end_s, "not recovered"
        number += 1
        session.poll(0.1)


def changes(caplog, way: str) -> list[str]:
    """The log's lines about the health of the only tier that fails, of its reads or writes, in order."""
    lines = [record.getMessage() for record in caplog.records if record.msg == "tier %s %s"]
    return ["up" if "succeed again" in line else "down" for line in lines if f"{way}s " in line]


def await_health(session, caplog, expected: list[str]) -> None:
    """Wait until reads and writes have had these changes and no more, with stores that try the writes.

    An operation that began while the tier was away may fail after it is back, and stop it once more.
    """
    end_s, seeds = time.monotonic() + DEADLINE_S, itertools.count(100)
    once_more = [*expected, "down", "up"] if expected[-1] == "up" else expected
    while not all(changes(caplog, way) in (expected, once_more) for way in ("read", "write")):
        assert time.monotonic() < end_s, caplog.text
        stored(session, "trial", prefix_of(CHUNKS, seed=next(seeds)), places_of(range(CHUNKS)))
        session.poll(0.1)


def damages(whole: Sequence[bytes]) -> dict[str, Callable[[bytes], bytes]]:
    """What can be wrong with the frames `whole`, each of which gives a miss."""

    def another_one(content: bytes) -> bytes:
        return next(other for other in whole if other != content)

    return {
        "flipped": lambda content: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "truncated": lambda content: content[: len(content) // 2],
        "empty": lambda _: b"",
        "foreign": lambda content: b"<html>" * (len(content) // 6),
        "of another format": lambda content: content[:8] + (99).to_bytes(4, "little") + content[12:],
        "another object's": another_one,
    }


class SessionContract:
    """What sessions on two nodes may rely on, whatever the kind of their shared store. A kind gives the fixtures."""

    harmless: ClassVar[Mapping[str, Callable[[bytes], bytes]]] = {}
    """Changes of a frame that the kind's reads do not see."""

    @pytest.fixture
    def places(self) -> tuple[TierSettings, TierSettings]:
        """The settings of a new store, as each of the two nodes has them."""
        raise NotImplementedError

    def frames(self) -> Mapping[Hashable, bytes]:
        """The frames in the store, by key."""
        raise NotImplementedError

    def replace(self, key: Hashable, frame: bytes) -> None:
        """Put `frame` in the place of another one."""
        raise NotImplementedError

    def test_what_one_node_stores_another_loads_and_other_secrets_do_not(self, places, tmp_path):
        here, there = Engine(64, seed=1), Engine(64, seed=2)
        drives = [DiskSettings(path=tmp_path / name, capacity_bytes=64 << 20) for name in "ab"]
        store(here, drives[0], places[0])
        with closing(opened(there, drives[1], places[1])) as session:
            assert load(session, there, here) == TOKENS
        with closing(opened(there, places[1], secret=bytes(32))) as session:
            assert load(session, there, here) == 0

    def test_damaged_frames_are_misses(self, places):
        """Of each kind of damage; the tests of a kind damage what it writes beside frames."""
        here = Engine(64, seed=1)
        store(here, places[0])
        whole = self.frames()
        assert len(whole) == 2 * CHUNKS

        def tokens() -> int:
            there = Engine(64, seed=2)
            with closing(opened(there, places[1])) as session:
                return load(session, there, here)

        assert tokens() == TOKENS
        for what, damage in {**damages([*whole.values()]), **self.harmless}.items():
            for key, frame in whole.items():
                self.replace(key, damage(frame))
            assert tokens() == (TOKENS if what in self.harmless else 0), what
        for key, frame in whole.items():
            self.replace(key, frame)
        assert tokens() == TOKENS, "the control: whole frames load again"


class ServerSessionContract(SessionContract):
    """The same, for a store on a server that a test can break."""

    @pytest.fixture
    def server(self) -> tuple[Act, Act]:
        """Ends the server, and starts it again, perhaps empty."""
        raise NotImplementedError

    @pytest.fixture
    def faults(self) -> Sequence[tuple[Act, Act]]:
        """What stops the server in the middle, and what mends it."""
        raise NotImplementedError

    def test_a_server_that_is_away_at_the_start_or_in_the_middle_costs_misses_until_it_is_back(
        self, places, server, faults, caplog
    ):
        caplog.set_level(logging.INFO)
        here, there = Engine(64, seed=1), Engine(64, seed=2)

        end, start = server
        end()
        start_s = time.monotonic()
        with closing(opened(there, places[1])) as session:
            assert load(session, there, here) == 0
            assert time.monotonic() - start_s < 15
            start()
            store(here, places[0])
            load_until(session, there, here, TOKENS)
        lines = [record.getMessage() for record in caplog.records]
        assert [sum(text in line for line in lines) for text in ("starts without this tier", "is open now")] == [1, 1]

        with closing(opened(there, places[1])) as session:
            for break_it, mend in faults:
                break_it()
                caplog.clear()
                start_s = time.monotonic()
                assert load(session, there, here) == 0
                assert time.monotonic() - start_s < 5
                await_health(session, caplog, ["down"])
                mend()
                await_health(session, caplog, ["down", "up"])
                assert len(caplog.records) <= 8, "of each kind of fault one line, and one of each change"
            store(here, places[0])
            load_until(session, there, here, TOKENS)
