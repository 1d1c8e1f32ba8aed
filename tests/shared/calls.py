"""Calls of a tier whose server fails: each ends in time, with a value or a `TierError`."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.shared.proxy import Proxy
from tests.shared.s3_world import frame_of, name_of

from kvtier.errors import TierError
from kvtier.tier.base import Read, Tier, Write

SLACK_S = 2.0
"""A busy machine, and the time that a failed write waits for its connection."""


def result(act: Callable[[], Any]) -> Any:
    """What `act` returns, the only item of a list, or its error."""
    try:
        answer = act()
    except TierError as error:
        return error
    return answer[0] if isinstance(answer, list) and len(answer) == 1 else answer


def timed(act: Callable[[], Any], deadline_s: float) -> Any:
    """`result`, within the deadline."""
    start_s = time.monotonic()
    answer = result(act)
    assert time.monotonic() - start_s < deadline_s + SLACK_S
    return answer


def all_fail_in_time(tier: Tier, size: int, deadline_s: float, probe_deadline_s: float) -> None:
    """Each kind of call, all at once, ends within its deadline with an error. Object 1 has `size` bytes."""
    frame, into = frame_of(1, size), memoryview(bytearray(size))
    calls = {
        "read": (lambda: tier.read(name_of(1), into), deadline_s),
        "write": (lambda: tier.write(name_of(2), frame), deadline_s),
        "delete": (lambda: tier.delete(name_of(3)), deadline_s),
        "contains": (lambda: tier.contains([name_of(n) for n in range(23)]), probe_deadline_s),
        "read_many": (lambda: tier.read_many([Read(name_of(1), into)] * 2)[0], deadline_s),
        "write_many": (lambda: tier.write_many([Write(name_of(n), frame) for n in (4, 5)])[0], deadline_s),
    }
    with ThreadPoolExecutor(len(calls)) as threads:
        answers = dict(zip(calls, threads.map(lambda each: timed(*each), calls.values()), strict=True))
    assert all(isinstance(answer, TierError) for answer in answers.values()), answers
    assert isinstance(timed(lambda: tier.contains([]), probe_deadline_s), TierError), "and so does the health check"


def during_an_outage(proxy: Proxy, act: Callable[[], Any]) -> Any:
    """What `act` returns while the network is cut for a moment."""
    proxy.cut()
    timer = threading.Timer(0.3, proxy.heal)
    timer.start()
    try:
        return act()
    finally:
        timer.join(10)
