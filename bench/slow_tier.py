"""What a slow shared tier costs the tiers in front of it: stores, lookups and loads with and without it, in turn.

    python bench/slow_tier.py --dir DIR --record bench/records/slow_tier.json

Host memory, a disk tier and, in every other round, a tier in memory that takes `--slow-s` for each request. Host memory
holds a fraction of the objects, so loads read the disk. The row "all but one" looks up prompts whose last chunk no
tier has: the slow tier is asked for it, and the request waits at most a share of what computing it takes (ADR 13).
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from tests.memory_tier import MemoryTier

from kvtier.bench.record import RecordedSetting, make_record
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.report.output import write_json
from kvtier.report.table import Table, print_table
from kvtier.runtime.arena import Arena
from kvtier.runtime.mover import Mover
from kvtier.runtime.session import Session
from kvtier.testing.host_copier import HostCopier
from kvtier.tier.base import About, Tier
from kvtier.tier.disk.tier import DiskTier
from kvtier.types import ChunkKey, LoadDone, ObjectName, Place, Prefix, Presence, RequestId, StoreDone

CHUNK_TOKENS = 256
LAYERS = 32
LAYER_BYTES = 128 << 10
CHUNKS = 16
"""Chunks of a prompt."""
PROMPTS = 8
SLOTS = 96
COMPUTE_S = 1.0
"""Stated time of computing a prompt."""
DEADLINE_S = 120.0
LAYOUT = KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (LAYER_BYTES,) * LAYERS, "bench"),))


class SlowTier(MemoryTier):
    """A store in which every request takes `slow_s` seconds, and many run at once."""

    def __init__(self, slow_s: float) -> None:
        super().__init__("far", capacity_bytes=4 << 30)
        self._slow_s = slow_s

    def contains(self, names: Sequence[ObjectName]) -> list[bool]:
        """See `Tier`."""
        time.sleep(self._slow_s)
        return super().contains(names)

    def read_one(self, name: ObjectName, into: memoryview, offset: int) -> int | None:
        """See `Tier`."""
        time.sleep(self._slow_s)
        return super().read_one(name, into, offset)

    def write_one(self, name: ObjectName, frame: memoryview, about: About) -> bool:
        """See `Tier`."""
        time.sleep(self._slow_s)
        return super().write_one(name, frame, about)


def prompt(number: int, extra: int = 0) -> Prefix:
    """A prompt of `CHUNKS` chunks, and `extra` ones that no tier has."""
    return Prefix(tuple(ChunkKey(b"%5d %26d" % (number, chunk)) for chunk in range(CHUNKS + extra)), CHUNK_TOKENS)


@contextmanager
def session_over(root: Path, slow_s: float | None) -> Iterator[tuple[Session, list[Place]]]:
    """A session with an empty disk tier and, unless None, a slow tier behind it."""
    blocks = [np.zeros((CHUNKS, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]
    tiers: dict[str, Tier] = {"disk": DiskTier(root, capacity_bytes=4 << 30)}
    rules = [TierRules(name="disk")]
    if slow_s is not None:
        tiers["far"] = SlowTier(slow_s)
        rules.append(TierRules(name="far", is_remote=True))
    arena = Arena(LAYOUT, (SLOTS,), populate=True)
    mover = Mover(layout=LAYOUT, fingerprint=bytes(32), arena=arena, copier=HostCopier(LAYOUT, [blocks]), tiers=tiers)
    cache = Cache(layout=LAYOUT, slots=(SLOTS,), tiers=rules, evictor=lambda: make_evictor("lru"), limits=Limits())
    session = Session(cache, mover)
    try:
        yield session, [Place(0, chunk, (chunk,)) for chunk in range(CHUNKS)]
    finally:
        session.close(0.0)
        for tier in tiers.values():
            tier.close()
        arena.close()


def ended(session: Session, kind: type) -> StoreDone | LoadDone:
    """The next event of `kind`.

    Raises:
        TimeoutError: none came in time.
    """
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        for event in session.poll(0.05):
            if isinstance(event, kind):
                return event
    raise TimeoutError(f"no {kind.__name__} within {DEADLINE_S:g} s")


def look_up_ms(session: Session, name: str, prefix: Prefix) -> tuple[float, int]:
    """Milliseconds of a lookup, and the tokens it found."""
    start_s = time.perf_counter()
    answer = session.lookup(RequestId(name), prefix, compute_s=COMPUTE_S, wait_s=DEADLINE_S)
    assert answer.presence is not Presence.PROBING
    return (time.perf_counter() - start_s) * 1e3, answer.tokens


def measure(root: Path, slow_s: float | None) -> dict[str, list[float]]:
    """One round: milliseconds of each store, lookup and load, and the objects that were not found again."""
    samples: dict[str, list[float]] = {"store": [], "lookup": [], "lookup, all but one": [], "load": [], "lost": []}
    with session_over(root, slow_s) as (session, places):
        for number in range(PROMPTS):
            start_s = time.perf_counter()
            session.store(RequestId(f"s{number}"), prompt(number), places)
            done = ended(session, StoreDone)
            samples["store"].append((time.perf_counter() - start_s) * 1e3)
            session.release(RequestId(f"s{number}"))
            samples["lost"].append(done.dropped)
        time.sleep(1.0)  # the disk's queue runs empty
        for number in range(PROMPTS):
            spent_ms, tokens = look_up_ms(session, f"l{number}", prompt(number))
            samples["lookup"].append(spent_ms)
            samples["lost"].append(CHUNKS - tokens / CHUNK_TOKENS)
            start_s = time.perf_counter()
            session.load(RequestId(f"l{number}"), prompt(number), tokens, places[: tokens // CHUNK_TOKENS])
            ended(session, LoadDone)
            samples["load"].append((time.perf_counter() - start_s) * 1e3)
            session.release(RequestId(f"l{number}"))
            samples["lookup, all but one"].append(look_up_ms(session, f"m{number}", prompt(number, 1))[0])
            session.release(RequestId(f"m{number}"))
    return samples


def main() -> None:
    """Run all rounds, print the table and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="directory on the drive to measure [a temporary one]")
    parser.add_argument("--slow-s", type=float, default=0.2, help="seconds of each request of the slow tier [0.2]")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each arm [5]")
    parser.add_argument("--record", type=Path, help="write a JSON record")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kvtier-slow-", dir=options.dir))
    arms: dict[str, float | None] = {"disk": None, "disk, slow tier": options.slow_s}
    samples: dict[str, dict[str, list[float]]] = {arm: {} for arm in arms}
    try:
        for round_ in range(options.repeats):
            for arm, slow_s in arms.items():
                for name, values in measure(work / f"{round_} {slow_s}", slow_s).items():
                    samples[arm].setdefault(name, []).extend(values)
                shutil.rmtree(work / f"{round_} {slow_s}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    without, beside = samples.values()
    rows = [
        (name, statistics.median(without[name]), statistics.median(beside[name])) for name in without if name != "lost"
    ]
    results = {name: {"without_ms": a, "with_ms": b, "ratio": b / a} for name, a, b in rows}
    lost = {arm: sum(of_arm["lost"]) for arm, of_arm in samples.items()}
    print_table(
        Table(
            ("median", "without, ms", "with, ms", "ratio"),
            [(name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}") for name, a, b in rows],
            title=f"a tier of {options.slow_s:g} s a request behind the disk; objects lost: {lost}",
        )
    )
    if options.record is not None:
        settings = {
            name: RecordedSetting(value, "default")
            for name, value in (
                ("slow_s", options.slow_s),
                ("repeats", options.repeats),
                ("chunk_bytes", LAYERS * LAYER_BYTES),
                ("chunks", CHUNKS),
                ("prompts", PROMPTS),
                ("slots", SLOTS),
                ("compute_s", COMPUTE_S),
            )
        }
        record = make_record(
            "slow_tier", settings=settings, seed=None, results={**results, "lost": lost}, samples=[samples]
        )
        write_json("--record", options.record, record)


if __name__ == "__main__":
    main()
