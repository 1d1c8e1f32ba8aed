"""Capacity planning: users, capacity, bandwidth, wear, power and cost of a deployment with and without tiers.

```python
from kvtier.plan.read_inputs import load
from kvtier.plan.plan import make_plan

result = make_plan(load(options={"model.name": "llama-3.3-70b", "traffic.users": 200}))
result.tiered.users  # users within the limits, at the best size
result.binding.name  # the limit that is met first
```

Bytes, seconds, tokens and rates a second throughout; shares from 0 to 1. Formulas and their sources are where they are
used: `queueing`, `workload`, `limits`, `cost`.
"""
