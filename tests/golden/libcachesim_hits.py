"""Writes libcachesim_hits.json: block hits that libCacheSim counts on the traces of this folder.

Run it where the package is: ``pip install libcachesim==0.3.5 && python tests/golden/libcachesim_hits.py``.
Each request's blocks are accessed from the last to the first; all have size 1.
"""

import gzip
import json
from pathlib import Path

import libcachesim

HERE = Path(__file__).parent
POLICIES = {"fifo": "FIFO", "plain-lru": "LRU", "arc": "ARC"}
CAPACITIES = {"mooncake_conversation_runs": (586, 5859, 19531), "mooncake_synthetic_runs": (586, 5859, 19531)}
CAPACITIES |= dict.fromkeys(("lmcache_miniswe_b64", "lmcache_magagent_b64", "taubench_airline_b64"), (200, 1562))


def accesses(name: str) -> list[int]:
    """All blocks of a trace in the order of their accesses."""
    out = []
    for line in gzip.decompress((HERE / "traces" / f"{name}.jsonl.gz").read_bytes()).splitlines():
        ids = [first + place for first, count in json.loads(line)["hash_runs"] for place in range(count)]
        out += reversed(ids)
    return out


def main() -> None:
    """Count, and write."""
    counted = {}
    for name, capacities in CAPACITIES.items():
        order = accesses(name)
        for ours, theirs in POLICIES.items():
            for capacity in capacities:
                cache = getattr(libcachesim, theirs)(cache_size=capacity)
                request = libcachesim.Request()
                hits = 0
                for time, block in enumerate(order):
                    request.obj_id, request.obj_size, request.clock_time = block, 1, time
                    hits += cache.get(request)
                counted.setdefault(name, {}).setdefault(ours, {})[capacity] = hits
    made = {"libcachesim": "0.3.5", "block_hits": counted}
    (HERE / "libcachesim_hits.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
