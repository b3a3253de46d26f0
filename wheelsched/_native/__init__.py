"""Compiled modules (`native/*.pyx`). Empty without a compiler; import through `wheelsched.wheel` and `wheelsched.fairness`."""
