"""Trace formats: one module for each."""
