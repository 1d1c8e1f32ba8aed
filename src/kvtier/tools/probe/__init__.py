"""Measures this machine's links and warns of misconfiguration. Time and bytes are bounded, and no files remain."""
