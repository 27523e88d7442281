"""Faster imports of large packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import large packages in the block without garbage collection.

    What an import creates lives as long as the process. Collections would walk it again and again, and free nothing:
    they are a third of the time in which torch and Megatron are imported. Later ones skip it.
    """
    if not gc.isenabled():  # the caller decides when collections begin
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
