"""Errors, limits, ids, invariants, settings and the Clock and Rng protocols: what every other package may import.

Nothing here waits, reads a clock or draws chance. Read `ids.py` first: the partition of a job is part of its id, and
everything about where a job lives follows from that.
"""
