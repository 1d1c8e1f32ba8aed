"""vLLM's asynchronous steps and kvtier's connector: every reachable state of their model keeps all promises.

The promises: nothing is published under a key of other tokens or weights; no forward reads a block that holds other
bytes than its table says, or that a load writes; no load writes into a block that another request has; after a reset no
KV of before is read; a reset succeeds if no request runs; and from every state all requests can end.

For each rule of `rules.RULES` a model without it breaks a promise. So no rule is idle, and the model is not too weak.
"""

from typing import Any

import pytest
from tests.model.async_steps import Model
from tests.model.checker import check
from tests.model.rules import RULES, SECOND_LINES, missing

CORE: dict[str, dict[str, Any]] = {
    "three requests": {"texts": (0, 0, 1)},
    "chunks of two steps": {"texts": (0, 0), "blocks": 2, "parts": 2, "aborts": 1},
    "aborts": {"texts": (0, 1), "blocks": 2, "aborts": 1},
    "weights": {"texts": (0, 1), "blocks": 2, "changes": 1},
    "resets": {"texts": (0, 0), "blocks": 2, "changes": 1, "resets": 1},
    "weights without a call": {"texts": (0, 0), "blocks": 2, "changes": 1, "is_silent": True},
    "resets after those": {"texts": (0,), "changes": 1, "resets": 1, "is_silent": True},
    "internal errors": {"texts": (0, 1), "blocks": 2, "errors": 1},
}
"""Together they have every kind of event. Each takes seconds."""

FULL: dict[str, dict[str, Any]] = {
    "aborts": {"aborts": 1},
    "weights": {"changes": 1},
    "weights and resets": {"texts": (0, 0), "changes": 1, "resets": 1},
    "weights without a call": {"texts": (0, 0), "changes": 1, "resets": 1, "is_silent": True},
    "internal errors": {"errors": 1},
    "chunks of two steps": {"texts": (0, 1), "parts": 2, "aborts": 1},
}
"""Three requests, three blocks and two steps unless it says otherwise. Each takes up to a minute of processor time."""

ALONE = {"texts": (0,), "changes": 1, "resets": 1}
WEAKEST: dict[str, dict[str, Any]] = {
    "TrackedRequest.computed_tokens": {"texts": (0,), "aborts": 1, "parts": 2},
    "TrackedRequest.computed_tokens/shared": {"texts": (0, 0), "blocks": 2},
    "Stores.begin": ALONE,
    "Stores.send": CORE["weights without a call"],
    "Stores.yield_idle": ALONE,
    "Stores._reused": ALONE,
    "BlockPins._reused": ALONE,
    "Scheduler.orders": ALONE,
    "Worker.begin": ALONE,
    "BlockCopier._run": CORE["internal errors"],
    "BlockCopier._end": ALONE,
    "BlockCopier.revoke": CORE["internal errors"],
    "Stores.reading": {"texts": (0, 1), "blocks": 2},
    "Loads.unblocked": {"texts": (0, 1), "blocks": 2},
    "Loads._deliver": CORE["aborts"],
    "Loads._report": {"texts": (0, 1), "blocks": 2},
    "Loads.reports": {"texts": (0, 1), "blocks": 2},
    "Loads.drop": CORE["aborts"],
    "KvtierConnector.__init__": CORE["aborts"],
    "Loads.last_reports": CORE["internal errors"],
    "Scheduler.last_orders": CORE["internal errors"],
    "KeyMaker.new_epoch": ALONE,
    "Invalidation.reset": CORE["resets"],
    "Invalidation.weights_change": ALONE,
    "Worker.results": ALONE | {"is_silent": True},
    "EngineCache.restart": CORE["weights"],
    "EngineCache.watch_resets": ALONE,
    "Invalidation.own_reset_begins": ALONE,
}
"""For each rule a small model that needs it."""


@pytest.mark.parametrize("name", CORE)
def test_every_state_keeps_all_promises(name: str) -> None:
    found = check(Model(**CORE[name]))
    print(f"{name}: {found.states} states")
    assert not found.broken, found


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FULL)
def test_so_does_every_state_of_the_larger_models(name: str) -> None:
    found = check(Model(**FULL[name]))
    print(f"{name}: {found.states} states")
    assert not found.broken, found


def test_each_rule_is_a_function_of_kvtier() -> None:
    assert not missing()
    assert {rule.partition(":")[2] for rule in RULES} == WEAKEST.keys()


@pytest.mark.parametrize("rule", WEAKEST)
def test_without_a_rule_a_promise_is_broken(rule: str) -> None:
    found = check(Model(without=[rule], **WEAKEST[rule]))
    print(f"without {rule}: {RULES[_full(rule)]}\n{found}")
    assert found.broken
    assert found.trace


def test_the_second_lines_are_needed_by_nothing_but_the_loss_of_the_first() -> None:
    seconds = [rule.partition(":")[2] for rule in SECOND_LINES]
    found = check(Model(without=seconds, **CORE["weights"]))
    assert not found.broken, found


def _full(rule: str) -> str:
    return next(name for name in RULES if name.endswith(f":{rule}"))
