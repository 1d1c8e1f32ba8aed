"""Measures prefill on one vLLM server and decode on another, from the end of the prefill to the first token.

    .venv-vllm/bin/python bench/prefill_decode.py --record bench/records/prefill_decode.json     (--quick: a smoke test)

Each kind of shared tier, on loopback, has two servers and new prompts each time. Four measurements take turns. The
decode server computes a prompt. The prefill server computes another one and the decode server continues it. The same
request comes again, whose KV the decode server now has itself. The tier's raw client reads as many bytes in as many
objects, with as many threads as the tier. The planner is off, so that every prompt is loaded.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[1]
# Engine processes inherit this path, so it must not have the folder of this file, which would hide vLLM.
sys.path[:1] = [str(TOP / "tests" / "vllm"), str(TOP)]
sys.path.append(str(TOP / "bench" / "vllm_arms"))

from arms import dtype_of  # noqa: E402
from harness import in_process  # noqa: E402
from judge import prompt  # noqa: E402
from models import CONFIGS, make_checkpoint  # noqa: E402
from server import Server  # noqa: E402
from settings import CHUNK, connector  # noqa: E402
from tests.cluster import valkey_bed  # noqa: E402

from kvtier.config.sections import Config  # noqa: E402
from kvtier.connect.vllm.engine_setup import settings_of  # noqa: E402
from kvtier.layout import GroupLayout, History, KvLayout  # noqa: E402
from kvtier.report.output import write_json  # noqa: E402
from kvtier.tier.base import RawClient  # noqa: E402
from kvtier.tier.registry import TierContext, TierSettings, kind_of  # noqa: E402
from kvtier.tools.run_record import RecordedSetting, make_record  # noqa: E402
from kvtier.types import ObjectName  # noqa: E402

DTYPE = dtype_of("cpu")
VALUE_BYTES = 2 if DTYPE == "bfloat16" else 4
SECRET = "5e" * 32
KINDS = ("shared_directory", "valkey")
WANTED = {"do_remote_decode": True, "do_remote_prefill": False}
CAPACITY_BYTES = 4 << 30


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run."""

    model: str
    prompt_tokens: int
    step_tokens: int
    repeats: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk's KV."""
        fields = CONFIGS[self.model]
        per_token = 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * fields["head_dim"] * VALUE_BYTES
        return CHUNK * per_token

    @property
    def chunks(self) -> int:
        """Chunks of a prompt that are loaded."""
        return (self.prompt_tokens - 1) // CHUNK


FULL = Sizes("llama-137m", prompt_tokens=4000, step_tokens=1024, repeats=5)
QUICK = Sizes("llama", prompt_tokens=2000, step_tokens=512, repeats=2)


class Raw:
    """The raw client of a tier, with objects of the size of a chunk.

    Args:
        settings: settings of the tier.
        sizes: sizes of the run.
    """

    def __init__(self, settings: TierSettings, sizes: Sizes) -> None:
        kind = kind_of(settings)
        assert kind.raw is not None, "a kind without a raw client is not measured"
        layout = KvLayout(CHUNK, (GroupLayout(History(), (sizes.chunk_bytes,), "bench"),))
        self._client: RawClient = kind.raw(settings, TierContext(layout=layout, key_id=bytes(16)))
        self._pool = ThreadPoolExecutor(settings.read_threads)
        self._frames = [memoryview(bytearray(os.urandom(sizes.chunk_bytes))) for _ in range(sizes.chunks)]

    def read_s(self) -> float:
        """Return the seconds to read the bytes of a prompt."""
        names = [ObjectName(os.urandom(32)) for _ in self._frames]
        for name, frame in zip(names, self._frames, strict=True):
            self._client.put(name, frame)
        buffers = [memoryview(bytearray(frame.nbytes)) for frame in self._frames]
        began_s = time.perf_counter()
        list(self._pool.map(self._client.get, names, buffers))
        took_s = time.perf_counter() - began_s
        for name in names:
            self._client.delete(name)
        return took_s

    def close(self) -> None:
        """End its threads and connections."""
        self._pool.shutdown()
        self._client.close()


@contextmanager
def shared_tier(kind: str, root: Path) -> Iterator[str]:
    """Yield the text of a shared tier of this kind."""
    deadlines = "probe_deadline_s=5&transfer_deadline_s=60"
    if kind == "shared_directory":
        (root / "raw").mkdir()
        yield f"shared_directory:{root / 'kv'}?capacity_bytes={CAPACITY_BYTES}&{deadlines}"
        return
    bed = valkey_bed.Server(root, valkey_bed.install())
    try:
        bed.start()
        bed.wait()
        yield f"valkey:127.0.0.1:{bed.port}?{deadlines}"
    finally:
        bed.kill()


def measure(kind: str, sizes: Sizes, checkpoint: Path, root: Path, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """Run all repeats over one kind of tier."""
    samples: list[dict[str, Any]] = []
    with ExitStack() as stack:
        tier = stack.enter_context(shared_tier(kind, root))
        here, there = (
            stack.enter_context(_server(role, tier, sizes, checkpoint, root)) for role in ("prefill", "decode")
        )
        raw = Raw(settings_of({"tiers": [tier], "store.secret": SECRET}, Config()).tiers[0], sizes)
        stack.callback(raw.close)
        _answer(there, prompt(sizes.prompt_tokens, seed), {})  # the first forward pass allocates
        _handed_on(here, there, prompt(sizes.prompt_tokens, seed + 1))
        for number in range(sizes.repeats):
            tokens = prompt(sizes.prompt_tokens, seed + 1000 + number)
            compute_s = _answer(there, prompt(sizes.prompt_tokens, seed + 2000 + number), {})
            before = _hits(there)
            row = {"kind": kind, "compute_s": compute_s} | _handed_on(here, there, tokens)
            row["loaded_tokens"] = _hits(there) - before
            row["resident_s"] = _answer(there, tokens, {})
            row["raw_s"] = raw.read_s()
            samples.append(row)
    medians = {
        name: statistics.median(row[name] for row in samples)
        for name in ("prefill_s", "first_token_s", "compute_s", "resident_s", "raw_s", "loaded_tokens")
    }
    return {"bytes": sizes.chunks * sizes.chunk_bytes} | medians, samples


def _server(role: str, tier: str, sizes: Sizes, checkpoint: Path, root: Path) -> Server:
    extra = {"tiers": [tier], "store__secret": SECRET, "host__capacity_bytes": "512MiB"}
    given = connector(None, **extra) | {"kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role]}
    sized = ["--dtype", DTYPE, "--max-model-len", "8192", "--kv-cache-memory-bytes", str(512 << 20)]
    sized += ["--max-num-batched-tokens", str(sizes.step_tokens)]
    # Each server gets half of the cores.
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    mine = cores[:middle] if role == "prefill" else cores[middle:]
    bound = ",".join(map(str, mine))
    return Server(checkpoint, root / f"{role}.log", json.dumps(given), *sized, cores=bound)


def _handed_on(here: Server, there: Server, tokens: list[int]) -> dict[str, float]:
    """Measure a prefill, and the first token on the other server."""
    began_s = time.perf_counter()
    asked = {"prompt": tokens, "max_tokens": 1, "kv_transfer_params": WANTED}
    announced = here.post("/v1/completions", asked)["kv_transfer_params"]
    prefill_s = time.perf_counter() - began_s
    return {"prefill_s": prefill_s, "first_token_s": _answer(there, tokens, announced)}


def _answer(server: Server, tokens: list[int], announced: dict[str, Any]) -> float:
    """Return the seconds to the first and only token."""
    began_s = time.perf_counter()
    server.complete(tokens, 1, kv_transfer_params=announced or None)
    return time.perf_counter() - began_s


def _hits(server: Server) -> float:
    name = "vllm:external_prefix_cache_hits_total"
    return sum(value for series, value in server.metrics().items() if series.partition("{")[0] == name)


def main() -> None:
    """Measure, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and few repeats")
    parser.add_argument("--kind", action="append", choices=KINDS, help="default: all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    sizes = QUICK if given.quick else FULL
    results: dict[str, Any] = {"chunk_bytes": sizes.chunk_bytes, "chunks": sizes.chunks, "kinds": {}}
    samples: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        in_process(make_checkpoint, sizes.model, Path(folder, "checkpoint"))
        for kind in given.kind or KINDS:
            root = Path(folder, kind)
            root.mkdir()
            results["kinds"][kind], rows = measure(kind, sizes, Path(folder, "checkpoint"), root, given.seed)
            samples += rows
            print(kind, json.dumps(results["kinds"][kind], indent=1))
        if given.record is not None:
            settings = {name: RecordedSetting(value, "default") for name, value in vars(sizes).items()}
            settings["dtype"] = RecordedSetting(DTYPE, "measured")
            record = make_record(
                "prefill_decode",
                settings=settings,
                seed=given.seed,
                results=results,
                samples=samples,
                directory=Path(folder),
            )
            write_json("--record", given.record, record)


if __name__ == "__main__":
    main()
