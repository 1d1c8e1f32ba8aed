"""Trace formats, with one module for each."""
