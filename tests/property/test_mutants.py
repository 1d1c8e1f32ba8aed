"""Bugs planted in slots, pins, answers and ends: the simulator must find each of them.

That the core without a mutant passes the same seeds is what `test_simulation` shows.
"""

from collections.abc import Callable, Sequence

import pytest
from tests.mutants import Mutant, Patch, assert_found, blind_checks

from kvtier.core import asking, cache, host, traffic, waiting, work
from kvtier.core.residency import Residency
from kvtier.types import Drop, Link, NextTurn, Outcome, Tell

MUTANTS: list[Mutant] = []


def mutant(plant: Mutant) -> Mutant:
    MUTANTS.append(plant)
    return plant


# ---- what sessions say -----------------------------------------------------------------------------------------------


@mutant
def news_of_a_session_does_not_wait_for_its_stores(patch: Patch) -> None:
    def expects(self: cache.Cache, session: str, next_turn: NextTurn | None) -> None:
        self._host.expects(session, next_turn)
        self._commands += [Tell(lower.name, session, next_turn) for lower in self._lowers.all]

    patch.setattr(cache.Cache, "expects", expects)


@mutant
def news_of_a_session_that_stores_is_forgotten(patch: Patch) -> None:
    real = cache.Cache._say

    def say(self: cache.Cache) -> None:
        real(self)
        self._unsaid.clear()

    patch.setattr(cache.Cache, "_say", say)


@mutant
def old_news_of_a_session_is_told(patch: Patch) -> None:
    patch.setattr(cache.Cache, "expects", lambda self, *said: self._unsaid.setdefault(*said))


# ---- slots and pins --------------------------------------------------------------------------------------------------


@mutant
def a_pin_is_never_taken_back(patch: Patch) -> None:
    patch.setattr(host.Host, "unpin", lambda self, entry: None)
    blind_checks(patch)


@mutant
def a_pinned_object_is_evicted(patch: Patch) -> None:
    patch.setattr(host, "_is_idle", lambda entry, *, may_owe: entry.residency is Residency.READY)
    blind_checks(patch)


@mutant
def a_demotion_holds_no_pin(patch: Patch) -> None:
    real_send, real_demoted = traffic.Traffic._send, traffic.Traffic._demoted

    def send(self: traffic.Traffic, link: Link, entry: work.Entry, now_s: float, **rest: object) -> None:
        if link is Link.DEMOTE:
            self._host.unpin(entry)
        real_send(self, link, entry, now_s, **rest)

    def demoted(self: traffic.Traffic, flight: work.Flight, now_s: float) -> None:
        self._host.pin(flight.entry)
        real_demoted(self, flight, now_s)

    patch.setattr(traffic.Traffic, "_send", send)
    patch.setattr(traffic.Traffic, "_demoted", demoted)
    blind_checks(patch)


@mutant
def the_slot_of_a_late_promotion_is_reused_at_once(patch: Patch) -> None:
    def late(self: host.Host, entry: work.Entry) -> None:
        self.failed(entry)

    patch.setattr(host.Host, "late", late)
    patch.setattr(host.Host, "settled", lambda self, entry: None)


@mutant
def a_slot_is_freed_twice(patch: Patch) -> None:
    real = host.Host.failed

    def failed(self: host.Host, entry: work.Entry) -> None:
        real(self, entry)
        self._free[entry.group].append(entry.slot)

    patch.setattr(host.Host, "failed", failed)
    blind_checks(patch)


@mutant
def a_copy_is_readable_before_it_is_whole(patch: Patch) -> None:
    def attach(self: waiting.Waiting, load: work.Load, place: object, entry: work.Entry) -> None:
        self._host.pin(entry)
        self.scatters.append((load, place, entry))

    patch.setattr(waiting.Waiting, "attach", attach)
    blind_checks(patch)


@mutant
def a_demotion_begins_while_the_slot_is_gathered(patch: Patch) -> None:
    real = traffic.Traffic._send

    def send(self: traffic.Traffic, link: Link, entry: work.Entry, now_s: float, **rest: object) -> None:
        real(self, link, entry, now_s, **rest)
        if link is Link.GATHER:
            self._debts.owe(entry, now_s)

    patch.setattr(traffic.Traffic, "_send", send)
    blind_checks(patch)


@mutant
def the_set_of_readable_keys_goes_stale(patch: Patch) -> None:
    real = host.Host._evict

    def evict(self: host.Host, entry: work.Entry) -> None:
        real(self, entry)
        self.readable[entry.group].add(entry.key)

    patch.setattr(host.Host, "_evict", evict)
    blind_checks(patch)


# ---- answers ---------------------------------------------------------------------------------------------------------


@mutant
def the_last_rank_speaks_for_all(patch: Patch) -> None:
    real = traffic.Traffic.complete

    def complete(self: traffic.Traffic, number: int, outcome: Outcome, now_s: float, *, is_fault: bool) -> bool:
        if number in self.flights:
            self.flights[number].outcome = Outcome.DONE
        return real(self, number, outcome, now_s, is_fault=is_fault)

    patch.setattr(traffic.Traffic, "complete", complete)


@mutant
def the_first_rank_speaks_for_all(patch: Patch) -> None:
    real = traffic.Traffic._send

    def send(self: traffic.Traffic, link: Link, entry: work.Entry, now_s: float, **rest: object) -> None:
        ranks, self._ranks = self._ranks, 1
        real(self, link, entry, now_s, **rest)
        self._ranks = ranks

    patch.setattr(traffic.Traffic, "_send", send)


@mutant
def one_rank_that_holds_an_object_is_enough(patch: Patch) -> None:
    real = asking.Asking.answered

    def answered(self: asking.Asking, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        question = self._questions.get(probe_id)
        if question is not None and present is not None:
            if question.ranks_left == self._ranks:
                question.present = list(present)
            question.present = [a or b for a, b in zip(question.present, present, strict=True)]
            present = [True] * len(present)
        real(self, probe_id, present, now_s)

    patch.setattr(asking.Asking, "answered", answered)


@mutant
def a_failed_transfer_counts_as_done(patch: Patch) -> None:
    patch.setattr(traffic, "SEVERITY", dict.fromkeys(Outcome, 0))


@mutant
def a_corrupt_copy_is_not_dropped(patch: Patch) -> None:
    _after_promoted(patch, lambda self: _remove(self._commands, "Drop"))


@mutant
def a_copy_that_could_not_be_read_is_dropped(patch: Patch) -> None:
    real = traffic.Traffic._promoted

    def promoted(self: traffic.Traffic, flight: work.Flight, now_s: float) -> None:
        real(self, flight, now_s)
        if flight.outcome is Outcome.FAILED:
            self._commands.append(Drop(flight.transfer.tier, flight.entry.key, flight.entry.group))

    patch.setattr(traffic.Traffic, "_promoted", promoted)


@mutant
def a_copy_found_corrupt_too_late_is_not_dropped(patch: Patch) -> None:
    real = traffic.Traffic._promoted

    def promoted(self: traffic.Traffic, flight: work.Flight, now_s: float) -> None:
        real(self, flight, now_s)
        if flight.is_late:
            _remove(self._commands, "Drop")

    patch.setattr(traffic.Traffic, "_promoted", promoted)


@mutant
def who_waits_is_forgotten_when_a_transfer_fails(patch: Patch) -> None:
    patch.setattr(waiting.Waiting, "retry", lambda self, waiters: None)


@mutant
def who_waits_is_forgotten_when_a_transfer_arrives(patch: Patch) -> None:
    real = waiting.Waiting.serve
    patch.setattr(waiting.Waiting, "serve", lambda self, waiters, entry: real(self, waiters[:1], entry))


@mutant
def the_same_tier_is_tried_for_ever(patch: Patch) -> None:
    patch.setattr(traffic, "_blame", lambda tier, entry, waiters: None)


@mutant
def a_late_promotion_is_found_again(patch: Patch) -> None:
    def late(self: host.Host, entry: work.Entry) -> None:
        entry.residency = Residency.LOST
        self.lost.append(entry)
        entry.residency = Residency.PROMOTING

    def settled(self: host.Host, entry: work.Entry) -> None:
        self.lost.remove(entry)
        self.arrived(entry, 0.0)

    patch.setattr(host.Host, "late", late)
    patch.setattr(host.Host, "settled", settled)
    blind_checks(patch)


# ---- ends ------------------------------------------------------------------------------------------------------------


@mutant
def a_store_is_done_when_its_gathers_begin(patch: Patch) -> None:
    real = waiting.Waiting.end_store_if_settled

    def end(self: waiting.Waiting, store: work.Store) -> None:
        if not store.todo and store in self.stores:
            store.held += store.unsettled
            store.unsettled = 0
        real(self, store)

    patch.setattr(waiting.Waiting, "end_store_if_settled", end)


@mutant
def a_load_is_done_while_a_scatter_is_out(patch: Patch) -> None:
    real = traffic.Traffic.stop_load

    def stop(self: traffic.Traffic, load: work.Load) -> None:
        real(self, load)
        load.unsettled = 0
        self._waiting._end_load_if_settled(load)

    patch.setattr(traffic.Traffic, "stop_load", stop)
    blind_checks(patch)


@mutant
def a_load_is_not_answered_on_release(patch: Patch) -> None:
    def release(self: cache.Cache, request: object, now_s: float) -> None:
        self._asking.forget(request)
        self._waiting.loads.pop(request, None)
        self._traffic.advance(now_s)

    patch.setattr(cache.Cache, "release", release)


@mutant
def a_store_goes_on_after_release(patch: Patch) -> None:
    def release(self: cache.Cache, request: object, now_s: float) -> None:
        self._asking.forget(request)
        load = self._waiting.loads.get(request)
        if load is not None:
            self._traffic.stop_load(load)
        self._traffic.advance(now_s)

    patch.setattr(cache.Cache, "release", release)


@mutant
def a_released_store_waits_for_what_others_bring(patch: Patch) -> None:
    def detach(self: waiting.Waiting, work_: work.Load | work.Store) -> list[object]:
        if isinstance(work_, work.Load):
            return real(self, work_)
        places = [place for place, _ in work_.todo]
        work_.todo.clear()
        return places

    real = waiting.Waiting._detach
    patch.setattr(waiting.Waiting, "_detach", detach)


@mutant
def a_room_that_was_made_is_used_only_at_the_next_event(patch: Patch) -> None:
    real = traffic.Traffic._advance_once

    def once(self: traffic.Traffic, now_s: float) -> bool:
        real(self, now_s)
        return False

    patch.setattr(traffic.Traffic, "_advance_once", once)


@mutant
def of_several_answers_only_the_last_is_followed_up(patch: Patch) -> None:
    def complete(self: cache.Cache, number: int, outcome: Outcome, now_s: float, *, is_fault: bool = False) -> None:
        self._may_move = self._traffic.complete(number, outcome, now_s, is_fault=is_fault)

    patch.setattr(cache.Cache, "complete", complete)


@mutant
def what_left_between_two_lookups_is_not_asked_for(patch: Patch) -> None:
    patch.setattr(host.Host, "_depart", lambda self, entry: self.entries[entry.group].pop(entry.key))


@mutant
def failed_chunks_count_as_delivered(patch: Patch) -> None:
    real = work.Load.lose

    def lose(self: work.Load, place: object) -> None:
        real(self, place)
        self.failed.pop()

    patch.setattr(work.Load, "lose", lose)


def _remove(commands: list[object], kind: str) -> None:
    commands[:] = [command for command in commands if type(command).__name__ != kind]


def _after_promoted(patch: Patch, change: Callable[[traffic.Traffic], None]) -> None:
    real = traffic.Traffic._promoted

    def promoted(self: traffic.Traffic, flight: work.Flight, now_s: float) -> None:
        real(self, flight, now_s)
        change(self)

    patch.setattr(traffic.Traffic, "_promoted", promoted)


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_the_simulator_finds(plant: Mutant, monkeypatch: Patch) -> None:
    assert_found(plant, monkeypatch)
