"""No two lines of a plan contradict each other: what a buyer recalculates gives what the page says."""

import re

import pytest
from tests.tools.plan.plans import planned

from kvtier.tools.plan.answer import request


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        ({"ttft_s": 0.05}, "--ttft"),
        ({"ttft_s": 0.0, "ttft_p95_s": 0.3}, "--target-p95"),
        ({"ttft_s": 1.0, "ttft_p95_s": 0.3}, "--target-p95"),
        ({"ttft_s": 0.05, "ttft_p95_s": 0.3}, "--ttft and --target-p95"),
        ({"ttft_s": 1.0, "tpot_s": 0.001}, "target.tpot_s"),
    ],
)
def test_more_time_is_an_option_of_the_limit_that_no_gpus_meet(limits, named):
    """It was --ttft beside --target-p95 300ms, and --ttft adds a limit there."""
    changes = {f"target__{name}": value for name, value in limits.items()}
    plan = planned("llama-3.3-70b", model__weights="fp8", **changes)
    (found,) = re.findall(r"more time \((.*?)\) may be", request(plan))
    assert found == named
