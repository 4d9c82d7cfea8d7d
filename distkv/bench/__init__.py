"""Benchmarks: what the cache costs on one rank, in a group, under an engine, and beside other engines' caches.

``distkv bench core | group | engine | peers``. Nothing here is imported by the rest of the package.
"""
