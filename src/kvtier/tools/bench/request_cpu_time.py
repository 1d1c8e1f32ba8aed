"""`kvtier bench core`: CPU time of a request before any byte moves, for 131,072 tokens in 512 chunks.

The time covers hashing, lookup and decisions.
"""

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.config.sections import Config
from kvtier.core.cache import Cache
from kvtier.core.limits import TierRules
from kvtier.keys.chain import chunk_keys
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.tools.bench.repeats import Advance, repeated
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
    """Time to turn the list of tokens into keys."""
    lookup_ms: float
    """Time of one lookup if all chunks are in host memory."""
    lookup_below_ms: float
    """Time of two lookups and the probe between them, if all chunks are in a lower tier."""
    decide_ms: float
    """Time of all decisions to store the prompt in host memory and load it, including completions."""
    demote_ms: float
    """Time of the further decisions to write the prompt through to one lower tier."""
    samples: dict[str, list[float]]


def run(repeats: int = REPEATS, seed: int = 1, progress: Advance = lambda _step: None) -> CoreResult:
    """Measure the CPU time of the prompt `repeats` times, each time with fresh state."""
    draw = random.Random(seed)  # noqa: S311 - seeded on purpose
    tokens = [draw.randrange(128_000) for _ in range(PROMPT_TOKENS)]
    root = draw.randbytes(32)

    def once(_number: int) -> dict[str, float]:
        start = time.perf_counter()
        keys = chunk_keys(root, tokens, CHUNK_TOKENS)
        hash_ms = _ms_since(start)
        prefix = Prefix(keys, CHUNK_TOKENS)
        cache = _cache(len(keys) + 2)
        decide_ms = _store(cache, prefix, set()) + _load(cache, prefix)
        start = time.perf_counter()
        answer = cache.lookup(RequestId("again"), prefix, 0.0)
        lookup_ms = _ms_since(start)
        assert answer.tokens == PROMPT_TOKENS
        held: set[ChunkKey] = set()
        through_ms = _store(_cache(len(keys) + 2, ["disk"]), prefix, held)
        demote_ms = max(0.0, through_ms - _store(_cache(len(keys) + 2), prefix, set()))
        below_ms = _lookup_below(_cache(len(keys) + 2, ["disk"]), prefix, held)
        return {
            "hash": hash_ms, "lookup": lookup_ms, "lookup_below": below_ms, "decide": decide_ms, "demote": demote_ms
        }  # fmt: skip

    samples = repeated(once, repeats, advance=progress)
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
        tiers=[TierRules(name=name) for name in tiers],
        evictor=lambda: make_evictor(Config().host.evictor),
    )


def _store(cache: Cache, prefix: Prefix, held: set[ChunkKey]) -> float:
    """Return the milliseconds that all decisions to store the prompt take."""
    places = _places(prefix)
    start = time.perf_counter()
    cache.store(RequestId("store"), prefix, places, 0.0)
    _complete(cache, held)
    return _ms_since(start)


def _load(cache: Cache, prefix: Prefix) -> float:
    """Return the milliseconds that all decisions to load the prompt take."""
    places = _places(prefix)
    start = time.perf_counter()
    cache.load(RequestId("load"), prefix, PROMPT_TOKENS, places, 0.0)
    _complete(cache, set())
    return _ms_since(start)


def _lookup_below(cache: Cache, prefix: Prefix, held: set[ChunkKey]) -> float:
    """Return the milliseconds of a lookup with its probe if only the lower tier has the chunks."""
    start = time.perf_counter()
    cache.lookup(RequestId("below"), prefix, 0.0)
    _complete(cache, held)
    answer = cache.lookup(RequestId("below"), prefix, 0.0)
    elapsed_ms = _ms_since(start)
    assert answer.presence is Presence.ARRIVING
    assert answer.tokens == PROMPT_TOKENS
    return elapsed_ms


def _complete(cache: Cache, held: set[ChunkKey]) -> None:
    """Complete all commands at once, like a mover that takes no time. `held` is the content of the lower tier."""
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
