"""Codecs, and frames: payloads with identity and checksums."""
