"""The seal: what was written is read back, anything else is refused, and no nonce is used twice."""

import secrets
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="the extra 'seal' is not installed")

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvtier.codec.frame_header import METADATA_NUMBER
from kvtier.codec.seal import FrameCipher
from kvtier.errors import BadCallError, ConfigError
from kvtier.keys.seal_keys import SealKey

MATERIAL = bytes(range(32))
SALT = bytes(range(100, 132))
NAME = bytes(range(200, 232))
KEY = SealKey.of("team-a", 7, MATERIAL)

numbers = st.integers(0, METADATA_NUMBER)
contents = st.binary(min_size=1, max_size=300)


def sealed(plain, number=3, associated=b"codec", *, key=KEY, salt=SALT, name=NAME):
    stored = bytearray(len(plain))
    tag = FrameCipher(key, salt, name).seal(number, associated, memoryview(plain), memoryview(stored))
    return bytes(stored), tag


def opened(stored, tag, number=3, associated=b"codec", *, key=KEY, salt=SALT, name=NAME):
    """The plain bytes; None if the seal does not hold. Nothing unverified is left in the target then."""
    plain = bytearray(len(stored))
    if FrameCipher(key, salt, name).open(number, associated, memoryview(stored), memoryview(plain), tag):
        return bytes(plain)
    assert plain == stored
    return None


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(contents, numbers, st.binary(max_size=40), st.binary(min_size=32, max_size=32))
def test_what_is_sealed_is_opened(plain, number, associated, salt):
    stored, tag = sealed(plain, number, associated, salt=salt)
    assert len(tag) == 16
    assert opened(stored, tag, number, associated, salt=salt) == plain


@pytest.mark.parametrize("number", [0, 1, 65_535, METADATA_NUMBER])
def test_the_bytes_are_those_of_the_published_algorithms(number):
    def derive(material, info, salt=None, length=32):
        return HKDF(SHA256(), length, salt, info).derive(material)

    whose = b"\x07\0\0\0team-a"
    assert KEY.key == derive(MATERIAL, b"kvtier.seal\0" + whose)
    assert KEY.check == derive(MATERIAL, b"kvtier.check\0" + whose, length=16)
    frame_key = derive(KEY.key, b"kvtier.frame\0" + NAME, SALT)
    plain = bytes(range(256)) * 9
    expected = AESGCM(frame_key).encrypt(number.to_bytes(12, "little"), plain, b"associated")
    assert sealed(plain, number, b"associated") == (expected[:-16], expected[-16:])


def test_recorded_bytes_are_readable_for_ever():
    assert KEY.key.hex() == "bc854d9ac9551a207294a536b83ff361335ed2bbdb51b4aa3bcaffca85bb16c3"
    assert KEY.check.hex() == "4c9ecae98940ecd3f21bda84cd2c2175"
    assert [part.hex() for part in sealed(b"kvtier", METADATA_NUMBER, b"head")] == [
        "586bcf207c8b",
        "fc3515a18613f426346b28848501d240",
    ]


@given(contents, st.data())
def test_one_flipped_bit_anywhere_is_refused(plain, data):
    stored, tag = sealed(plain)

    def bit(content):
        return flipped(content, data.draw(st.integers(0, 8 * len(content) - 1)))

    assert opened(bit(stored), tag) is None
    assert opened(stored, bit(tag)) is None
    assert opened(stored, tag, associated=bit(b"codec")) is None
    assert opened(stored, tag, number=int.from_bytes(bit(b"\x03\0"), "little")) is None
    assert opened(stored, tag, salt=bit(SALT)) is None
    assert opened(stored, tag, name=bit(NAME)) is None
    assert opened(stored, tag, key=SealKey.of("team-a", 7, bit(MATERIAL))) is None
    assert opened(stored, tag) == plain  # the control


@pytest.mark.parametrize(
    "key", [SealKey.of("team-b", 7, MATERIAL), SealKey.of("", 7, MATERIAL), SealKey.of("team-a", 8, MATERIAL)]
)
def test_another_tenant_or_epoch_is_refused_even_with_equal_material(key):
    assert opened(*sealed(b"plain"), key=key) is None
    assert key.check != KEY.check


def test_sections_that_changed_places_are_refused():
    cipher, stored = FrameCipher(KEY, SALT, NAME), [bytearray(8), bytearray(8)]
    plains = [b"section0", b"section1"]
    tags = [cipher.seal(n, b"", memoryview(plains[n]), memoryview(stored[n])) for n in (0, 1)]
    assert [opened(stored[n], tags[n], n, b"") for n in (0, 1)] == plains
    assert [opened(stored[n], tags[n], 1 - n, b"") for n in (0, 1)] == [None, None]
    assert opened(stored[0], tags[1], 0, b"") is None


@pytest.mark.parametrize("length", [1, 15, 16, 4096, (1 << 20) - 3, 1 << 20])
def test_in_place_gives_the_same_bytes(length):
    plain = bytes(number % 251 for number in range(length))
    stored, tag = sealed(plain)
    memory = bytearray(plain)
    view = memoryview(memory)
    assert FrameCipher(KEY, SALT, NAME).seal(3, b"codec", view, view) == tag
    assert memory == stored
    assert not FrameCipher(KEY, SALT, NAME).open(3, b"another", view, view, tag)
    assert memory == stored  # so a checksum of it can still be verified
    assert FrameCipher(KEY, SALT, NAME).open(3, b"codec", view, view, tag)
    assert memory == plain


@pytest.mark.parametrize("shift", [1, 16, 999])
def test_memory_that_overlaps_in_part_is_refused_before_a_byte_is_written(shift):
    memory = bytearray(range(250)) * 8
    before = bytes(memory)
    lower, upper = memoryview(memory)[:1000], memoryview(memory)[shift : 1000 + shift]
    for given_view, into in ((lower, upper), (upper, lower)):
        with pytest.raises(BadCallError, match=r"1000 bytes into 1000; allowed: .* as many bytes, in the same memory"):
            FrameCipher(KEY, SALT, NAME).seal(0, b"", given_view, into)
        with pytest.raises(BadCallError, match="same memory"):
            FrameCipher(KEY, SALT, NAME).open(0, b"", given_view, into, bytes(16))
    assert memory == before
    FrameCipher(KEY, SALT, NAME).seal(0, b"", lower, memoryview(memory)[1000:])  # neighbours are apart


def test_numbers_and_lengths_out_of_range_are_refused():
    for number in (-1, METADATA_NUMBER + 1):
        with pytest.raises(BadCallError, match="allowed: numbers 0 to 65536"):
            sealed(b"x", number)
        with pytest.raises(BadCallError, match="allowed: numbers 0 to 65536"):
            opened(b"x", bytes(16), number)
    with pytest.raises(BadCallError, match="1 bytes into 2"):
        FrameCipher(KEY, SALT, NAME).seal(0, b"", memoryview(b"x"), memoryview(bytearray(2)))
    for tag in (b"", bytes(4), bytes(15), bytes(17)):
        with pytest.raises(ValueError, match="16 bytes"):
            opened(b"x", tag)
    for salt, name in ((SALT[1:], NAME), (SALT, NAME[1:])):
        with pytest.raises(BadCallError, match="allowed: 32 each"):
            FrameCipher(KEY, salt, name)


@given(st.sets(numbers, min_size=2, max_size=50))
def test_messages_of_a_frame_have_nonces_of_their_own(chosen):
    """Equal plain bytes show the key stream: two of them are equal only where a nonce was used twice."""
    cipher, streams = FrameCipher(KEY, SALT, NAME), set()
    for number in chosen:
        stream = bytearray(32)
        cipher.seal(number, b"", memoryview(bytes(32)), memoryview(stream))
        streams.add(bytes(stream))
    assert len(streams) == len(chosen)


def test_a_number_seals_once_whatever_threads_do():
    cipher = FrameCipher(KEY, SALT, NAME)

    def seal(_):
        try:
            return cipher.seal(5, b"", memoryview(bytes(4096)), memoryview(bytearray(4096)))
        except BadCallError:
            return None

    with ThreadPoolExecutor(4) as pool:
        assert len([tag for tag in pool.map(seal, range(64)) if tag]) == 1
    with pytest.raises(BadCallError, match="message 5 was already sealed"):
        cipher.seal(5, b"", memoryview(b"x"), memoryview(bytearray(1)))


def test_another_salt_gives_another_frame_key():
    salts = [secrets.token_bytes(32) for _ in range(1000)]
    assert len({sealed(bytes(32), salt=salt) for salt in salts}) == 1000


def test_nothing_shows_a_key():
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr(FrameCipher(KEY, SALT, NAME))):
        assert KEY.key.hex() not in shown
        assert repr(KEY.key)[2:-1] not in shown
    assert repr(KEY) == "SealKey(tenant='team-a', epoch=7, opens_only=False)"


def test_without_its_package_it_is_a_clear_error(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvtier.codec.seal")
    with pytest.raises(ConfigError, match="the seal needs the package cryptography: pip install '"):
        import kvtier.codec.seal  # noqa: F401
