"""A seeded world around the real core: virtual clock, links, faults.

    report = tests.sim.run(17)
    python -m tests.sim --seeds 0:5000

One seed draws everything: the model's KV groups, slots, budgets, deadlines, write policy, ranks, tiers, latencies,
faults and what the engine asks for. The core is the real one; only time, bytes and places are made up. After each step
the `judge` compares what the core says with what the world holds. A seed reproduces exactly, in any process.

Faults that must be survived: a copy or a tier's read or write fails; a tier is full, goes down, hangs until the end of
the run, or answers long after the deadline; a stored object flips a bit, is cut short or belongs to another key; an
object is gone although a probe saw it; other writers add and remove objects; the engine drops requests at any moment
and uses its blocks again as soon as it may. One thing never happens: an answer that never comes.

Files, from the outside in: `run` (one seed from start to end), `scenario` (what it draws), `engine` (who asks), `mover`
and `others` (who moves bytes, and who meddles), `world` (the places and the clock), `judge` and `explain` (what must
hold), `oracle` (what is restorable, said a second time).
"""

from tests.sim.run import Report, run
from tests.sim.scenario import Mode, Scenario, draw

__all__ = ["Mode", "Report", "Scenario", "draw", "run"]
