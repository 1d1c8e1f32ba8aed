"""Notes beside a store: whole or absent, whatever lies there in their place."""

import os
from pathlib import Path

import pytest

from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files import fingerprint_notes as notes

NAME = bytes(range(16))
FILE = "note-model-0001020304050607.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    notes.write(tmp_path, NAME, {"digest": "00"})
    return tmp_path


def test_a_note_comes_back_and_may_be_written_again(root):
    assert notes.read(root) == [{"digest": "00"}]
    notes.write(root, NAME, {"digest": "01"})
    assert notes.read(root) == [{"digest": "01"}]
    assert os.listdir(root) == [FILE]
    assert (root / FILE).stat().st_mode & 0o777 == 0o600


def damage_every_byte(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".aside"))
    path.symlink_to(path.with_suffix(".aside"))


@pytest.mark.parametrize(
    "spoil",
    [
        damage_every_byte,
        link,
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text('"text"'),
        lambda path: path.write_bytes(bytes(notes.BYTES_MAX + 1)),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_note_that_is_not_ours_or_not_whole_is_absent(root, spoil):
    spoil(root / FILE)
    assert notes.read(root) == []


def test_a_note_that_is_too_long_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="longer than"):
        notes.write(tmp_path, NAME, {"long": "x" * notes.BYTES_MAX})
    assert os.listdir(tmp_path) == []


def test_of_too_many_the_oldest_goes(root, monkeypatch):
    monkeypatch.setattr(notes, "NOTES_MAX", 3)
    os.utime(root / FILE, ns=(1, 1))
    for number in range(3):
        notes.write(root, bytes([9, number]) + bytes(8), {"number": number})
    assert notes.read(root) == [{"number": number} for number in range(3)]


def test_notes_of_former_versions_are_read_and_belong_to_the_store(root):
    (root / FILE).rename(root / FILE.replace("model", "fingerprint"))
    test_a_store_may_be_made_beside_notes(root)


def test_a_store_may_be_made_beside_notes(root):
    DirectoryTier(root, capacity_bytes=2**20, direct_io="off").close()
    assert notes.read(root) != []
