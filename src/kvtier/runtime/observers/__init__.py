"""What watches a session or an object store without taking part in it: metrics, journal, recording and faults.

`guards` registers the observers and handles what they raise, so that none of them ends a load or a store.
"""
