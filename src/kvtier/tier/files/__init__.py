"""Modules that the tier kinds with files share."""
