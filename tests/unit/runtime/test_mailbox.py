"""A mailbox passes items on in order, and its waits end in time whatever signals come."""

import signal
import threading
import time

from kvtier.runtime.mailbox import Mailbox


def test_items_come_in_order_and_a_wait_ends_with_the_first():
    box = Mailbox()
    assert box.get() is None
    assert [box.put(number) for number in range(3)] == [1, 2, 3]
    assert [box.get() for _ in range(4)] == [0, 1, 2, None]
    threading.Timer(0.05, box.put, args=[9]).start()
    began_s = time.monotonic()
    assert box.get(10.0) == 9
    assert time.monotonic() - began_s < 5


def test_signals_around_the_deadline_make_no_wait_longer():
    """`queue.SimpleQueue.get` of CPython 3.11 hangs here, mostly within the first twenty waits."""
    box = Mailbox()
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(0.002))
    signal.setitimer(signal.ITIMER_REAL, 0.004, 0.004)
    try:
        for _ in range(100):
            began_s = time.monotonic()
            assert box.get(0.005) is None
            assert time.monotonic() - began_s < 1.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
