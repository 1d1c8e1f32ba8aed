"""Measures a session's calls: lookups idle and beside a busy Python thread, loads of a chunk, many small objects.

    python bench/session.py --record bench/records/session.json

Everything is in memory, so this is the time of kvtier's own code. ADR 12 quotes the figures.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from tests.memory_tier import MemoryTier

from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.keys.chain import Chain
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.report.output import write_json
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.mover import Mover
from kvtier.runtime.session import Session
from kvtier.testing.host_copier import HostCopier
from kvtier.tier.base import Tier
from kvtier.tools.run_record import RecordedSetting, make_record
from kvtier.types import LoadDone, Place, Prefix, RequestId, StoreDone

CHUNK_TOKENS = 16
LAYER_BYTES = 4096
LAYERS = 4
LAYOUT = KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (LAYER_BYTES,) * LAYERS, "bench"),))
LONG_CHUNKS = 512
OBJECT_CHUNKS = 16
"""Chunks of a request in the throughput of small objects."""
CALLERS = (1, 2, 4)
PAUSE_S = 0.002
"""Pause between calls beside a busy thread, which then takes the interpreter, as when an engine awaits its device."""
DEADLINE_S = 30.0


def opened(cache: Cache, mover: Mover) -> Session:
    """Open a session."""
    return Session(cache, mover)


@contextmanager
def session_of(slots: int, tier: Tier) -> Iterator[Session]:
    """Open a session over `tier`, with host memory for `slots` chunks and an engine of as many blocks."""
    engine = [np.zeros((slots, LAYER_BYTES), np.uint8) for _ in range(LAYERS)]
    arena = Arena(LAYOUT, (slots,))
    mover = Mover(
        CommandRunner(
            layout=LAYOUT,
            model=bytes(16),
            arena=arena,
            copier=HostCopier(LAYOUT, [engine]),
            tiers={"below": tier},
        )
    )
    cache = Cache(
        layout=LAYOUT,
        slots=(slots,),
        tiers=[TierRules(name="below")],
        evictor=lambda: make_evictor(Config().host.evictor),
    )
    session = opened(cache, mover)
    try:
        yield session
    finally:
        session.close(DEADLINE_S)


def prefix_of(chunks: int, seed: int) -> Prefix:
    """Return a random prompt."""
    chain = Chain(bytes(32), CHUNK_TOKENS)
    chain.extend(np.random.default_rng(seed).integers(0, 1000, chunks * CHUNK_TOKENS).tolist())
    return chain.prefix()


def places_of(chunks: int, first: int = 0) -> list[Place]:
    """Return places in which chunk n is in block `first` + n."""
    return [Place(0, chunk, (first + chunk,)) for chunk in range(chunks)]


def stored(session: Session, name: str, prefix: Prefix, places: list[Place]) -> None:
    """Store, and wait for the end."""
    session.store(RequestId(name), prefix, places)
    _await(session, StoreDone, name)


def _await(session: Session, kind: type, name: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if any(isinstance(event, kind) and event.request == name for event in session.poll(1.0)):
            return
    raise TimeoutError(f"no {kind.__name__} of {name}")


def lookups(chunks: int, repeats: int, pause_s: float = 0.0) -> list[float]:
    """Measure the microseconds of lookups of `chunks` chunks in host memory."""
    prefix = prefix_of(chunks, 1)
    with session_of(chunks + 8, MemoryTier("below", capacity_bytes=1 << 30)) as session:
        stored(session, "seed", prefix, places_of(chunks))
        time.sleep(0.5)  # wait for the writes to the tier

        def look_up(number: int) -> None:
            session.lookup(RequestId(f"l{number}"), prefix)

        return _timed(look_up, repeats, pause_s)


def loads(repeats: int, pause_s: float = 0.0) -> list[float]:
    """Measure the microseconds from the load of a chunk that only the tier has to its event."""
    tier = MemoryTier("below", capacity_bytes=1 << 30)
    prefixes = [prefix_of(1, seed) for seed in range(repeats)]
    with session_of(64, tier) as session:
        for number, prefix in enumerate(prefixes):
            stored(session, f"s{number}", prefix, places_of(1))
    with session_of(repeats + 64, tier) as session:
        for number, prefix in enumerate(prefixes):
            session.lookup(RequestId(f"l{number}"), prefix, wait_s=1.0)

        def load(number: int) -> None:
            session.load(RequestId(f"l{number}"), prefixes[number], CHUNK_TOKENS, places_of(1))
            _await(session, LoadDone, f"l{number}")

        return _timed(load, repeats, pause_s)


def _timed(act: Callable[[int], None], repeats: int, pause_s: float) -> list[float]:
    samples: list[float] = []
    for number in range(repeats):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        act(number)
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


def objects_per_s(callers: int, seconds: float) -> float:
    """Measure how many objects per second `callers` threads store and load again, each with its own requests."""
    events: dict[str, threading.Event] = {}
    count = [0] * callers
    slots = callers * OBJECT_CHUNKS * 4
    with session_of(slots, MemoryTier("below", capacity_bytes=1 << 30)) as session:
        until_s = time.monotonic() + seconds

        def poll() -> None:
            while time.monotonic() < until_s + 1.0:
                for event in session.poll(0.1):
                    if isinstance(event, LoadDone | StoreDone) and event.request in events:
                        events.pop(event.request).set()

        def call(number: int) -> None:
            places, turn = places_of(OBJECT_CHUNKS, number * OBJECT_CHUNKS), 0
            while time.monotonic() < until_s:
                turn += 1
                prefix, name = prefix_of(OBJECT_CHUNKS, number + callers * (turn % 50)), RequestId(f"{number}.{turn}")
                for act in (
                    lambda name=name, prefix=prefix: session.store(name, prefix, places),
                    lambda name=name, prefix=prefix: session.load(name, prefix, prefix.tokens, places),
                ):
                    ended = events[name] = threading.Event()
                    act()
                    ended.wait(DEADLINE_S)
                session.release(name)
                count[number] += 2 * OBJECT_CHUNKS

        threads = [threading.Thread(target=call, args=(number,)) for number in range(callers)]
        threads.append(threading.Thread(target=poll))
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join(seconds + DEADLINE_S)
        elapsed_s = time.monotonic() - start
        threads[-1].join(DEADLINE_S)
    return sum(count) / elapsed_s


@contextmanager
def busy_thread() -> Iterator[None]:
    """Run a thread that executes Python code without a pause."""
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(DEADLINE_S)


def run(repeats: int, seconds: float) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return medians in microseconds and objects per second, and the samples."""
    samples = {
        "lookup_1_us": lookups(1, repeats),
        f"lookup_{LONG_CHUNKS}_us": lookups(LONG_CHUNKS, repeats),
        "load_us": loads(repeats),
    }
    with busy_thread():
        samples["lookup_1_busy_us"] = lookups(1, repeats, PAUSE_S)
        samples[f"lookup_{LONG_CHUNKS}_busy_us"] = lookups(LONG_CHUNKS, repeats, PAUSE_S)
        samples["load_busy_us"] = loads(repeats, PAUSE_S)
    results = {name: round(statistics.median(values), 1) for name, values in samples.items()}
    for callers in CALLERS:
        results[f"objects_per_s_{callers}"] = round(objects_per_s(callers, seconds))
    return results, {name: [round(value, 1) for value in values] for name, values in samples.items()}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=300, help="samples per latency")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each throughput")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the JSON record to FILE")
    given = parser.parse_args()
    results, samples = run(given.repeats, given.seconds)
    print(json.dumps(results, indent=1))
    if given.record is not None:
        settings = {
            "repeats": RecordedSetting(given.repeats, "flag"),
            "seconds": RecordedSetting(given.seconds, "flag"),
        }
        write_json(
            "--record",
            given.record,
            make_record("session", settings=settings, seed=None, results=results, samples=[samples]),
        )


if __name__ == "__main__":
    main()
