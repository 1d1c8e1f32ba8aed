"""A class of the engine is part of its identity, and refused at the start where it cannot be kept."""

import threading
from dataclasses import replace

import pytest
from tests import rig
from tests.refusals import refuses
from tests.system import until

from kvtier.cli import doctor_checks
from kvtier.codec.registry import lossy_names
from kvtier.config.sections import StoreConfig
from kvtier.connect.model_files import note_fingerprint
from kvtier.keys.fingerprint import Fingerprint
from kvtier.keys.secret import model_id
from kvtier.layout import Axes, GroupLayout, History, KvLayout, Run, Window
from kvtier.runtime.open import open_core
from kvtier.runtime.rank import open_rank
from kvtier.runtime.rank_group import OpenRanks
from kvtier.runtime.tier_encoding import forms_of, in_class
from kvtier.tier.files import fingerprint_notes

LOSSES = lossy_names()


def layout_of(run: Run, axes: Axes | None = None, validity=None) -> KvLayout:
    """A layout of one layer with one run."""
    group = GroupLayout(validity or History(), (run.size_bytes,), "test", runs=((run,),), axes=((axes,),))
    return KvLayout(64, (group,))


def config(loss: str, **more):
    return replace(rig.config(None), store=StoreConfig(loss=loss), **more)


KEYS = Run("keys", "bf16", 2 * 64 * 8)
KNOWN = layout_of(KEYS, Axes(("token", "channel"), (64, 8)))
WINDOW = layout_of(KEYS, Axes(("token", "channel"), (64, 8)), Window(24))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (rig.LAYOUT, "does not define the arrangement of bytes in pages 'rig/full'"),
        (WINDOW, "no keys and values that may be stored with loss"),
    ],
    ids=["bytes", "windows"],
)
def test_a_class_that_cannot_be_applied_is_refused_with_its_setting(layout, why, loss):
    """`tests/unit/test_layout.py` has every reason."""
    with refuses("store.loss", why, value=loss, allowed="none"):
        in_class(config(loss), layout, rig.FINGERPRINT)
    assert in_class(config("none"), layout, rig.FINGERPRINT) == (layout, rig.FINGERPRINT)


def test_every_class_has_an_identity_of_its_own():
    made = [in_class(config(loss), KNOWN, rig.FINGERPRINT) for loss in ("none", *LOSSES)]
    assert len({digest for _, digest in made}) == len({layout.digest(0) for layout, _ in made}) == 1 + len(LOSSES)
    for loss, (layout, _) in zip(("none", *LOSSES), made, strict=True):
        assert layout.loss == loss
        assert in_class(config(loss), layout, rig.FINGERPRINT)[0] == layout


def test_windows_beside_a_history_stay_exact_and_have_the_class_in_their_names():
    """What a layer computes from lossy KV is of the class, too."""
    both = KvLayout(64, (*KNOWN.groups, *WINDOW.groups))
    layout, _ = in_class(config("int4"), both, rig.FINGERPRINT)
    assert [[cut.axes is not None for cut in group.sections] for group in layout.groups] == [[True], [False]]
    assert layout.digest(1) != both.digest(1)


@pytest.mark.parametrize(("of_rank", "of_core"), [("none", "int4"), ("int4", "none"), ("int4", "k8v4")])
def test_ranks_of_another_class_are_refused(of_rank, of_core):
    rank = open_rank(config(of_rank), KNOWN, rig.FINGERPRINT, rig.Engine(4).copier())
    try:
        ranks = OpenRanks(rank.mover, rank.slots, rank.tiers, frozenset(rank.down), [rank.mover.views])
        with refuses(
            "store.loss",
            f"differs from {of_rank}, with which rank 0 was opened",
            value=of_core,
            allowed="the same value",
        ):
            open_core(config(of_core), rank.layout, rig.FINGERPRINT, ranks)
    finally:
        rank.close(1.0)


def test_a_lossy_tier_always_codes_and_others_choose(tmp_path):
    pytest.importorskip("torch", reason="lossy codecs need torch")
    tiers = rig.config(tmp_path / "kv", disk=tmp_path / "disk").tiers
    disk, directory = tiers
    chosen = config("int4", tiers=(replace(disk, codec="split"), directory))
    forms = forms_of(chosen, None)
    assert (forms["disk"].lossy, forms["directory"].choice) == (None, None)
    assert forms["disk"].choice is not None
    assert forms["directory"].lossy.name == "int4"
    assert forms["directory"].codec.name == "split"
    (group,) = in_class(chosen, KNOWN, rig.FINGERPRINT)[0].groups
    assert forms["directory"].scratch_bytes(group) > group.payload_bytes


def test_the_note_beside_a_store_and_the_doctor_name_the_class(tmp_path):
    served = Fingerprint(weights=bytes(32), dtype="bfloat16")
    settings = rig.config(tmp_path / "kv")
    open_rank(settings, rig.LAYOUT, served.digest, rig.Engine(4).copier()).close(1.0)  # makes the directory
    for loss in ("none", *LOSSES):
        made = replace(settings, store=StoreConfig(loss=loss))
        note_fingerprint(made, served)
        until(lambda: "kvtier note" not in {thread.name for thread in threading.enumerate()})
        model = model_id(None, in_class(made, KNOWN, served.digest)[1]).hex()
        (note,) = (it for it in fingerprint_notes.read(tmp_path / "kv") if it["model"] == model)
        assert note["of"].get("loss", {}).get("codec", "none") == loss
        assert doctor_checks._model(made, served) == model[:12]
    assert len(fingerprint_notes.read(tmp_path / "kv")) == 1 + len(LOSSES)
