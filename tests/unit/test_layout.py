"""What no layout can be, and what one is."""

import pytest

from kvtier.layout import ALIGNMENT, SECTION_BYTES_MAX, GroupLayout, History, KvLayout, State, Window

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
    assert [(layer, size) for layer, _, size in large.sections] == [(0, SECTION_BYTES_MAX), (0, 5), (1, 7)]


def test_whatever_the_bytes_mean_changes_the_digest() -> None:
    digests = {
        KvLayout(tokens, (GroupLayout(validity, layers, pages),)).digest(0)
        for tokens in (256, 512)
        for validity in (History(), Window(7), Window(8), State())
        for layers in ((8,), (8, 8))
        for pages in ("a", "b")
    }
    assert len(digests) == 2 * 4 * 2 * 2
