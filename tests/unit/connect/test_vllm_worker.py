"""A worker reports each load once, whichever way it hears of it, and lets no copy spoil a forward, nor the reverse."""

import threading
from types import SimpleNamespace

import pytest

from kvtier.connect.vllm.checkpoint_reads import AdapterRead
from kvtier.connect.vllm.step_metadata import LOADED_NOTE, LoadReport, StepDone, StepOrders
from kvtier.connect.vllm.worker import worker_step as module
from kvtier.connect.vllm.worker.worker_step import Worker
from kvtier.runtime.protocol import Note
from kvtier.types import RequestId

LOAD = RequestId("L0/r7")


class Copier:
    """Remembers what was revoked."""

    def __init__(self, *, is_hung: bool = False) -> None:
        self.is_hung = is_hung
        self.revoked = []

    def revoke(self, requests, wait_s: float) -> bool:
        self.revoked.append((tuple(requests), wait_s))
        return not self.is_hung


def note(blocks=(), *, is_failed=False) -> Note:
    return Note(LOADED_NOTE, LOAD, tuple(blocks), is_failed)


def ended(blocks=(), *, is_failed=False) -> LoadReport:
    return LoadReport(LOAD, tuple(blocks), is_failed)


def test_the_name_of_a_request_may_have_slashes():
    assert LoadReport(RequestId("L3/cmpl/0/x"), (), is_failed=False).request == "cmpl/0/x"


@pytest.mark.parametrize("order", ["note first", "orders first", "note alone", "orders alone"])
def test_a_load_is_reported_once(order):
    worker = Worker(Copier().revoke)
    steps = {"note first": ["note", "orders"], "orders first": ["orders", "note"]}.get(order, [order.split()[0]])
    reported = []
    for number, what in enumerate(steps):
        if what == "note":
            worker.receive(note([4, 5]))
        worker.begin(StepOrders(number, ended=(ended([4, 5]),) if what == "orders" else ()))
        reported += worker.results()[0]
        assert worker.take_bad_blocks() == ({4, 5} if not number else set())
    assert reported == ["r7"]
    assert len(worker._received_once) == len(steps) % 2


@pytest.mark.parametrize("is_read", [True, False])
def test_a_load_for_an_adapter_counts_only_if_the_worker_has_read_that_adapter(is_read):
    asked, reads = [], (AdapterRead(7, {}),)
    adapters = SimpleNamespace(has_read=lambda *given: asked.append(given) or is_read, take=lambda: reads)
    worker = Worker(Copier().revoke, adapters=adapters)
    adapter = SimpleNamespace(lora_int_id=7)
    worker.begin(StepOrders(1, ended=(ended()._replace(adapter=adapter),), named={7: ["versions"]}))
    assert asked == [(adapter, ["versions"])]
    assert worker.results() == ({"r7"}, set() if is_read else {"r7"})
    assert worker.done == StepDone(1, adapters=reads)
    assert worker.done.aggregate(worker.done).adapters == reads + reads
    assert not worker._received_once


def test_a_failed_load_is_reported_as_received_and_failed():
    worker = Worker(Copier().revoke)
    worker.receive(note(is_failed=True))
    assert worker.results() == ({"r7"}, {"r7"})


def test_every_step_says_that_it_has_run():
    worker = Worker(Copier().revoke)
    worker.begin(StepOrders(41))
    assert worker.done == StepDone(41)
    assert worker.done.aggregate(StepDone(40)) == StepDone(40)


def test_a_step_that_computes_and_reports_nothing_looks_at_no_weights():
    looks: list[bool] = []

    def look(*, is_reset: bool) -> str:
        looks.append(is_reset)
        return "" if is_reset else "changed"

    worker = Worker(Copier().revoke, look)
    worker.begin(StepOrders(1))
    worker.results()
    assert worker.done == StepDone(1, "changed")
    worker.begin(StepOrders(2, is_empty=True, is_reset=True))
    worker.results()
    assert worker.done == StepDone(2)
    assert looks == [False, True]
    worker.receive(note())
    assert worker.results() == ({"r7"}, {"r7"})
    assert worker.done == StepDone(2, "changed")


def test_an_idle_step_waits_for_the_next_report(monkeypatch):
    monkeypatch.setattr(module, "IDLE_WAIT_S", LONG_S)
    worker = Worker(Copier().revoke)
    worker.begin(StepOrders(1, is_waiting=True))
    was_woken = heard_while_it_waits(worker, note())
    assert worker.results()[0] == {"r7"}
    assert was_woken == [True]


LONG_S = 60.0


def heard_while_it_waits(worker: Worker, found: Note) -> list[bool]:
    """Send a note as soon as the worker waits; returns the result of its wait."""
    wait, returned = worker._changed.wait, []

    def waiting(*args):
        threading.Thread(target=worker.receive, args=[found]).start()
        returned.append(wait(*args))
        return returned[-1]

    worker._changed.wait = waiting
    return returned


def test_what_lost_its_blocks_is_kept_off_them_before_anything_else():
    copier = Copier()
    worker = Worker(copier.revoke)
    worker.begin(StepOrders(1, revoked=(RequestId("S1/a"), RequestId("S2/b"))))
    assert copier.revoked == [(("S1/a", "S2/b"), module.FENCE_WAIT_S)]


def test_a_copy_that_does_not_end_stops_the_engine_rather_than_spoil_it():
    worker = Worker(Copier(is_hung=True).revoke)
    with pytest.raises(TimeoutError, match="device appears to hang"):
        worker.begin(StepOrders(1, revoked=(RequestId("S1/a"),)))


def test_a_step_that_finds_other_weights_completes_no_load():
    asked, news = [], "parameters were replaced"
    worker = Worker(Copier().revoke, lambda *, is_reset: asked.append(is_reset) or news)
    worker.begin(StepOrders(1, ended=(ended(),)))
    assert asked == [], "they may change during the forward"
    assert worker.results() == ({"r7"}, {"r7"})
    assert worker.done == StepDone(1, news)
    worker.begin(StepOrders(2, ended=(LoadReport(RequestId("L2/r9"), (), False),)))
    assert worker.results() == ({"r9"}, {"r9"}), "its orders may be older than the scheduler's knowledge"
    news = ""
    worker.begin(StepOrders(3, is_off=True, ended=(LoadReport(RequestId("L4/r2"), (), False),)))
    assert worker.results() == ({"r2"}, {"r2"}), "the scheduler knows of calls that the worker does not see"
    assert asked == [False] * 3
    worker.begin(StepOrders(4, is_reset=True, ended=(LoadReport(RequestId("L3/r1"), (), False),)))
    assert asked.pop(), "before the forward"
    assert worker.results() == ({"r1"}, set())
    assert worker.done == StepDone(4)
