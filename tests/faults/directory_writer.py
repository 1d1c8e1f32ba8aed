"""A program for the directory tests: opens a store and hammers it until it is told, or killed.

    python directory_writer.py ROOT CAPACITY_BYTES SEED COUNT

Writes, reads and deletes objects of its own and of others; every read must give the bytes that belong to the name. One
line, `ready`, means that the store is open; stderr gets a dot after each operation; at the end a line of JSON has the
counts.
"""

import json
import os
import random
import sys

from kvtier.errors import TierError
from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, object_name
from kvtier.tier.base import About
from kvtier.tier.directory.tier import DirectoryTier

NAMES = 60
BLOCKS_MAX = 12


def content(number: int) -> bytes:
    """The bytes that belong to the name `number`."""
    return bytes([number % 251]) * ((1 + number % BLOCKS_MAX) * BLOCK_BYTES)


def main(root: str, capacity_bytes: int, seed: int, count: int) -> None:
    chance = random.Random(seed)
    tier = DirectoryTier(root, capacity_bytes=capacity_bytes, lock_deadline_s=60.0)
    print("ready", flush=True)
    into = empty_frame(BLOCKS_MAX * BLOCK_BYTES)
    told = {"hits": 0, "misses": 0, "wrong": 0, "refused": 0, "errors": 0}
    for _ in range(count):
        number = chance.randrange(NAMES)
        what = chance.randrange(20)
        try:
            if what < 10:
                frame = empty_frame(len(content(number)))
                frame[:] = content(number)
                parent = object_name(number - 1) if number % 6 else None
                told["refused"] += not tier.write(object_name(number), frame, About(parent, number % 6))
            elif what < 19:
                read = tier.read(object_name(number), into)
                told["misses" if read is None else "hits"] += 1
                told["wrong"] += read is not None and into[:read] != content(number)
            else:
                tier.delete(object_name(number))
        except TierError:
            told["errors"] += 1
        os.write(2, b".")
    told["evictions"] = tier.evictions
    tier.close()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
