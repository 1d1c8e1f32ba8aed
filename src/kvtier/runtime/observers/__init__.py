"""Observers of a session or an object store, which do not take part in it: metrics, journal, recording and faults.

`guards` registers the observers and handles their exceptions, so that none of them ends a load or a store.
"""
