"""Modules shared by the tier kinds that keep files."""
