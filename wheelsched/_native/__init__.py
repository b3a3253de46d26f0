"""Compiled modules (`native/*.pyx`). Empty without a compiler; import them through `wheelsched.wheel` and `wheelsched.fairness`."""
