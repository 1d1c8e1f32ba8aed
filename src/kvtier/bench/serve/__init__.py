"""`kvtier bench serve`: conversations against real servers, with and without tiers.

`kvtier.bench.serve.workload` draws what is sent, and `kvtier.bench.serve.generator` sends it. The files of a run become
figures in `kvtier.bench.serve.join` and `kvtier.bench.serve.results`, and a page in `kvtier.bench.serve.report`.
"""
