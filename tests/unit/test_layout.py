"""What no layout can be, and what one is."""

import pytest

from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, History, KvLayout, Part, State, Window

GROUP = GroupLayout(History(), (100, ALIGNMENT + 1), "test/pages")


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_window_has_a_token_at_least(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"window.tokens must be at least 1, got {tokens}"):
        Window(tokens)


@pytest.mark.parametrize("layers", [(), (0,), (4096, -1)])
def test_a_group_has_layers_with_bytes(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one byte each"):
        GroupLayout(History(), layers, "test/pages")


def test_a_layout_has_tokens_and_groups() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        KvLayout(0, (GROUP,))
    with pytest.raises(ValueError, match="at least one KV group"):
        KvLayout(256, ())


def test_layers_begin_aligned_and_sections_stay_within_a_layer() -> None:
    assert GROUP.layer_offsets == (0, ALIGNMENT)
    assert GROUP.payload_bytes == 3 * ALIGNMENT
    large = GroupLayout(History(), (SECTION_BYTES_MAX + 5, 7), "test/pages")
    assert [(layer, size) for layer, _, size, _ in large.sections] == [(0, SECTION_BYTES_MAX), (0, 5), (1, 7)]


def test_whatever_the_bytes_mean_changes_the_digest() -> None:
    digests = {
        KvLayout(tokens, (GroupLayout(validity, layers, pages),)).digest(0)
        for tokens in (256, 512)
        for validity in (History(), Window(7), Window(8), State())
        for layers in ((8,), (8, 8))
        for pages in ("a", "b")
    }
    assert len(digests) == 2 * 4 * 2 * 2


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [Part(2, 2), Part(3, 2), Part(-1, 1), Part(0, 2, 4, 3), Part(0, 2, -1, 3), Part(0, 2, rank=1), Part(0, 2, ranks=0)],
)
def test_an_impossible_part_is_refused(part: Part) -> None:
    with pytest.raises(ValueError, match="impossible part of a group"):
        GroupLayout(History(), (8, 8), "a", part)


def test_a_part_has_the_layers_of_its_rank() -> None:
    with pytest.raises(ValueError, match="not the part of a rank with 2 layers"):
        GroupLayout(History(), (8, 8), "a", Part(0, 3))
    assert KvLayout(256, (GroupLayout(History(), (8, 8), "a", Part(6, 8)),)).part(0) == Part(6, 8)


def test_the_part_and_copy_are_not_in_the_digest() -> None:
    bare = KvLayout(256, (GroupLayout(History(), (8, 8), "a"),))
    held = bare.with_parts([(Part(6, 8, 4, 8), 3)])
    assert held.digest(0) == bare.digest(0)
    assert (held.part(0), held.groups[0].copy) == (Part(6, 8, 4, 8), 3)


def test_ranks_share_no_part_that_the_engine_does_not_name() -> None:
    latent = GroupLayout(History(), (8,), "a", Part(0, 1, 0, 1), 2)
    layout = KvLayout(256, (latent, GroupLayout(History(), (8, 8), "b")))
    ranks = [layout.on_rank(rank, 3) for rank in range(3)]
    assert {each.part(0) for each in ranks} == {Part(0, 1, 0, 1)}
    assert [each.part(1) for each in ranks] == [Part(0, 2, rank=rank, ranks=3) for rank in range(3)]
    assert [each.groups[0].copy for each in ranks] == [2, 2, 2]
    assert layout.part(1) == layout.on_rank(0, 1).part(1) == Part(0, 2), "one rank holds everything"


def test_a_part_is_named_for_people() -> None:
    assert Part(0, 32, 4, 8).text == "layers 0-31, heads 4-7"
    assert Part(0, 32).text == "layers 0-31"
    assert Part(0, 32, rank=1, ranks=2).text == "layers 0-31, rank 1 of 2"
