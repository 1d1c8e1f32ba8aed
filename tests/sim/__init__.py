"""A simulator around the real core. One seed draws a scenario, a virtual clock runs it, and invariants check it.

    report = tests.sim.run(17)
    python -m tests.sim --seeds 0:5000

A seed draws the model's KV groups, slots, budgets, deadlines, write policy, tiers, latencies, faults and
requests. The core is the real one; time, bytes, tiers and engine are simulated. A seed reproduces exactly.

The core must survive these faults. A copy or a tier's read or write fails. A tier is full, goes down, hangs until the
end of the run, or answers long after the deadline. A stored object has a flipped bit, is truncated or belongs to
another key. An object disappears after a probe. Other writers add and remove objects. The engine aborts requests at
any time and reuses their blocks at once. Every operation is answered in the end.

With `most_ranks` a seed draws unequal ranks, each with its own size, speed, faults, memory and objects. Some have the
same KV as an earlier rank. These share its slots and tiers, and only scatter. Some seeds have histories of several
groups and ranks that lack some of them. Then a chunk counts when each group is on every rank that should have it. The
real `CommandRunner` decides what a rank leaves to others, and the real `RankGroup` joins their answers into one.

`objects` does the same for the calls of an object store, in which objects only pass through host memory.

`run` runs one seed, `scenario` draws it, `engine` makes requests, `executor` moves bytes, and `world` has memory,
tiers and clock. `invariants` and `event_log` check every step, and `oracle` computes restorable prefixes
independently. `trace` and `golden` compare runs with recorded ones.
"""

from tests.sim.run import SeedReport, run
from tests.sim.scenario import Mode, Scenario, draw

__all__ = ["Mode", "Scenario", "SeedReport", "draw", "run"]
