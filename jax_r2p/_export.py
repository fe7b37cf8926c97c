"""What a program in a file needs: the names of the calls in it, and their registration where it is run."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from jax_r2p import (
    _ffi,
    _primitives,  # noqa: F401 - registers what splits a program for several devices
    _sharding,
)

TARGETS = (
    *(_ffi.TARGET, _ffi.BACKWARD_TARGET, _ffi.PREPROCESS_TARGET),
    *(_sharding.TARGET, _sharding.BACKWARD_TARGET),
)
"""Every custom call that a program with attention in it may hold."""

DISABLED_CHECKS = tuple(map(DisabledSafetyCheck.custom_call, TARGETS))
"""For `jax.export.export(..., disabled_checks=...)`: says that the custom calls of this package are meant to
be in a file. Their names have a version, so that a file calls what it was written for, or nothing.
"""


def register() -> None:
    """Makes the kernels known to XLA, so that programs loaded by `jax.export.deserialize` find them.

    Call it once in a process that runs such a program on a GPU, any time before the program is compiled. A
    process that has itself lowered attention for CUDA needs no call, and on a CPU nothing is needed. It looks
    for no GPU and starts no backend of JAX. More calls, from any thread, do nothing.

    Raises:
      RuntimeError: The kernels of the installed package are missing or of another version, or jaxlib is too
        old for them.
    """
    _ffi.register()
