"""The demo's own count of what can be restored, which must not depend on kvtier."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.demo.restorable import (
    RUNS_MAX,
    EarlierRun,
    StoredPrefixes,
    add_to_history,
    drop_stale_history,
    read_history,
)


def test_nothing_stored_nothing_restorable():
    assert StoredPrefixes(4).restorable_tokens(list(range(100))) == 0


def test_whole_chunks_of_prompt_and_answer_are_restorable():
    stored = StoredPrefixes(4)
    stored.store([1, 2, 3, 4, 5, 6], [7, 8, 9])
    # 1..8 have KV: two chunks. The next prompt goes on from there.
    assert stored.restorable_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 8


def test_the_last_token_of_an_answer_has_no_kv():
    stored = StoredPrefixes(4)
    stored.store([1, 2, 3, 4, 5, 6], [7, 8])
    assert stored.restorable_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 4


def test_the_token_that_must_be_computed_does_not_count():
    stored = StoredPrefixes(4)
    stored.store(list(range(12)), [0])
    assert stored.restorable_tokens(list(range(8))) == 7
    assert stored.restorable_tokens(list(range(9))) == 8
    assert stored.restorable_tokens([0]) == 0
    assert stored.restorable_tokens([]) == 0


def test_a_chunk_counts_only_with_all_that_comes_before_it():
    stored = StoredPrefixes(2)
    stored.store([1, 2, 3, 4, 5, 6], [0])
    assert stored.restorable_tokens([9, 2, 3, 4, 5, 6, 7]) == 0
    assert stored.restorable_tokens([1, 2, 9, 4, 5, 6, 7]) == 2


TOKENS = st.lists(st.integers(0, 2), max_size=14)


@given(st.integers(1, 4), st.lists(st.tuples(TOKENS, TOKENS), max_size=4), TOKENS)
def test_it_agrees_with_comparing_the_tokens_themselves(chunk_tokens, earlier, prompt):
    stored = StoredPrefixes(chunk_tokens)
    for request in earlier:
        stored.store(*request)
    known = [[*first, *answer[:-1]] for first, answer in earlier]
    slow = 0
    while (end := slow + chunk_tokens) <= len(prompt) and any(it[:end] == prompt[:end] for it in known):
        slow = end
    assert stored.restorable_tokens(prompt) == max(min(slow, len(prompt) - 1), 0)


def test_what_is_stored_can_be_handed_on():
    stored = StoredPrefixes(2)
    stored.store([1, 2, 3, 4], [5])
    assert StoredPrefixes(2, stored.digests).restorable_tokens([1, 2, 3, 4, 5]) == 4


def add_runs(directory, *identities):
    runs = [EarlierRun(f"space{number}", it, 256, (f"digest{number}",)) for number, it in enumerate(identities)]
    for run in runs:
        add_to_history(directory, run)
    return runs


def test_the_history_is_read_back_and_private(tmp_path):
    runs = add_runs(tmp_path, "a", "b", "a")
    assert read_history(tmp_path) == runs
    assert [it.name for it in tmp_path.iterdir()] == ["demo.json"]
    assert (tmp_path / "demo.json").stat().st_mode & 0o777 == 0o600


def test_the_history_replaces_a_namespace_and_drops_the_oldest(tmp_path):
    add_runs(tmp_path, *["a"] * (RUNS_MAX + 3))
    add_to_history(tmp_path, EarlierRun("space5", "a", 256, ("more",)))
    found = read_history(tmp_path)
    assert len(found) == RUNS_MAX
    assert found[-1] == EarlierRun("space5", "a", 256, ("more",))
    assert [it.namespace for it in found].count("space5") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"version": 9, "entries": []}', b'{"version": 1}', b"\xff", b"7"])
def test_a_damaged_history_means_no_earlier_run(tmp_path, content):
    assert read_history(tmp_path / "nowhere") == []
    (tmp_path / "demo.json").write_bytes(content)
    assert read_history(tmp_path) == []


def test_the_history_of_a_purged_store_is_removed_and_other_files_stay(tmp_path):
    add_runs(tmp_path, "a")
    (tmp_path / "kvtier-store.json").write_text("{}")
    drop_stale_history(tmp_path)
    assert read_history(tmp_path)
    (tmp_path / "kvtier-store.json").unlink()
    drop_stale_history(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "demo.json").write_text('{"another": "program"}')
    drop_stale_history(tmp_path)
    assert [it.name for it in tmp_path.iterdir()] == ["demo.json"]
