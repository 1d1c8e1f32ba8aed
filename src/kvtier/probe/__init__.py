"""Measures this machine's links and says what is misconfigured. Bounded in time and bytes; leaves nothing behind."""
