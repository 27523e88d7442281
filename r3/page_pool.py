"""Memory that is written again instead of being returned to the kernel."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_KEPT_BYTES = 1 << 28


class PagePool:
    """Arrays whose memory is used again once nobody refers to them: the kernel takes up to ten times as long to provide
    a page as it takes to write it.

    Only written pages take memory. Pages of huge size would take 2 MiB for the first row, and on a machine in use the
    kernel moves memory to make them. Mappings have sizes of powers of two, so that any of one size fits. Of each size
    the last ``kept`` bytes that came back are written again at the speed of memory. The others are the kernel's to take
    (``MADV_FREE``), and writing them again takes half as long again.
    """

    def __init__(self, kept: int = _KEPT_BYTES) -> None:
        self._kept = kept
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)

    def empty(self, size: int) -> NDArray[np.uint8]:
        """``size`` bytes with any contents."""
        length = max(mmap.PAGESIZE, 1 << (size - 1).bit_length()) if size else mmap.PAGESIZE
        try:
            pages = self._free[length].pop()
        except IndexError:
            pages = _mapped(length)
        whole = np.frombuffer(pages, np.uint8)
        weakref.finalize(whole, self._take_back, pages).atexit = False
        return whole[:size]

    def _take_back(self, pages: mmap.mmap) -> None:
        free = self._free[len(pages)]
        free.append(pages)
        if (oldest := len(free) - 1 - max(1, self._kept // len(pages))) >= 0:
            free[oldest].madvise(mmap.MADV_FREE)


def _mapped(length: int) -> mmap.mmap:
    pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


PAGES = PagePool()
"""The pool of this process, as malloc has one."""
