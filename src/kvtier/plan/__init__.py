"""What a KV cache beside the GPU buys, what it must provide, and which limit binds.

```python
from kvtier import plan

result = plan.make_plan(plan.load(options={"model.name": "llama-3.3-70b", "model.tp": 4, "traffic.users": 200}))
result.tiered.users_at_ttft  # users within target.ttft_s
result.binding.name  # the limit that is met first
```

Bytes, seconds, tokens and rates a second throughout; shares from 0 to 1. Formulas and their sources are where they are
used: `plan.operate`, `plan.reuse`, `plan.limits`, `plan.money`.
"""

from kvtier.plan.inputs import SETTINGS, Inputs
from kvtier.plan.limits import Ceiling, Limit
from kvtier.plan.planning import Capacity, Drives, Plan, Side, Tier, make_plan
from kvtier.plan.reading import OPTIONS, example_names, load
from kvtier.plan.sensitivity import Lever
from kvtier.plan.stated import Stated, compare
from kvtier.plan.telling import as_dict

__all__ = [
    "OPTIONS",
    "SETTINGS",
    "Capacity",
    "Ceiling",
    "Drives",
    "Inputs",
    "Lever",
    "Limit",
    "Plan",
    "Side",
    "Stated",
    "Tier",
    "as_dict",
    "compare",
    "example_names",
    "load",
    "make_plan",
]
