"""Runs an adapter without modules that its package imports and that no row uses: of data sets, plots and loggers.

Usage: python launch.py ADAPTER vectors.json [MODULE ...]
"""

from __future__ import annotations

import runpy
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Absent(ModuleType):
    """A module whose names are empty classes."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Absentees(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]):
        self._names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        is_one = any(fullname == name or fullname.startswith(f"{name}.") for name in self._names)
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if __name__ == "__main__":
    adapter, _, *absent = sys.argv[1:]
    sys.meta_path.insert(0, _Absentees(tuple(absent)))
    sys.argv = sys.argv[1:]
    runpy.run_path(adapter, run_name="__main__")
