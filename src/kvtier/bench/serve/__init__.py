"""`kvtier bench serve`: conversations against real servers, with and without tiers.

`kvtier.bench.serve.workload` draws what is sent, and `kvtier.bench.serve.generator` sends it.
"""
