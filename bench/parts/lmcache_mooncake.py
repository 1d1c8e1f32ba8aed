"""LMCache's Mooncake backend, with Python of LMCache's environment: the figures of `lmcache bench l2`, in its format.

    LMCACHE/bin/python bench/parts/lmcache_mooncake.py --master HOST:PORT --size BYTES --count N --batch N --output FILE

The adapter that `lmcache bench l2` drives, `mooncake_store`, needs an extension that LMCache's wheels do not have. This
drives the class that they do have, the remote connector of LMCache's engine, in its best configuration: no metadata in
the store, hence `batch_put_from` and `batch_get_into` on registered memory without copies.
"""

import argparse
import asyncio
import json
import os
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.mooncakestore_connector import MooncakestoreConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

TOKENS = 256
ROUNDS = 2
"""The first warms up."""
DEADLINE_S = 120
MARGIN_BYTES = 256 << 20


def main() -> None:
    """Store, find and load new objects, and compare their bytes."""
    parser = argparse.ArgumentParser()
    for name in ("--size", "--count", "--batch"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--master", "--output"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    measured = _measure(loop, given.master, given.size, given.count, given.batch)
    counts = {"keys_per_round": given.count, "total_keys": given.count}
    metrics = {
        name: {"operation": name, "total_success": found, "duration_p50_ms": 1e3 * took_s, **counts}
        for name, (found, took_s) in measured.items()
    }
    Path(given.output).write_text(json.dumps({"metrics": metrics}))
    os._exit(0)  # the client's threads have no end


def _measure(
    loop: asyncio.AbstractEventLoop, master: str, size: int, count: int, batch: int
) -> dict[str, tuple[int, float]]:
    """Objects that were found and seconds, of each operation of the last round."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=False,
        max_local_cpu_size=(2 * count * size + MARGIN_BYTES) / 2**30,
        remote_url=f"mooncakestore://{master}/",
        extra_config={
            "save_chunk_meta": False,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": 0,
            "local_buffer_size": 64 << 20,
            # Mooncake's name: the one that LMCache documents, master_server_address, is ignored by Mooncake 0.3.13.
            "mooncake_master_server_addr": master,
            "transfer_timeout": DEADLINE_S,
        },
    )
    shape = (1, 2, TOKENS, 1, size // (2 * TOKENS * 2))  # one layer, keys and values of two bytes
    ranks = {"world_size": 1, "local_world_size": 1, "worker_id": 0, "local_worker_id": 0}
    metadata = LMCacheMetadata(model_name="bench", kv_dtype=torch.float16, kv_shape=shape, **ranks)
    memory = LocalCPUBackend(config, metadata, dst_device="cpu")
    connector = MooncakestoreConnector(loop, memory, config)
    assert connector.registered_buffer_ptr is not None, "the memory is not registered"
    objects = [memory.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt) for _ in range(count)]
    for number, it in enumerate(objects):
        it.raw_tensor.view(torch.uint8).fill_(number % 256)

    def run(work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        return asyncio.run_coroutine_threadsafe(work, loop).result(DEADLINE_S)

    measured: dict[str, tuple[int, float]] = {}
    for number in range(ROUNDS):
        keys = [CacheEngineKey("bench", 1, 0, number * count + n, torch.float16) for n in range(count)]
        batches = [slice(at, at + batch) for at in range(0, count, batch)]
        started_s = time.perf_counter()
        for part in batches:
            run(connector.batched_put(keys[part], objects[part]))
        stored_s = time.perf_counter()
        found = run(connector.batched_async_contains("bench", keys))
        found_s = time.perf_counter()
        loaded = [it for part in batches for it in run(connector.batched_get(keys[part]))]
        loaded_s = time.perf_counter()
        same = sum(
            it is not None and torch.equal(it.raw_tensor, wanted.raw_tensor)
            for it, wanted in zip(loaded, objects, strict=True)
        )
        for it in loaded:
            if it is not None:
                it.ref_count_down()
        connector.store.remove_all(force=True)
        measured = {
            "Store": (same, stored_s - started_s),
            "Lookup": (found, found_s - stored_s),
            "Load": (same, loaded_s - found_s),
        }
    return measured


if __name__ == "__main__":
    main()
