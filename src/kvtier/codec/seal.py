"""The seal of a frame: AES-256-GCM, one message for each section and one for the metadata block.

Each frame has a key of its own, derived from a random salt, so numbers of sections suffice as nonces.
"""

import numpy as np

from kvtier.codec.head import METADATA_NUMBER, SALT_BYTES
from kvtier.errors import BadCallError, ConfigError, install_hint
from kvtier.keys.keyring import SealKey, hkdf

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
except ImportError as error:
    raise ConfigError(f"the seal needs the package cryptography: {install_hint('seal')}") from error


class FrameCipher:
    """Seals or opens the messages of one frame. Thread-safe.

    Args:
        seal_key: of a tenant.
        salt: 32 bytes, random and new for each frame that is written. A salt that is used twice lets a reader forge.
        name: the object's name, 32 bytes.

    Raises:
        BadCallError: salt or name have another length.
    """

    __slots__ = ("_aes", "_sealed")

    def __init__(self, seal_key: SealKey, salt: bytes, name: bytes) -> None:
        if len(salt) != SALT_BYTES or len(name) != 32:
            raise BadCallError(f"salt and name have {len(salt)} and {len(name)} bytes; allowed: 32 each")
        self._aes = algorithms.AES(hkdf(seal_key.key, b"kvtier.frame\0" + name, salt))
        self._sealed: dict[int, object] = {}

    def seal(self, number: int, associated: bytes, plain: memoryview, into: memoryview) -> bytes:
        """Encrypt one message, without a copy of it. The GIL is released for messages of 2 KiB and more.

        Args:
            number: of the section, or `METADATA_NUMBER`. Each seals once: a nonce that is used twice breaks the key.
            associated: bytes that are authenticated and not encrypted.
            plain: contiguous bytes.
            into: as many bytes; the same memory as `plain`, or memory apart from it.

        Returns:
            The tag, 16 bytes.

        Raises:
            BadCallError: the number is out of range or was sealed before, lengths differ, or the memory overlaps in
                part.
        """
        cipher = self._checked(number, plain, into).encryptor()
        # One operation, so of two threads one is refused.
        if self._sealed.setdefault(number, mine := object()) is not mine:
            raise BadCallError(f"message {number} was sealed before; allowed: once for each frame")
        cipher.authenticate_additional_data(associated)
        cipher.update_into(plain, into)
        cipher.finalize()
        return cipher.tag

    def open(self, number: int, associated: bytes, stored: memoryview, into: memoryview, tag: bytes) -> bool:
        """Decrypt one message that `seal` wrote, without a copy of it, and verify it.

        Args:
            number: as it was sealed.
            associated: as they were sealed.
            stored: contiguous bytes.
            into: as many bytes; the same memory as `stored`, or memory apart from it.
            tag: 16 bytes.

        Returns:
            Whether the tag matches. If it does not, `into` holds the stored bytes: their checksum can still be
            verified, and nothing unverified is left.

        Raises:
            BadCallError: as `seal`, but a number may be opened again.
            ValueError: the tag has another length.
        """
        cipher = self._checked(number, stored, into, tag).decryptor()
        cipher.authenticate_additional_data(associated)
        cipher.update_into(stored, into)
        try:
            cipher.finalize()
        except InvalidTag:
            # The key stream that decrypted the bytes turns them back.
            self._checked(number, into, into).encryptor().update_into(into, into)
            return False
        return True

    def _checked(self, number: int, given: memoryview, into: memoryview, tag: bytes | None = None) -> Cipher[modes.GCM]:
        # OpenSSL writes wrong bytes, and a tag that fits them, where memory overlaps in part.
        first, second = np.frombuffer(given, np.uint8), np.frombuffer(into, np.uint8)
        if (
            not 0 <= number <= METADATA_NUMBER
            or first.size != second.size
            or (np.may_share_memory(first, second) and first.ctypes.data != second.ctypes.data)
        ):
            raise BadCallError(
                f"message {number}, {first.size} bytes into {second.size}; allowed: 0 to {METADATA_NUMBER}, and as "
                "many bytes, in the same memory or memory apart from it"
            )
        return Cipher(self._aes, modes.GCM(number.to_bytes(12, "little"), tag))
