"""Drives LMCache's native file backend with the load of `object_load`, with Python of LMCache's environment.

    LMCACHE/bin/python bench/parts/lmcache_objects.py --root DIR --direct 1 --journal FILE --threads N --size BYTES ...

It uses the adapter that `lmcache bench l2` measures, with the same aligned memory. LMCache does not verify what it
loads, and has no cap: its writes are new files.
"""

import argparse
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from bench.parts.object_load import WINDOW, Moved, ObjectLoad, Way, drive
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.platform import consume_fd

PAGE = 4096


class LmcacheBackend:
    """The adapter ``fs_native``, with `WINDOW` buffers for each stream.

    Args:
        root: of its files.
        load: what will be read and written.
        threads: its workers.
        is_direct: with O_DIRECT; otherwise through the page cache, which is its default.
    """

    def __init__(self, root: Path, load: ObjectLoad, threads: int, *, is_direct: bool) -> None:
        slots = load.streams * WINDOW
        self._size = load.size
        self._buffer = make_aligned_tensor(slots * load.size, PAGE)
        self._objects = make_memory_objects(self._buffer, slots, load.size, 0)
        for start in range(0, self._buffer.numel(), load.size):  # in place of LMCache's one byte for each object
            self._buffer[start : start + load.size].random_(0, 256, generator=torch.Generator().manual_seed(start))
        adapter = {"type": "fs_native", "base_path": str(root), "use_odirect": is_direct, "num_workers": threads}
        settings = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter)]))
        memory = create_l1_memory_desc(self._buffer, align_bytes=PAGE)
        self._adapter: Any = create_l2_adapter(settings.adapters[0], l1_memory_desc=memory)
        self._poller = select.poll()
        for descriptor in (self._adapter.get_store_event_fd(), self._adapter.get_load_event_fd()):
            self._poller.register(descriptor, select.POLLIN)
        self._tasks: dict[tuple[Way, int], tuple[int, Sequence[int], float]] = {}

    def submit(self, stream: int, way: Way, numbers: Sequence[int]) -> None:
        """See `Backend`."""
        keys = [make_object_keys(1, key_offset=number)[0] for number in numbers]
        objects = self._objects[stream * WINDOW :][: len(numbers)]
        begin = self._adapter.submit_load_task if way == "read" else self._adapter.submit_store_task
        began_s = time.time()
        self._tasks[way, begin(keys, objects)] = stream, numbers, began_s

    def take(self, wait_s: float) -> list[Moved]:
        """See `Backend`."""
        until_s = time.monotonic() + wait_s
        found: list[Moved] = []
        while not found and time.monotonic() < until_s:
            for descriptor, _ in self._poller.poll(1000):
                consume_fd(descriptor)
            stored = self._adapter.pop_completed_store_tasks()
            for task, result in stored.items():
                found += self._ended("write", task, is_done=result.is_successful())
            for way, task in list(self._tasks):
                bits = self._adapter.query_load_result(task) if way == "read" else None
                if bits is not None:
                    found += self._ended("read", task, is_done=bits.popcount() == len(self._tasks[way, task][1]))
        return found

    def _ended(self, way: Way, task: int, *, is_done: bool) -> list[Moved]:
        stream, numbers, began_s = self._tasks.pop((way, task))
        if not is_done:
            raise RuntimeError(f"the {way} of objects {list(numbers)} failed")
        now_s = time.time()
        return [Moved(stream, way, number, began_s, now_s, self._size) for number in numbers]


def main() -> None:
    """Run the load."""
    parser = argparse.ArgumentParser()
    for name in ("--root", "--journal"):
        parser.add_argument(name, required=True)
    for name in ("--direct", "--threads", *(f"--{field}" for field in ObjectLoad._fields)):
        parser.add_argument(name, type=int, required=True)
    given = parser.parse_args()
    load = ObjectLoad(*(getattr(given, field) for field in ObjectLoad._fields))
    drive(
        load,
        LmcacheBackend(Path(given.root), load, given.threads, is_direct=bool(given.direct)),
        "lmcache",
        Path(given.journal),
    )
    os._exit(0)  # its threads have no end


if __name__ == "__main__":
    main()
