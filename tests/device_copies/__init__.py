"""An engine and mover threads on a simulated device, for any seed: what they copy, and when memory is reused.

The movers run kvtier's own `CommandRunner` with its copiers and a page-locked arena. The engine computes on the default
stream, one step ahead of its output. It reuses blocks, as vLLM does, once their copies are revoked, and its tensors, as
Transformers does, once they are forgotten. A slot gets other bytes as soon as its command has ended.

`run_vllm` and `run_transformers` return what went wrong in one schedule.
"""

import random
from typing import Any

from tests.device_copies.movers import HOST_PART_BYTES, run_schedule
from tests.device_copies.transformers_engine import TransformersEngine
from tests.device_copies.vllm_engine import GEOMETRIES, VllmEngine
from tests.simulated_cuda import begin

__all__ = ["run_held", "run_transformers", "run_vllm"]


def _options(rng: random.Random) -> dict[str, int]:
    """A pool of streams that is never empty, or so small that threads share them."""
    return {"host_part_bytes": HOST_PART_BYTES, "stream_count": rng.choice((1, 2, 32, 32))}


def run_vllm(seed: int) -> list[str]:
    """What went wrong in one schedule."""
    rng = random.Random(f"vllm {seed}")
    engine, part_bytes = GEOMETRIES[seed % len(GEOMETRIES)]
    machine = begin(seed, part_bytes=part_bytes, **_options(rng))
    worker = VllmEngine(machine, engine(), rng, has_draft=rng.random() < 0.5)
    problems = run_schedule(machine, worker.movers, worker.run, has_errors=rng.random() < 0.3)
    return problems + worker.races()


def run_transformers(seed: int) -> list[str]:
    """What went wrong in one schedule."""
    rng = random.Random(f"transformers {seed}")
    machine = begin(seed, part_bytes=32, **_options(rng))
    engine = TransformersEngine(machine, rng, is_hasty=rng.random() < 0.3)
    problems = run_schedule(machine, engine.movers, engine.run, has_errors=rng.random() < 0.3)
    return problems + machine.races


def run_held(seed: int) -> list[str]:
    """Which copies wait for the engine's stream, when it holds steps that were launched ahead."""
    rng = random.Random(f"held {seed}")
    if seed % 2:
        machine = begin(seed, part_bytes=32, **_options(rng))
        engine: Any = TransformersEngine(machine, rng, is_hasty=False)
    else:
        made_of, part_bytes = GEOMETRIES[seed // 2 % len(GEOMETRIES)]
        machine = begin(seed, part_bytes=part_bytes, **_options(rng))
        engine = VllmEngine(machine, made_of(), rng, has_draft=False)
    return run_schedule(machine, engine.movers, engine.run_held, has_errors=False) + machine.races
