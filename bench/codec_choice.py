"""Measures what the choice between raw and coded objects gains, by the bandwidth of the tier's link.

    python bench/codec_choice.py --record bench/records/codec_choice.json

A mover writes objects to a tier in memory and reads them again. The tier's link is throttled for all threads together.
The objects have the KV of SmolLM2 in bf16, so its packages must be installed. The arms take turns: raw objects only, a
codec always, and the codec where kvtier chooses it. Each turn writes new objects, so an arm that chooses decides anew.
"""

import math
import queue
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
import numpy as np
from bench.parts.command import record_option, recorded_settings
from bench.parts.command import run as run_script
from tests.memory_tier import ThrottledTier

from kvtier.cli.options import tell_written
from kvtier.codec.frame import frame_bytes
from kvtier.codec.registry import by_name
from kvtier.layout import GroupLayout, History, KvLayout, Run
from kvtier.report.output import write_json
from kvtier.runtime.adaptive_coding import CodecChoice
from kvtier.runtime.arena import Arena
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.executor import Completion, Threads
from kvtier.runtime.mover import Mover
from kvtier.runtime.tier_encoding import StoredForm
from kvtier.testing.host_copier import HostCopier
from kvtier.tools.bench.codec import CHUNK_TOKENS, Frame, kv_frames
from kvtier.tools.demo.model import PRETRAINED, pretrained_kv
from kvtier.tools.demo.request_plan import choose_sessions, read_trace
from kvtier.tools.run_record import make_record
from kvtier.types import ChunkKey, Direction, Outcome, Transfer

ARMS = {
    "raw": ("raw", False),
    "split": ("split", False),
    "split2": ("split2", False),
    "chosen": ("split", True),
    "chosen2": ("split2", True),
}
"""The codec of each arm, and whether kvtier chooses."""
OBJECTS = (8, 32)
"""Fewest and most objects of a turn. On a fast link they are read several times."""
TURN_S = 0.6
"""About the time that a turn takes to read raw objects."""
NOISE = 0.02
"""An ideal gain below this share cannot be distinguished from noise."""
WARM_UP = 2
"""Turns that do not count, in which a choosing arm measures."""
DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class RateRow:
    """The figures for one bandwidth. Times are medians of a turn's reads."""

    gb_per_s: float
    seconds: dict[str, float]
    """Seconds by arm."""
    coded: dict[str, float]
    """Share of the objects that an arm wrote coded."""
    loss: dict[str, float]
    """How much longer a choosing arm takes than raw."""
    mean_loss: dict[str, float]
    """The same for means, in which a turn with a wrong choice counts."""
    gain_share: dict[str, float | None]
    """Gain of a choosing arm, divided by the gain of the better of raw and codec. None if that is below `NOISE`."""
    samples: dict[str, list[float]]


class ArmRun:
    """One arm over one link."""

    def __init__(self, arm: str, bytes_per_s: float, layout: KvLayout, arena: Arena) -> None:
        codec, chooses = ARMS[arm]
        self._arena, self._size = arena, frame_bytes(layout.groups[0])
        self.tier = ThrottledTier("below", bytes_per_s=bytes_per_s, capacity_bytes=(OBJECTS[1] + 1) * self._size)
        self._mover = Mover(
            CommandRunner(
                layout=layout,
                model=bytes(16),
                arena=arena,
                copier=HostCopier(layout, [[np.zeros((1, size), np.uint8) for size in layout.groups[0].layer_bytes]]),
                tiers={"below": self.tier},
                forms={
                    "below": StoredForm(
                        by_name(codec),
                        choice=CodecChoice(by_name(codec), Threads().read, Threads().write) if chooses else None,
                    )
                },
            )
        )
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._mover.complete_to(self._done.put)
        self.written = self.coded = 0

    def turn(self, number: int, objects: int, passes: int) -> float:
        """Write new objects, and read them `passes` times. Return the seconds of the reads."""
        keys = [ChunkKey(f"{number}.{slot}".encode().ljust(32)) for slot in range(objects)]
        stored = self._move(Direction.DEMOTE, keys)
        self.written += objects
        self.coded += sum(size < self._size for size in stored)
        start_s = time.perf_counter()
        for _ in range(passes):
            self._move(Direction.PROMOTE, keys)
        return time.perf_counter() - start_s

    def close(self) -> None:
        """End the threads and free the objects."""
        self._mover.close(DEADLINE_S)
        self.tier.close()

    def _move(self, direction: Direction, keys: Sequence[ChunkKey]) -> list[int]:
        until_s = time.monotonic() + DEADLINE_S
        self._mover.submit(
            *(
                Transfer(slot, direction, key, 0, slot, "below", None, (), None, 0, until_s, None)
                for slot, key in enumerate(keys)
            )
        )
        done = [self._done.get(timeout=DEADLINE_S) for _ in keys]
        assert all(it.outcome is Outcome.DONE for it in done), {it.detail for it in done}
        return [it.size_bytes for it in done]


def layout_of(frame: Frame) -> KvLayout:
    """Return a layout whose layers have their keys first and then their values."""
    size = len(frame[0])
    runs = (Run("keys", "bf16", size), Run("values", "bf16", size))
    layers = len(frame) // 2
    return KvLayout(CHUNK_TOKENS, (GroupLayout(History(), (2 * size,) * layers, "bench", runs=(runs,) * layers),))


def measured(rate: float, layout: KvLayout, arena: Arena, frames: Sequence[Frame], repeats: int) -> RateRow:
    """Measure all arms at `rate` GB/s, in turn."""
    objects = min(OBJECTS[1], max(OBJECTS[0], math.ceil(rate * 1e9 * TURN_S / frame_bytes(layout.groups[0]))))
    passes = max(1, round(rate * 1e9 * TURN_S / (objects * frame_bytes(layout.groups[0]))))
    payloads = [np.concatenate(frame) for frame in frames]
    for slot in range(objects):
        np.frombuffer(arena.payload(0, slot), np.uint8)[:] = payloads[slot % len(payloads)]
    arms = {arm: ArmRun(arm, rate * 1e9, layout, arena) for arm in ARMS}
    samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for turn in range(WARM_UP + repeats):
        names = list(ARMS)[turn % len(ARMS) :] + list(ARMS)[: turn % len(ARMS)]
        for arm in names:
            if turn == WARM_UP:
                arms[arm].written = arms[arm].coded = 0
            samples[arm].append(arms[arm].turn(turn, objects, passes))
    for slot in range(objects):
        assert bytes(arena.payload(0, slot)) == payloads[slot % len(payloads)].tobytes(), "an object was changed"
    for it in arms.values():
        it.close()
    taken = {arm: values[WARM_UP:] for arm, values in samples.items()}
    seconds = {arm: statistics.median(values) for arm, values in taken.items()}
    choosing = [arm for arm, (_, chooses) in ARMS.items() if chooses]
    ideal = {arm: 1 - min(1.0, seconds[ARMS[arm][0]] / seconds["raw"]) for arm in choosing}
    return RateRow(
        gb_per_s=rate,
        seconds=seconds,
        coded={arm: it.coded / it.written for arm, it in arms.items()},
        loss={arm: seconds[arm] / seconds["raw"] - 1 for arm in choosing},
        mean_loss={arm: statistics.fmean(taken[arm]) / statistics.fmean(taken["raw"]) - 1 for arm in choosing},
        gain_share={
            arm: (1 - seconds[arm] / seconds["raw"]) / ideal[arm] if ideal[arm] >= NOISE else None for arm in choosing
        },
        samples=taken,
    )


@click.command()
@click.option("--rates", default="0.05,0.1,0.2,0.5,1,2,5", show_default=True, help="GB/s of the link.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=7, show_default=True, help="Turns of each arm.")
@record_option
def codec_choice(rates: str, repeats: int, record: Path | None) -> None:
    """Read raw, coded and chosen objects over links of several bandwidths."""
    text = "".join(line.text for line in choose_sessions(read_trace(), 1))
    frames = kv_frames(pretrained_kv(text, 2 * CHUNK_TOKENS), PRETRAINED)[PRETRAINED, "bf16"]
    layout = layout_of(frames[0])
    arena = Arena(layout, (OBJECTS[1],), populate=True)
    rows: list[RateRow] = []
    for rate in map(float, rates.split(",")):
        rows.append(row := measured(rate, layout, arena, frames, repeats))
        times = "  ".join(f"{arm} {seconds:.3f} s ({row.coded[arm]:.0%})" for arm, seconds in row.seconds.items())
        click.echo(f"{rate:5g} GB/s  {times}  loss {_shown(row.loss)}  of the ideal gain {_shown(row.gain_share)}")
    if record is not None:
        settings: dict[str, Any] = recorded_settings({"rates": rates, "repeats": repeats})
        results = {"object_bytes": frame_bytes(layout.groups[0]), "rows": [asdict(row) for row in rows]}
        write_json("--record", record, make_record("codec choice", settings=settings, seed=1, results=results))
        tell_written(record)


def _shown(values: dict[str, float | None] | dict[str, float]) -> str:
    return "/".join("-" if value is None else f"{value:.1%}" for value in values.values())


if __name__ == "__main__":
    run_script(codec_choice)
