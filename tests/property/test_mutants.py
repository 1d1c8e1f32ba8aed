"""Bugs planted at public methods of the core: the simulator finds each of them within a few hundred seeds.

`test_simulation` shows that the same seeds pass without a planted bug.
"""

from collections.abc import Callable, Sequence

import pytest
from tests import sim
from tests.sim import engine, objects

from kvtier.core import (
    cache,
    host_residency,
    operations,
    prefix,
    tier_searches,
    tier_state,
    tier_writes,
    transfer_scheduler,
)
from kvtier.core.limits import WritePolicy
from kvtier.layout import Window
from kvtier.runtime import command_runner, rank_group
from kvtier.runtime.executor import Completion, Job, Work
from kvtier.types import SEVERITY, Direction, Outcome, Probe, Transfer

SEEDS = 400
"""A mutant that survives as many seeds breaks an invariant that nothing checks."""

Patch = pytest.MonkeyPatch
Mutant = Callable[[Patch], None]
MUTANTS: list[Mutant] = []


def mutant(plant: Mutant) -> Mutant:
    MUTANTS.append(plant)
    return plant


# ---- slots and pins --------------------------------------------------------------------------------------------------


@mutant
def a_pin_is_never_released(patch: Patch) -> None:
    patch.setattr(host_residency.HostMemory, "unpin", lambda self, entry: None)


@mutant
def the_slot_of_a_late_promotion_is_reused_at_once(patch: Patch) -> None:
    patch.setattr(host_residency.HostMemory, "late", host_residency.HostMemory.failed)
    patch.setattr(host_residency.HostMemory, "reclaim", lambda self, entry: None)


@mutant
def the_staging_area_has_no_limit(patch: Patch) -> None:
    patch.setattr(host_residency.HostMemory, "take_staging_slot", host_residency.HostMemory.take_slot)


@mutant
def a_chunk_is_readable_before_it_has_arrived(patch: Patch) -> None:
    real = operations.OpenOperations.found

    def found(self: operations.OpenOperations, item: operations.WorkItem, entry: host_residency.HostEntry) -> None:
        if isinstance(item.work, operations.LoadOperation):
            item.state, item.entry = operations.QUEUED, entry
            self._host.pin(entry)
            self.scatters.append(item)
        else:
            real(self, item, entry)

    patch.setattr(operations.OpenOperations, "found", found)


# ---- answers ---------------------------------------------------------------------------------------------------------


@mutant
def a_failed_transfer_counts_as_done(patch: Patch) -> None:
    real = transfer_scheduler.TransferScheduler.complete

    def complete(
        self: transfer_scheduler.TransferScheduler, transfer_id: int, outcome: Outcome, now_s: float, *, is_fault: bool
    ) -> bool:
        return real(self, transfer_id, Outcome.DONE, now_s, is_fault=is_fault)

    patch.setattr(transfer_scheduler.TransferScheduler, "complete", complete)


@mutant
def a_probe_counts_although_the_tier_lacks_the_object(patch: Patch) -> None:
    real = tier_searches.Probes.answered

    def answered(self: tier_searches.Probes, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        real(self, probe_id, present and [True] * len(present), now_s)

    patch.setattr(tier_searches.Probes, "answered", answered)


@mutant
def only_the_first_waiter_gets_an_arrived_chunk(patch: Patch) -> None:
    real = operations.OpenOperations.arrived

    def arrived(self: operations.OpenOperations, entry: host_residency.HostEntry) -> None:
        del self.waiters.get(entry, [])[1:]
        real(self, entry)

    patch.setattr(operations.OpenOperations, "arrived", arrived)


# ---- ends, deadlines and budgets -------------------------------------------------------------------------------------


@mutant
def a_load_is_not_answered_on_release(patch: Patch) -> None:
    patch.setattr(cache.Cache, "release", lambda self, request, now_s: self._operations.loads.pop(request, None))


@mutant
def a_probe_has_no_deadline(patch: Patch) -> None:
    patch.setattr(tier_searches.Probes, "expire", lambda self, now_s: False)


@mutant
def a_budget_is_not_kept(patch: Patch) -> None:
    patch.setattr(tier_state.TierState, "has_room", lambda self, link, size_bytes: True)


@mutant
def the_breaker_never_opens(patch: Patch) -> None:
    patch.setattr(tier_state.CircuitBreaker, "failed", lambda self, now_s, operation: False)


@mutant
def a_load_waits_for_the_trial_of_a_tier_that_is_down(patch: Patch) -> None:
    patch.setattr(tier_state.TierState, "can_load", lambda self: True)


@mutant
def a_load_goes_on_when_it_no_longer_pays(patch: Patch) -> None:
    patch.setattr(operations.LoadOperation, "end_s", property(lambda self: self.deadline_s))


# ---- boundaries and lower tiers --------------------------------------------------------------------------------------


@mutant
def a_window_is_one_chunk_short(patch: Patch) -> None:
    real = prefix.needed_chunks

    def needed(group: object, of: object, tokens: int) -> Sequence[int]:
        chunks = real(group, of, tokens)
        return chunks[1:] if isinstance(group.validity, Window) and len(chunks) > 1 else chunks

    for module in (prefix, cache, engine):
        patch.setattr(module, "needed_chunks", needed)


@mutant
def write_through_writes_nothing(patch: Patch) -> None:
    real = tier_writes.TierWrites.mark_pending

    def mark_pending(self: tier_writes.TierWrites, entry: host_residency.HostEntry, now_s: float) -> None:
        if self._limits.write_policy is not WritePolicy.THROUGH:
            real(self, entry, now_s)

    patch.setattr(tier_writes.TierWrites, "mark_pending", mark_pending)


# ---- failed reads ----------------------------------------------------------------------------------------------------


@mutant
def a_copy_whose_reads_fail_is_offered_for_ever(patch: Patch) -> None:
    patch.setattr(tier_state.TierState, "is_left_alone", lambda self, item, now_s: False)


@mutant
def a_copy_that_was_replaced_is_still_left_alone(patch: Patch) -> None:
    patch.setattr(tier_state.TierState, "replaced", lambda self, item: None)


@mutant
def a_copy_is_read_again_while_a_read_of_it_is_stuck(patch: Patch) -> None:
    real = tier_state.TierState.read_failed

    def read_failed(self: tier_state.TierState, item: host_residency.Item, now_s: float, *, is_stuck: bool) -> None:
        del is_stuck
        real(self, item, now_s - tier_state.PAUSE_S_MAX, is_stuck=False)

    patch.setattr(tier_state.TierState, "read_failed", read_failed)


# ---- objects that pass through ---------------------------------------------------------------------------------------


OBJECT_MUTANTS: list[Mutant] = []


def object_mutant(plant: Mutant) -> Mutant:
    OBJECT_MUTANTS.append(plant)
    return plant


@object_mutant
def a_put_ends_before_a_tier_has_the_object(patch: Patch) -> None:
    patch.setattr(operations, "_has_tier", lambda entry: True)


@object_mutant
def a_put_is_not_ended_by_its_writes(patch: Patch) -> None:
    patch.setattr(operations.OpenOperations, "written", lambda self, entry: None)


@object_mutant
def a_put_believes_what_a_tier_had(patch: Patch) -> None:
    patch.setattr(tier_writes.TierWrites, "put_again", lambda self, entry, now_s: None)


@object_mutant
def a_bad_copy_that_stays_counts_as_written(patch: Patch) -> None:
    patch.setattr(cache.Cache, "dropped", lambda self, drop, outcome: None)


@object_mutant
def a_released_put_waits_for_tiers(patch: Patch) -> None:
    real = operations.OpenOperations.stop

    def stop(self: operations.OpenOperations, work: operations.LoadOperation | operations.StoreOperation) -> None:
        real(self, work)
        work.is_over = False

    patch.setattr(operations.OpenOperations, "stop", stop)


@object_mutant
def an_object_stays_in_its_slot(patch: Patch) -> None:
    patch.setattr(host_residency.HostMemory, "leave_if_written", lambda self, entry: None)


@object_mutant
def a_search_that_is_released_has_no_end(patch: Patch) -> None:
    patch.setattr(tier_searches.Probes, "forget", lambda self, request: self._answers.pop(request, None))


@object_mutant
def an_object_whose_reads_fail_is_offered_for_ever(patch: Patch) -> None:
    a_copy_whose_reads_fail_is_offered_for_ever(patch)


@object_mutant
def the_slot_of_a_late_read_is_reused_at_once(patch: Patch) -> None:
    the_slot_of_a_late_promotion_is_reused_at_once(patch)


# ---- several ranks ---------------------------------------------------------------------------------------------------


RANK_MUTANTS: list[Mutant] = []


def rank_mutant(plant: Mutant) -> Mutant:
    RANK_MUTANTS.append(plant)
    return plant


@rank_mutant
def a_transfer_counts_when_one_rank_has_done_it(patch: Patch) -> None:
    def best(one: Completion, other: Completion) -> Completion:
        return min(one, other, key=lambda it: SEVERITY[it.outcome])

    patch.setattr(rank_group, "merged", best)


@rank_mutant
def the_rank_that_ends_last_decides(patch: Patch) -> None:
    patch.setattr(rank_group, "merged", lambda _one, other: other)


@rank_mutant
def a_transfer_ends_with_the_first_rank(patch: Patch) -> None:
    ranks = rank_group.RankGroup
    real, begin = ranks._answered, rank_group._PendingCommand.__init__

    def answered(self: rank_group.RankGroup, position: int, completion: Completion) -> None:
        if id(completion.command) in self._open:
            real(self, position, completion)

    patch.setattr(ranks, "_answered", answered)
    patch.setattr(rank_group._PendingCommand, "__init__", lambda self, command, _ranks: begin(self, command, 1))


def run_ranks(seed: int) -> sim.SeedReport:
    return sim.run(seed, most_ranks=4, absent=0.0)


ABSENT_MUTANTS: list[Mutant] = []


def absent_mutant(plant: Mutant) -> Mutant:
    ABSENT_MUTANTS.append(plant)
    return plant


@absent_mutant
def a_group_counts_as_held_where_it_is_absent(patch: Patch) -> None:
    def some(one: Completion, other: Completion) -> Completion:
        together = merged(one, other)
        return together._replace(present=tuple(map(max, one.present, other.present)) if together.present else ())

    merged = rank_group.merged
    patch.setattr(rank_group, "merged", some)


@absent_mutant
def a_rank_that_lacks_a_group_finds_nothing_of_it(patch: Patch) -> None:
    real = command_runner.CommandRunner._ask

    def ask(self: command_runner.CommandRunner, job: Job, command: Probe) -> command_runner.Result:
        result = real(self, job, command)
        present = zip(command.objects, result.present, strict=True)
        return result._replace(present=tuple(it and group not in self._absent for (_, group), it in present))

    patch.setattr(command_runner.CommandRunner, "_ask", ask)


@absent_mutant
def the_rank_that_ends_first_decides(patch: Patch) -> None:
    patch.setattr(rank_group, "merged", lambda one, _other: one)


@absent_mutant
def a_rank_scatters_what_it_lacks(patch: Patch) -> None:
    real = command_runner.CommandRunner._is_elsewhere

    def is_elsewhere(self: command_runner.CommandRunner, command: Work) -> bool:
        is_scatter = isinstance(command, Transfer) and command.direction is Direction.SCATTER
        return not is_scatter and real(self, command)

    patch.setattr(command_runner.CommandRunner, "_is_elsewhere", is_elsewhere)


@absent_mutant
def a_rank_does_not_scatter_what_another_one_fills(patch: Patch) -> None:
    real = command_runner.CommandRunner._is_elsewhere

    def is_elsewhere(self: command_runner.CommandRunner, command: Work) -> bool:
        place = ("", getattr(command, "group", -1))
        return place in self._kept_elsewhere or real(self, command)

    patch.setattr(command_runner.CommandRunner, "_is_elsewhere", is_elsewhere)


def run_absent(seed: int) -> sim.SeedReport:
    return sim.run(seed, most_ranks=4, absent=1.0)


@pytest.mark.parametrize(
    ("plant", "run"),
    [
        *((plant, sim.run) for plant in MUTANTS),
        *((plant, objects.run) for plant in OBJECT_MUTANTS),
        *((plant, run_ranks) for plant in RANK_MUTANTS),
        *((plant, run_absent) for plant in ABSENT_MUTANTS),
    ],
    ids=lambda it: it.__name__,
)
def test_the_simulator_finds(plant: Mutant, run: Callable[[int], sim.SeedReport], monkeypatch: Patch) -> None:
    """The core's own checks are off, so that the bug is seen from outside; a crash of the patch does not count."""
    plant(monkeypatch)
    monkeypatch.setattr(cache.Cache, "check", lambda self: None)
    found = next((report for report in map(run, range(SEEDS)) if not report.is_good), None)
    assert found is not None, f"{plant.__name__} survived {SEEDS} seeds"
    assert found.failure is not None
    assert not found.failure.startswith(("TypeError", "AttributeError", "NameError")), found.where
    print(f"{plant.__name__}: seed {found.seed}: {found.failure[:150]}")
