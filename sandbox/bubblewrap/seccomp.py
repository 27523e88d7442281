"""The system call filter of bubblewrap sandboxes, for interfaces that namespaces do not isolate.

It refuses sockets of families without namespaces (vsock reaches the host of a virtual machine), the kernel's keyrings,
and interfaces that widen the kernel's attack surface. It allows everything else. The other isolation does not depend on
this filter, so architectures that are not listed here run without it.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

# unix, inet, inet6, netlink: isolated by the sandbox's namespaces, except unix sockets in directories that are bound
# into it.
_SOCKET_FAMILIES = (1, 2, 10, 16)
_IO_URING = (425, 426, 427)

# linux/filter.h and linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NR, _ARCH, _ARG0 = 0, 4, 16
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000


@dataclass(frozen=True, slots=True)
class _Abi:
    """The audit number of an architecture and its system call numbers (asm/unistd.h)."""

    audit: int
    socket: int
    refused: tuple[int, ...]  # add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd


_ABIS = {
    "x86_64": _Abi(0xC000003E, 41, (248, 249, 250, 321, 298, 323)),
    "aarch64": _Abi(0xC00000B7, 198, (217, 218, 219, 280, 241, 282)),
}


def sandbox_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as an array of ``struct sock_filter``, or None for an unknown architecture."""
    abi = _ABIS.get(machine or platform.machine())
    if abi is None:
        return None
    refused = (*abi.refused, *_IO_URING)
    allow, no_family, refuse = "allow", "no_family", "refuse"
    # (code, operand, label if true, label if false); None continues with the next line.
    lines: list[tuple[int, int, str | None, str | None]] = [
        (_LOAD, _ARCH, None, None),
        (_EQUAL, abi.audit, None, refuse),
        (_LOAD, _NR, None, None),
        (_AT_LEAST, _X32, refuse, None),
        *((_EQUAL, number, refuse, None) for number in refused),
        (_EQUAL, abi.socket, None, allow),
        (_LOAD, _ARG0, None, None),
        *((_EQUAL, family, allow, None) for family in _SOCKET_FAMILIES),
    ]
    ends = {no_family: _ERRNO | errno.EAFNOSUPPORT, refuse: _ERRNO | errno.EPERM, allow: _ALLOW}
    targets = {label: len(lines) + offset for offset, label in enumerate(ends)}
    program = b"".join(
        struct.pack("=HBBI", code, _jump(targets, true, line), _jump(targets, false, line), operand)
        for line, (code, operand, true, false) in enumerate(lines)
    )
    return program + b"".join(struct.pack("=HBBI", _RETURN, 0, 0, value) for value in ends.values())


def _jump(targets: dict[str, int], label: str | None, line: int) -> int:
    return 0 if label is None else targets[label] - line - 1
