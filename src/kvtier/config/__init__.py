"""Reads the settings once into a frozen tree, and records where each value comes from."""
