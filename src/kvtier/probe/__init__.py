"""Measures this machine's links and warns of misconfiguration; bounded in time and bytes, and leaves no files."""
