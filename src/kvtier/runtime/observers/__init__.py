"""Metrics, journal, recording and faults, which observe a session or an object store without taking part in it.

`guards` registers the observers and handles their exceptions, so that none of them ends a load or a store.
"""
