"""Imports every module of the installed package that needs neither torch nor what is not installed."""

import importlib
import pkgutil

import tiered_checkpoint_io

imported, without = 0, []
found = pkgutil.walk_packages(tiered_checkpoint_io.__path__, "tiered_checkpoint_io.", onerror=lambda _: None)
for name in (each.name for each in found):
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
            imported += 1
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] == "tiered_checkpoint_io":
            raise
        without.append(name)
print(f"imported={imported} not_without_torch={len(without)}")
