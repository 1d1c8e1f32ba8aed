"""Plan the capacity of a deployment with and without tiers: users, capacity, bandwidth, wear, power and cost.

```python
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.plan import make_plan

result = make_plan(load(options={"model.name": "llama-3.3-70b", "traffic.users": 200}))
result.tiered.users  # users within the limits, at the best size
result.binding.name  # the limit that is met first
```

All figures are in bytes, seconds, tokens and rates per second; shares are from 0 to 1. Formulas and their sources are
documented where they are used: `operating_point`, `workload`, `max_load`, `cost`.
"""
