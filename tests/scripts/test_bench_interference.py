"""`bench/interference.py`: samples beside the tier alternate, and preempted steps are excluded."""

import threading

from bench.interference import Steps, _sample, measure


def test_it_moves_beside_every_second_sample_and_stops():
    begun: list[threading.Event] = []

    def move(stop: threading.Event) -> None:
        begun.append(stop)
        assert stop.wait(60.0)

    found = measure(move, repeats=3, steps=20)
    assert len(begun) == 3
    assert all(stop.is_set() for stop in begun)
    for steps in (found.alone, found.beside):
        assert 0 < steps.p50_ms <= steps.p99_ms
        assert 0 <= steps.undisturbed <= 1


def test_steps_that_the_system_interrupted_are_left_out(monkeypatch):
    steps = iter([(0.001, False)] * 50 + [(0.002, False)] * 10 + [(0.9, True)] * 40)
    monkeypatch.setattr("bench.interference._step", lambda _loops: next(steps))
    assert _sample(1, 100) == Steps(2.0, 900.0, 2.0, 0.6)
    steps = iter([(0.5, True)] * 10)
    assert _sample(1, 10) == Steps(500.0, 500.0, 500.0, 0.0)
