"""Builds the native modules. Each is optional: without a compiler the plain-Python twins are used."""

import sys

from setuptools import Extension, setup

try:
    from Cython.Build import cythonize
except ImportError:
    cythonize = None


def native_modules() -> list[Extension]:
    # The records are little endian on the wire and in memory alike; a big-endian machine keeps the twins.
    if cythonize is None or sys.byteorder != "little":
        return []
    sources = [
        Extension(f"wheelsched._native.{name}", [f"native/{name}.pyx"], extra_compile_args=["-O3"])
        for name in ("wheel", "ready", "batches", "rows")
    ]
    modules = cythonize(sources, include_path=["native"], build_dir="build/cython", language_level=3)
    for module in modules:
        module.optional = True  # only now: cythonize makes new extensions and drops this
    return modules


setup(ext_modules=native_modules())
