"""A simulator around the real core: one seed draws a scenario, a virtual clock runs it, invariants check it.

    report = tests.sim.run(17)
    python -m tests.sim --seeds 0:5000

A seed draws the model's KV groups, slots, budgets, deadlines, write policy, tiers, latencies, faults and
requests. The core is the real one; time, bytes, tiers and engine are simulated. A seed reproduces exactly.

Faults that the core must survive: a copy or a tier's read or write fails; a tier is full, goes down, hangs until the
end of the run, or answers long after the deadline; a stored object has a flipped bit, is truncated or belongs to
another key; an object disappears after a probe; other writers add and remove objects; the engine aborts requests at any
time and reuses their blocks at once. Every operation is answered in the end.

With `most_ranks` a seed draws unequal ranks: each has its own size, speed, faults, memory and objects. Some hold the
same KV as one before them: they have its slots and tiers, and only scatter. Some seeds have histories of several groups
and ranks that lack some of them. Then a chunk counts when each group is on every rank that holds it. The real
`CommandRunner` says what a rank leaves to others, and the real `RankGroup` makes one answer of theirs.

`objects` does the same for the calls of an object store, in which objects only pass through host memory.

`run` runs one seed, `scenario` draws it, `engine` makes requests, `executor` moves bytes, `world` holds memory, tiers
and clock. `invariants` and `event_log` check every step, `oracle` computes restorable prefixes independently. `trace`
and `golden` compare runs with recorded ones.
"""

from tests.sim.run import SeedReport, run
from tests.sim.scenario import Mode, Scenario, draw

__all__ = ["Mode", "Scenario", "SeedReport", "draw", "run"]
