"""Zstandard, a lossless codec. It saves little on bfloat16 KV, so it suits links much slower than a core."""

import threading

from kvtier.errors import ConfigError, install_hint
from kvtier.layout import SECTION_BYTES_MAX, Element

try:
    import zstandard
except ImportError as error:
    raise ConfigError(f"codec 'zstd' needs the package zstandard: {install_hint('zstd')}") from error

LEVEL = 1
"""Level of compression. Higher levels are slower than the links for which their smaller output would pay off."""
_WINDOW_BYTES_MAX = 2 * SECTION_BYTES_MAX
"""No section needs a larger window. Without a limit, a malicious section could make the decoder allocate 128 MiB."""

ENTROPY_ONLY = zstandard.ZstdCompressionParameters(
    window_log=20, hash_log=6, chain_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
)
"""Huffman codes and almost no matches: numbers have few repeats, and searching for them takes most of the time."""


class Zstd:
    """Codes each section as one Zstandard frame that states its content's size.

    Args:
        parameters: parameters of the encoder; None for `LEVEL`.
    """

    name: str = "zstd"
    id: int = 1
    is_exact: bool = True

    def __init__(self, parameters: zstandard.ZstdCompressionParameters | None = None) -> None:
        self._parameters = parameters
        # Contexts are expensive to create and serve one thread at a time, so each thread has its own.
        self._local = threading.local()

    def bound(self, raw_bytes: int) -> int:
        """Return Zstandard's worst case, ZSTD_COMPRESSBOUND, rounded up."""
        return raw_bytes + (raw_bytes >> 8) + 512

    def encode(self, raw: memoryview, into: memoryview, element: Element) -> int:  # noqa: ARG002 - part of the interface
        """Compress `raw` into the front of `into`.

        Raises:
            MemoryError: the encoder cannot allocate memory now.
        """
        compressor: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = self._local.compressor = zstandard.ZstdCompressor(
                level=LEVEL, compression_params=self._parameters
            )
        try:
            stored = compressor.compress(raw)
        except zstandard.ZstdError as error:
            if "memory" in str(error):  # a temporary error is no reason to refuse the codec
                raise MemoryError(f"zstd: {error}") from None
            raise
        into[: len(stored)] = stored
        return len(stored)

    def decode(self, stored: memoryview, into: memoryview, element: Element) -> None:  # noqa: ARG002 - part of the interface
        """Decompress `stored` so that it fills `into` exactly.

        Raises:
            ValueError: `stored` is not one Zstandard frame whose content has the length of `into`.
        """
        decompressor: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX)
        try:
            # The decoder allocates the size that the frame states, so check it first.
            stated_bytes = zstandard.get_frame_parameters(stored).content_size
            if stated_bytes != len(into):
                raise ValueError(f"zstd content of {stated_bytes} bytes cannot fill {len(into)} bytes")
            content = decompressor.decompress(stored, max_output_size=len(into), allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"zstd: {error}") from None
        into[:] = content  # also raises ValueError if the lengths differ
