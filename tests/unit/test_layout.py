"""What no layout can be, and what one is."""

import itertools
import math

import pytest

from kvtier.layout import (
    ALIGNMENT,
    SECTION_BYTES_MAX,
    Axes,
    Element,
    GroupLayout,
    History,
    KvLayout,
    Part,
    Run,
    RunKind,
    State,
    Validity,
    Window,
)

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
    assert [(it.layer, it.size_bytes) for it in large.sections] == [(0, SECTION_BYTES_MAX), (0, 5), (1, 7)]


def test_whatever_the_bytes_mean_changes_the_digest() -> None:
    digests = {
        KvLayout(tokens, (GroupLayout(validity, layers, pages),)).digest(0)
        for tokens in (256, 512)
        for validity in (History(), Window(7), Window(8), State())
        for layers in ((8,), (8, 8))
        for pages in ("a", "b")
    }
    assert len(digests) == 2 * 4 * 2 * 2


# ---- axes and classes ------------------------------------------------------------------------------------------------


def kv_of(
    axes: Axes | None,
    kind: RunKind = "kv",
    element: Element = "bf16",
    validity: Validity | None = None,
    size_bytes: int | None = None,
) -> GroupLayout:
    """A group of one layer with one run."""
    assert axes or size_bytes
    run = Run(kind, element, size_bytes or 2 * math.prod(axes.sizes if axes else ()))
    return GroupLayout(validity or History(), (run.size_bytes,), "pages", runs=((run,),), axes=((axes,),))


def of_class(*groups: GroupLayout) -> KvLayout:
    return KvLayout(256, groups).of_class("int4")


PAGES = Axes(("page", "token", "head", "side", "channel"), (8, 32, 2, 2, 8))


@pytest.mark.parametrize(
    ("axes", "kind", "cuts"),
    [
        # 1 MiB is 512 Ki numbers. A group has 64 tokens.
        (PAGES, "kv", [(0, PAGES.sizes)]),
        (Axes(PAGES.names, (16, 16, 8, 2, 128)), "kv", [(0, (16, 16, 8, 2, 128))]),
        (Axes(PAGES.names, (8, 32, 12, 2, 128)), "kv", [(0, (4, 32, 12, 2, 128)), (128, (4, 32, 12, 2, 128))]),
        (Axes(PAGES.names, (5, 48, 12, 2, 128)), "kv", [(0, (2, 48, 12, 2, 128)), (96, (2, 48, 12, 2, 128)),
                                                        (192, (1, 48, 12, 2, 128))]),
        (Axes(("head", "token", "channel"), (24, 256, 128)), "keys", [(0, (16, 256, 128)), (0, (8, 256, 128))]),
        (Axes(("token", "head", "channel"), (256, 24, 128)), "keys", [(0, (128, 24, 128)), (128, (128, 24, 128))]),
        # One head is too long, and so is one page: they are cut within.
        (Axes(("head", "token", "channel"), (2, 2048, 512)), "keys",
         [(first, (1, 1024, 512)) for first in (0, 1024) * 2]),
        (Axes(PAGES.names, (2, 128, 32, 2, 128)), "kv", [(at, (1, 64, 32, 2, 128)) for at in (0, 64, 128, 192)]),
        # Layers get sections of their own, even small ones.
        (Axes(("layer", "token", "head", "channel"), (3, 256, 2, 8)), "values", [(0, (256, 2, 8))] * 3),
    ],
)  # fmt: skip
def test_sections_end_between_groups_of_tokens_and_whole_heads(axes, kind, cuts):
    group = of_class(kv_of(axes, kind)).groups[0]
    found = [(cut.first_token, cut.axes.sizes) for cut in group.sections if cut.axes]
    assert found == cuts
    names = tuple(name for name in axes.names if name != "layer")
    assert {cut.axes.names for cut in group.sections if cut.axes} == {names}
    assert {(cut.kind, cut.element, cut.layer) for cut in group.sections} == {(kind, "bf16", 0)}
    assert [cut.size_bytes for cut in group.sections] == [2 * math.prod(sizes) for _, sizes in cuts]
    offsets = itertools.accumulate((cut.size_bytes for cut in group.sections), initial=0)
    assert [*(cut.offset for cut in group.sections), 2 * math.prod(axes.sizes)] == list(offsets)
    assert max(cut.size_bytes for cut in group.sections) <= SECTION_BYTES_MAX


def test_axes_name_the_side_of_a_run_that_does_not():
    """SGLang's pieces are called kv in exact names."""
    axes = Axes(("token", "head", "channel"), (256, 2, 8), "values")
    assert [cut.kind for cut in of_class(kv_of(axes)).groups[0].sections] == ["values"]
    assert KvLayout(256, (kv_of(axes),)).groups[0].sections[0].axes is None


def test_axes_change_nothing_without_a_class():
    bare = KvLayout(256, (kv_of(None, size_bytes=PAGES.tokens * 64),))
    known = KvLayout(256, (kv_of(PAGES),))
    assert known.of_class("none") == known
    assert (known.digest(0), known.groups[0].sections) == (bare.digest(0), bare.groups[0].sections)
    digests = {known.of_class(loss).digest(0) for loss in ("none", "k8v4", "int4")}
    other = Axes(("page", "head", "token", "side", "channel"), (8, 2, 32, 2, 8))
    assert len({*digests, of_class(kv_of(other)).digest(0)}) == 4
    assert (known.loss, known.of_class("int4").loss) == ("none", "int4")


@pytest.mark.parametrize(
    "exact",
    [
        kv_of(PAGES, validity=Window(255)),
        kv_of(None, "state", validity=State(), size_bytes=512),
        kv_of(None, "bytes", "bytes", validity=State(), size_bytes=512),
        kv_of(None, "latent", size_bytes=512),
        kv_of(None, "index", size_bytes=512),
        kv_of(None, element="fp8e4m3", size_bytes=512),
        kv_of(None, element="bytes", size_bytes=512),
    ],
    ids=lambda group: f"{group.validity} {group.runs[0][0].kind} {group.runs[0][0].element}",
)
def test_what_a_class_does_not_apply_to_stays_exact(exact):
    layout = of_class(exact, kv_of(PAGES))
    assert [cut[:4] for cut in layout.groups[0].sections] == [cut[:4] for cut in exact.sections]
    assert all(cut.axes is None for cut in layout.groups[0].sections)
    assert all(cut.axes is not None for cut in layout.groups[1].sections)
    with pytest.raises(ValueError, match="no keys and values that may be stored with loss"):
        of_class(exact)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (kv_of(None, size_bytes=512), "does not define the arrangement of kv in pages 'pages'"),
        (kv_of(None, "keys", size_bytes=512), "does not define the arrangement of keys"),
        (kv_of(None, "bytes", "bytes", size_bytes=512), "does not define the arrangement of bytes"),
        (GroupLayout(History(), (512,), "pages"), "does not define the arrangement of bytes"),
        (kv_of(Axes(("token", "head", "channel"), (15, 2, 8)), "keys"), "has 15 tokens; int4 needs at least 16"),
        (kv_of(Axes(("token", "head", "channel"), (256, 512, 128)), "keys"), "has 8 tokens; int4 needs at least 16"),
    ],
)
def test_a_class_is_refused_with_its_reason(group, message):
    with pytest.raises(ValueError, match=message):
        of_class(kv_of(PAGES), group)


@pytest.mark.parametrize(
    "axes",
    [
        Axes(PAGES.names, (8, 32, 2, 2, 7)),
        Axes(PAGES.names, (8, 32, 2, 1, 16)),
        Axes(PAGES.names, (-8, -32, 2, 2, 8)),
        Axes(("page", "token", "head", "channel", "side"), (8, 32, 2, 8, 2)),
        Axes(("page", "token", "token", "side", "channel"), PAGES.sizes),
        Axes(("page", "layer", "token", "side", "channel"), (8, 2, 32, 2, 8)),
        Axes(("token", "page", "side", "channel"), (32, 16, 2, 8)),
        Axes(("page", "token", "head", "channel"), (8, 32, 2, 16)),
        Axes(PAGES.names, PAGES.sizes, "keys"),
        Axes(PAGES.names, PAGES.sizes, "latent"),
    ],
)
def test_impossible_axes_are_refused(axes):
    run = Run("kv", "bf16", 2 * math.prod(PAGES.sizes))
    with pytest.raises(ValueError, match="are not the axes of Run"):
        GroupLayout(History(), (run.size_bytes,), "pages", runs=((run,),), axes=((axes,),))
    assert axes.fitting(run) is None
    assert PAGES.fitting(run) == PAGES


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [Part(2, 2), Part(3, 2), Part(-1, 1), Part(0, 2, 4, 3), Part(0, 2, -1, 3), Part(0, 2, rank=1), Part(0, 2, ranks=0)],
)
def test_an_impossible_part_is_refused(part: Part) -> None:
    with pytest.raises(ValueError, match="a group cannot have the part"):
        GroupLayout(History(), (8, 8), "a", part)


def test_a_part_has_the_layers_of_its_rank() -> None:
    with pytest.raises(ValueError, match="does not span the 2 layers"):
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
