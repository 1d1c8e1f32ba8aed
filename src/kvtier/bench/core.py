"""What a request costs before a byte moves: hashing, lookup, decisions, for 131,072 tokens in 512 chunks."""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.keys.chain import chunk_keys
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.types import ChunkKey, Outcome, Place, Prefix, Presence, Probe, RequestId, Transfer

PROMPT_TOKENS = 131_072
CHUNK_TOKENS = 256
LAYER_BYTES = 1 << 20
LAYERS = 32
REPEATS = 21


@dataclass(frozen=True, slots=True)
class CoreResult:
    """Medians in milliseconds, and every sample behind them."""

    prompt_tokens: int
    chunks: int
    repeats: int
    hash_ms: float
    """Token list to keys."""
    lookup_ms: float
    """One lookup, everything in host memory."""
    lookup_below_ms: float
    """Both lookups around a probe's answer, everything in a lower tier."""
    decide_ms: float
    """All decisions of storing the prompt in host memory and loading it again, each transfer's completion included."""
    demote_ms: float
    """What write-through to one lower tier adds to storing it."""
    samples: dict[str, list[float]]


def run(repeats: int = REPEATS, seed: int = 1, progress: Callable[[float], None] = lambda _step: None) -> CoreResult:
    """Measure; each repeat on fresh state."""
    draw = random.Random(seed)  # noqa: S311 - seeded on purpose
    tokens = [draw.randrange(128_000) for _ in range(PROMPT_TOKENS)]
    root = draw.randbytes(32)
    samples: dict[str, list[float]] = {name: [] for name in ("hash", "lookup", "lookup_below", "decide", "demote")}
    for _ in range(repeats):
        start = time.perf_counter()
        keys = chunk_keys(root, tokens, CHUNK_TOKENS)
        samples["hash"].append(_ms_since(start))
        prefix = Prefix(keys, CHUNK_TOKENS)
        decide, cache = _decide(prefix)
        samples["decide"].append(decide)
        start = time.perf_counter()
        answer = cache.lookup(RequestId("again"), prefix, 0.0)
        samples["lookup"].append(_ms_since(start))
        assert answer.tokens == PROMPT_TOKENS
        through, below = _through(prefix)
        samples["demote"].append(max(0.0, through - _store_only(prefix)))
        samples["lookup_below"].append(below)
        progress(1)
    medians = {f"{name}_ms": round(statistics.median(values), 4) for name, values in samples.items()}
    return CoreResult(
        prompt_tokens=PROMPT_TOKENS,
        chunks=PROMPT_TOKENS // CHUNK_TOKENS,
        repeats=repeats,
        samples={name: [round(value, 4) for value in values] for name, values in samples.items()},
        **medians,
    )


def _cache(slots: int, tiers: Iterable[str] = ()) -> Cache:
    layout = KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (LAYER_BYTES,) * LAYERS, "bench"),))
    return Cache(
        layout=layout,
        slots=(slots,),
        tiers=list(tiers),
        evictor=lambda: make_evictor(Config().host.evictor),
    )


def _decide(prefix: Prefix) -> tuple[float, Cache]:
    cache = _cache(len(prefix.keys) + 2)
    places = _places(prefix)
    start = time.perf_counter()
    cache.store(RequestId("store"), prefix, places, 0.0)
    _obey(cache, set())
    cache.load(RequestId("load"), prefix, PROMPT_TOKENS, places, 0.0)
    _obey(cache, set())
    return _ms_since(start), cache


def _store_only(prefix: Prefix) -> float:
    cache = _cache(len(prefix.keys) + 2)
    places = _places(prefix)
    start = time.perf_counter()
    cache.store(RequestId("store"), prefix, places, 0.0)
    _obey(cache, set())
    return _ms_since(start)


def _through(prefix: Prefix) -> tuple[float, float]:
    """Milliseconds of a write-through store, and of a lookup of what only the lower tier holds afterwards."""
    held: set[ChunkKey] = set()
    places = _places(prefix)
    cache = _cache(len(prefix.keys) + 2, ["disk"])
    start = time.perf_counter()
    cache.store(RequestId("store"), prefix, places, 0.0)
    _obey(cache, held)
    stored = _ms_since(start)
    fresh = _cache(len(prefix.keys) + 2, ["disk"])
    start = time.perf_counter()
    fresh.lookup(RequestId("below"), prefix, 0.0)
    _obey(fresh, held)
    answer = fresh.lookup(RequestId("below"), prefix, 0.0)
    below = _ms_since(start)
    assert answer.presence is Presence.ARRIVING
    assert answer.tokens == PROMPT_TOKENS
    return stored, below


def _obey(cache: Cache, held: set[ChunkKey]) -> None:
    """Answer all that is out at once, as a mover of no cost would."""
    while commands := cache.take_commands():
        for command in commands:
            if isinstance(command, Transfer):
                if command.tier:
                    held.add(command.key)
                cache.complete(command.id, Outcome.DONE, 0.0)
            elif isinstance(command, Probe):
                cache.probed(command.id, [key in held for key, _ in command.objects], 0.0)
        cache.advance(0.0)
    cache.take_events()


def _places(prefix: Prefix) -> list[Place]:
    return [Place(0, chunk, (chunk,)) for chunk in range(len(prefix.keys))]


def _ms_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
