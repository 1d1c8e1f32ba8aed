"""What kvtier does so that vLLM's asynchronous steps and its own copies cannot spoil each other's KV: a rule per line.

The keys name the module below `kvtier.connect.vllm` and the function that implements the rule.
"""

import ast
from pathlib import Path

import kvtier

RULES = {
    # stores
    "tracked:TrackedRequest.computed_tokens": "A chunk may be stored when the step that computes it has returned.",
    "tracked:TrackedRequest.computed_tokens/shared": "So may a shared one when its request's first step has returned.",
    "stores:Stores.begin": "A store pins its source block.",
    "stores:Stores.send": "A store begins when the worker's weights are known to be unchanged.",
    "stores:Stores.yield_idle": "A block that only stores hold is free, and watched.",
    "stores:Stores._reused": "A store is lost when its block is handed out.",
    "block_pool:BlockPins._reused": "A block that vLLM's reset has touched, and not handed out, stays watched.",
    # the steps' orders
    "scheduler:Scheduler.orders": "A step carries the lost stores to the workers.",
    "worker_step:Worker.begin": "A worker revokes them before it launches the step.",
    "copier:BlockCopier._run": "A revoked copy does not begin.",
    "copier:BlockCopier._end": "A running gather that is revoked fails.",
    "copier:BlockCopier.revoke": "A running scatter that is revoked is waited for.",
    # loads
    "stores:Stores.reading": "A load waits for all stores that read its blocks, also for lost ones.",
    "loads:Loads.unblocked": "It begins when the last of them has ended.",
    "loads:Loads._deliver": "A load is reported when its copies have ended, also if nobody needs it any more.",
    "loads:Loads._report": "A load that is incomplete is reported as failed.",
    "loads:Loads.reports": "The orders of a step repeat the report, because a note may be lost.",
    "loads:Loads.drop": "A load whose request has ended is reported, too.",
    "connector:KvtierConnector.__init__": "vLLM loads, so it keeps blocks that a step under way may write.",
    # internal errors
    "loads:Loads.last_reports": "After an internal error every open load is reported as failed.",
    "scheduler:Scheduler.last_orders": "After an internal error every store and load is revoked.",
    # weights and resets
    "keys:KeyMaker.new_epoch": "A reset renews the keys.",
    "cache_invalidation:Invalidation.reset": "Other weights are used again only when vLLM's own cache is empty.",
    "cache_invalidation:Invalidation.weights_change": "After new weights nothing is stored or loaded until a reset.",
    "worker_step:Worker.results": "The worker looks at its weights in each step.",
    "engine_cache:EngineCache.restart": "Requests that wait for loads start anew when vLLM resets its cache.",
    "engine_cache:EngineCache.watch_resets": "A reset does not count blocks that come free without being used again.",
    "cache_invalidation:Invalidation.own_reset_begins": "vLLM's reset gets the blocks that only stores hold.",
}

SECOND_LINES = {
    "loads:Loads.void": "A load that is open when the weights change, or at a reset, is void.",
    "step_metadata:StepOrders": "After a change of weights the workers report every load as failed.",
}
"""No promise needs these while `EngineCache.restart` holds. They save a load's bandwidth, and guard against loss."""


def named(rule: str) -> str:
    """The key of a rule, given without its module."""
    return _BY_FUNCTION[rule]


def missing() -> list[str]:
    """The rules whose function does not exist."""
    return [rule for rule in (*RULES, *SECOND_LINES) if not _exists(*rule.partition("/")[0].split(":"))]


def _exists(module: str, function: str) -> bool:
    """Whether a module defines a function. It reads the source, because some modules import vLLM or torch."""
    (path,) = (Path(kvtier.__file__).parent / "connect" / "vllm").rglob(f"{module}.py")
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for name in function.split("."):
        found = [it for it in body if isinstance(it, ast.ClassDef | ast.FunctionDef) and it.name == name]
        if not found:
            return False
        body = found[0].body
    return True


_BY_FUNCTION = {rule.partition(":")[2]: rule for rule in (*RULES, *SECOND_LINES)}
