"""`kvtier bench serve`: conversations against real servers, with and without tiers.

`workload` draws what is sent, and `generator` sends it. `join` and `results` turn the files of a run into figures, and
`report` makes a page of them.
"""
