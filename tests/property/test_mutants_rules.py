"""Bugs planted in deadlines, budgets, boundaries and write policies: the simulator must find each of them.

That the core without a mutant passes the same seeds is what `test_simulation` shows.
"""

from collections.abc import Callable, Sequence

import pytest
from tests.mutants import Mutant, Patch, assert_found, blind_checks
from tests.sim import engine

from kvtier.core import asking, boundary, cache, debts, health, host, lower, patience, traffic, work
from kvtier.core.limits import WritePolicy
from kvtier.layout import State, Window
from kvtier.types import Link

MUTANTS: list[Mutant] = []


def mutant(plant: Mutant) -> Mutant:
    MUTANTS.append(plant)
    return plant


# ---- deadlines and budgets -------------------------------------------------------------------------------------------


@mutant
def the_deadline_of_a_load_passes_unnoticed(patch: Patch) -> None:
    real_load = cache.Load
    patch.setattr(cache, "Load", lambda r, p, t, res, deadline, *rest: real_load(r, p, t, res, 1e9, *rest))


@mutant
def the_deadline_of_a_transfer_passes_unnoticed(patch: Patch) -> None:
    patch.setattr(traffic.Traffic, "_too_late", lambda self, flight, now_s: None)


@mutant
def a_store_waits_for_ever(patch: Patch) -> None:
    real_store = cache.Store
    patch.setattr(cache, "Store", lambda r, p, h, deadline, todo, n: real_store(r, p, h, 1e9, todo, n))


@mutant
def a_probe_is_waited_for_for_ever(patch: Patch) -> None:
    patch.setattr(asking.Asking, "expire", lambda self, now_s: False)


@mutant
def a_budget_is_not_given_back(patch: Patch) -> None:
    patch.setattr(lower.Lower, "ended", lambda self, link, size_bytes, *, is_late: None)
    blind_checks(patch)


@mutant
def a_budget_is_not_kept(patch: Patch) -> None:
    patch.setattr(lower.Lower, "has_room", lambda self, link, size_bytes: True)
    blind_checks(patch)


@mutant
def small_objects_take_more_than_their_share_of_host_memory(patch: Patch) -> None:
    def has_room(self: lower.Lower, link: Link, size_bytes: int) -> bool:
        fits = self.out_bytes[link] + size_bytes <= self._small_bytes
        return self.out[link] < self.limit[link] or fits

    patch.setattr(lower.Lower, "has_room", has_room)
    blind_checks(patch)


@mutant
def the_breaker_never_opens(patch: Patch) -> None:
    patch.setattr(health.Health, "failed", lambda self, now_s: False)


@mutant
def reads_and_writes_share_a_breaker(patch: Patch) -> None:
    real = lower.Lower.__init__

    def init(self: lower.Lower, *given: object) -> None:
        real(self, *given)
        self.health = dict.fromkeys(Link, self.health[Link.PROMOTE])

    patch.setattr(lower.Lower, "__init__", init)


@mutant
def a_failed_write_counts_against_reads(patch: Patch) -> None:
    real = lower.Lowers.judge

    def judge(self: lower.Lowers, name: str, link: Link, now_s: float, *, is_fault: bool) -> None:
        real(self, name, Link.PROMOTE if is_fault else link, now_s, is_fault=is_fault)

    patch.setattr(lower.Lowers, "judge", judge)


@mutant
def the_breaker_never_closes(patch: Patch) -> None:
    patch.setattr(health.Health, "succeeded", lambda self: False)


# ---- what is restorable ----------------------------------------------------------------------------------------------


def _needed(patch: Patch, change: Callable[[object, object, int, list[int]], list[int]]) -> None:
    real = boundary.needed_chunks

    def needed(group: object, prefix: object, tokens: int) -> list[int]:
        return change(group, prefix, tokens, real(group, prefix, tokens))

    for module in (boundary, cache, engine):
        patch.setattr(module, "needed_chunks", needed)


@mutant
def a_window_is_one_chunk_short(patch: Patch) -> None:
    def shorter(group: object, prefix: object, tokens: int, chunks: list[int]) -> list[int]:
        return chunks[1:] if isinstance(group.validity, Window) and len(chunks) > 1 else chunks

    _needed(patch, shorter)


@mutant
def a_state_is_taken_from_the_boundary_before(patch: Patch) -> None:
    def earlier(group: object, prefix: object, tokens: int, chunks: list[int]) -> list[int]:
        return [max(0, chunks[0] - 1)] if isinstance(group.validity, State) and chunks else chunks

    _needed(patch, earlier)


@mutant
def a_lookup_forgets_what_is_below(patch: Patch) -> None:
    patch.setattr(cache.Cache, "_place_of", lambda self, known, key, group: None)


@mutant
def what_left_after_the_lookup_is_not_tried_below(patch: Patch) -> None:
    def tiers_for(self: asking.Asking, request: object, item: object) -> Sequence[str]:
        known = self._known.get(request)
        return known.below.get(item, ()) if known is not None else ()

    patch.setattr(asking.Asking, "tiers_for", tiers_for)


# ---- what lower tiers get --------------------------------------------------------------------------------------------


@mutant
def write_back_forgets_what_it_evicts(patch: Patch) -> None:
    def leave(self: debts.Debts, group: int, wanted: int) -> bool:
        entry = self._host.oldest_owed(group)
        if entry is not None:
            self._forget(entry)
        return entry is not None

    patch.setattr(debts.Debts, "_let_leave", leave)


@mutant
def write_through_writes_nothing(patch: Patch) -> None:
    real = debts.Debts.owe

    def owe(self: debts.Debts, entry: work.Entry, now_s: float) -> None:
        if self._limits.write_policy is not WritePolicy.THROUGH:
            real(self, entry, now_s)

    patch.setattr(debts.Debts, "owe", owe)


@mutant
def a_store_never_evicts(patch: Patch) -> None:
    def take(self: host.Host, group: int) -> int | None:
        return self._free[group].pop() if self._free[group] else None

    patch.setattr(host.Host, "take_slot", take)


@mutant
def the_queue_of_a_tier_that_is_down_is_kept(patch: Patch) -> None:
    real = traffic.Traffic._advance_demotions

    def advance(self: traffic.Traffic, now_s: float) -> bool:
        if any(not one.may_tell(now_s) for one in self._lowers):
            return False
        return real(self, now_s)

    patch.setattr(traffic.Traffic, "_advance_demotions", advance)


# ---- patience --------------------------------------------------------------------------------------------------------


@mutant
def a_load_goes_on_when_it_no_longer_pays(patch: Patch) -> None:
    patch.setattr(work.Load, "end_s", property(lambda self: self.deadline_s))


@mutant
def what_has_come_buys_no_time(patch: Patch) -> None:
    patch.setattr(work.Load, "advanced", lambda self, groups, now_s: None)


@mutant
def what_has_been_gained_may_be_lost_again(patch: Patch) -> None:
    real = work.Load.advanced

    def advanced(self: work.Load, groups: int, now_s: float) -> None:
        real(self, groups, now_s)
        self.cut_s -= self.lowest_regret_s
        self.lowest_regret_s = 0.0

    patch.setattr(work.Load, "advanced", advanced)


@mutant
def the_time_in_which_the_engine_is_busy_is_charged(patch: Patch) -> None:
    patch.setattr(patience.Patience, "cut_s", lambda self, lowest_s, saved_s: lowest_s + saved_s + self.allowance_s)


@mutant
def the_time_in_which_the_engine_is_busy_is_given_anew_with_each_chunk(patch: Patch) -> None:
    patch.setattr(patience.Patience, "regret_s", lambda self, elapsed_s, saved_s: elapsed_s - saved_s)


@mutant
def a_chunk_behind_a_hole_counts_as_leading(patch: Patch) -> None:
    real = work.Load.advanced

    def advanced(self: work.Load, groups: int, now_s: float) -> None:
        last = max(chunk for _, chunk in self.delivered)
        self.run = max(self.run, last) if last < len(self.prefix.keys) else self.run
        real(self, groups, now_s)

    patch.setattr(work.Load, "advanced", advanced)


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_the_simulator_finds(plant: Mutant, monkeypatch: Patch) -> None:
    assert_found(plant, monkeypatch)
