"""System calls that the kernel refuses, as it does in containers."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CANNOT_FORBID = "system calls cannot be forbidden to a thread by a seccomp filter"
_NUMBERS = {
    "x86_64": {
        **{"process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "memfd_create": 319},
        **{"eventfd2": 290, "fallocate": 285, "ftruncate": 77, "getrandom": 318, "sched_getaffinity": 204},
    },
    "aarch64": {
        **{"process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434, "memfd_create": 279},
        **{"eventfd2": 19, "fallocate": 47, "ftruncate": 46, "getrandom": 278, "sched_getaffinity": 123},
    },
}


def forbid(*calls: str) -> str:
    """Make these calls of this thread fail with EPERM; return why that is impossible, beginning with CANNOT_FORBID.

    The rule lasts as long as the thread, and holds for the threads that it starts.
    """
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        return f"{CANNOT_FORBID}: their numbers on {platform.machine()} are not known here"
    load, compare, answer, refuse, allow = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000
    rules = [(load, 0, 0, 0)]
    for call in calls:
        rules += [(compare, 0, 1, numbers[call]), (answer, 0, 0, refuse)]
    rules.append((answer, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0):
        return f"{CANNOT_FORBID}: PR_SET_NO_NEW_PRIVS: {os.strerror(ctypes.get_errno())}"
    if libc.prctl(seccomp, by_filter, program, 0, 0):
        return f"{CANNOT_FORBID}: PR_SET_SECCOMP: {os.strerror(ctypes.get_errno())}"
    return ""
