"""The reference engine: a real tensor-parallel model that uses the cache, and the gate that compares bits.

It exists so that the cache is used for real, and to show how an engine calls it. Needs ``transformers``.
"""
