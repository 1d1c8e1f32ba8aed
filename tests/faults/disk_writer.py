"""A program for the disk tests: opens a store and hammers it from several threads until it is killed.

    python disk_writer.py ROOT CAPACITY_BYTES SEED

One line, `ready`, says that the store is open. After each sync a line of JSON lists the numbers that were held before
it began: unless they are given up to make room, those must be found whenever the kill comes.
"""

import json
import random
import sys
import threading

from disk_world import look, open_tier, sealed

from kvtier.testing.tier_contract import object_name
from kvtier.tier.base import Write

NAMES = 60
THREADS = 3


def main(root: str, capacity_bytes: int, seed: int) -> None:
    tier = open_tier(root, capacity_bytes, sync_interval_s=0.01)
    print("ready", flush=True)

    def work(number: int) -> None:
        chance = random.Random(seed * THREADS + number)
        while True:
            wanted = chance.randrange(NAMES)
            if chance.random() < 0.3:
                names = [object_name(at % NAMES) for at in range(wanted, wanted + 4)]
                tier.write_many([Write(name, sealed((wanted + at) % NAMES)) for at, name in enumerate(names)])
            elif chance.random() < 0.5:
                tier.write(object_name(wanted), sealed(wanted))
            elif look(tier, wanted) not in {"right", "absent"}:
                print("wrong", flush=True)

    for number in range(THREADS):
        threading.Thread(target=work, args=(number,), daemon=True).start()
    names = [object_name(number) for number in range(NAMES)]
    while True:
        held = tier.contains(names)
        tier.sync()
        print(json.dumps([number for number in range(NAMES) if held[number]]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
