"""The seal of a frame: AES-256-GCM, one message for each section and one for the metadata block.

Each frame has its own key, derived from a random salt, so section numbers suffice as nonces.
"""

import numpy as np

from kvtier.codec.frame_header import METADATA_NUMBER, SALT_BYTES
from kvtier.errors import BadCallError, ConfigError, install_hint
from kvtier.keys.seal_keys import SealKey, hkdf

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
except ImportError as error:
    raise ConfigError(f"the seal needs the package cryptography: {install_hint('seal')}") from error


class FrameCipher:
    """Seals or opens the messages of one frame. It is thread-safe.

    Args:
        seal_key: a tenant's key.
        salt: 32 random bytes, new for each frame that is written. A salt that is used twice allows forgeries.
        name: the object's name, 32 bytes.

    Raises:
        BadCallError: salt or name has the wrong length.
    """

    __slots__ = ("_aes", "_sealed")

    def __init__(self, seal_key: SealKey, salt: bytes, name: bytes) -> None:
        if len(salt) != SALT_BYTES or len(name) != 32:
            raise BadCallError(f"the salt has {len(salt)} bytes and the name {len(name)}; allowed: 32 each")
        self._aes = algorithms.AES(hkdf(seal_key.key, b"kvtier.frame\0" + name, salt))
        self._sealed: dict[int, object] = {}

    def seal(self, number: int, associated: bytes, plain: memoryview, into: memoryview) -> bytes:
        """Encrypt one message without copying it. The GIL is released for messages of 2 KiB and more.

        Args:
            number: number of the section, or `METADATA_NUMBER`. Use each once: a nonce used twice breaks the key.
            associated: bytes that are authenticated but not encrypted.
            plain: contiguous bytes.
            into: memory of the same length: `plain` itself, or memory that does not overlap it.

        Returns:
            The tag, 16 bytes.

        Raises:
            BadCallError: the number is out of range or was sealed before, lengths differ, or the memory overlaps
                partly.
        """
        cipher = self._checked(number, plain, into).encryptor()
        # `setdefault` is atomic, so one of two threads with the same number is refused.
        if self._sealed.setdefault(number, mine := object()) is not mine:
            raise BadCallError(f"message {number} was already sealed; allowed: once for each frame")
        cipher.authenticate_additional_data(associated)
        cipher.update_into(plain, into)
        cipher.finalize()
        return cipher.tag

    def open(self, number: int, associated: bytes, stored: memoryview, into: memoryview, tag: bytes) -> bool:
        """Verify and decrypt one message that `seal` wrote, without copying it.

        Args:
            number: the number with which it was sealed.
            associated: the associated bytes with which it was sealed.
            stored: contiguous bytes.
            into: memory of the same length: `stored` itself, or memory that does not overlap it.
            tag: 16 bytes.

        Returns:
            Whether the tag matches. If it does not, `into` holds the stored bytes: their checksum can still be
            verified, and no unverified plain text remains.

        Raises:
            BadCallError: as in `seal`, but a number may be opened again.
            ValueError: the tag has the wrong length.
        """
        cipher = self._checked(number, stored, into, tag).decryptor()
        cipher.authenticate_additional_data(associated)
        cipher.update_into(stored, into)
        try:
            cipher.finalize()
        except InvalidTag:
            # The same key stream turns the decrypted bytes back into the stored ones.
            self._checked(number, into, into).encryptor().update_into(into, into)
            return False
        return True

    def _checked(self, number: int, given: memoryview, into: memoryview, tag: bytes | None = None) -> Cipher[modes.GCM]:
        # If the memory overlaps partly, OpenSSL writes wrong bytes, and a tag that matches them.
        first, second = np.frombuffer(given, np.uint8), np.frombuffer(into, np.uint8)
        if (
            not 0 <= number <= METADATA_NUMBER
            or first.size != second.size
            or (np.may_share_memory(first, second) and first.ctypes.data != second.ctypes.data)
        ):
            raise BadCallError(
                f"message {number} cannot go from {first.size} bytes into {second.size}; allowed: numbers 0 to "
                f"{METADATA_NUMBER}, and as many bytes, in the same memory or in memory that does not overlap"
            )
        return Cipher(self._aes, modes.GCM(number.to_bytes(12, "little"), tag))
