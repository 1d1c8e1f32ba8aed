"""`kvtier bench serve`: conversations with real servers, with and without tiers.

`workload` draws the requests, and `generator` sends them. `join` and `results` turn the files of a run into figures,
and `report` makes a page of these figures.
"""
