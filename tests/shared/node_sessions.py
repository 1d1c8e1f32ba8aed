"""Sessions of several nodes over a shared tier, for the tests of each kind."""

import itertools
import time
from collections.abc import Callable, Sequence

from tests.rig import FINGERPRINT, LAYOUT, Engine, load_places, loaded, looked_up, places_of, prefix_of, stored

from kvtier.config.sections import Config, HostConfig, LimitsConfig, StoreConfig
from kvtier.keys.secret import Secret
from kvtier.runtime.arena import chunk_bytes
from kvtier.runtime.open import open_session

CHUNKS = 4
TOKENS = 64
PREFIX = prefix_of(CHUNKS)
DEADLINE_S = 60.0


def opened(engine: Engine, *tiers, secret: bytes = bytes(range(32)), open_deadline_s: float = 30.0):
    config = Config(
        host=HostConfig(capacity_bytes=max(1 << 20, 8 * chunk_bytes(LAYOUT))),
        tiers=tiers,
        store=StoreConfig(secret=Secret(secret)),
        limits=LimitsConfig(open_deadline_s=open_deadline_s),
    )
    return open_session(config, LAYOUT, FINGERPRINT, engine.copier()).session


def store(session) -> None:
    stored(session, "store", PREFIX, places_of(range(CHUNKS)))


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
