"""Attention for JAX on NVIDIA Hopper GPUs, with kernels that mask a whole word of scores at a time.

`attention` is the function to call, and `dot_product_attention` the one for code that calls the function of
that name in `jax.nn`; `jax_r2p.flax` has it for Flax layers. `ring_attention` is for sequences that are
sharded over devices. `explain` tells which kernel a call of `attention` uses, or why none. `reference` is
that function in plain `jax.numpy`, and the written contract of its results. `DISABLED_CHECKS` and `register`
are for programs that `jax.export` writes and loads.

The names are resolved on first use, so that `import jax_r2p` alone imports neither jax nor a compiler: the
package builds its own kernels in an environment that has no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_r2p import reference as reference
    from jax_r2p._attention import Explanation as Explanation
    from jax_r2p._attention import attention as attention
    from jax_r2p._attention import explain as explain
    from jax_r2p._dispatch import FallbackWarning as FallbackWarning
    from jax_r2p._dot_product_attention import dot_product_attention as dot_product_attention
    from jax_r2p._export import DISABLED_CHECKS as DISABLED_CHECKS
    from jax_r2p._export import register as register
    from jax_r2p._primitives import OUT_NAME as OUT_NAME
    from jax_r2p._primitives import RESIDUAL_NAME as RESIDUAL_NAME
    from jax_r2p._ring import from_zigzag as from_zigzag
    from jax_r2p._ring import ring_attention as ring_attention
    from jax_r2p._ring import to_zigzag as to_zigzag
    from jax_r2p._ring import zigzag_order as zigzag_order

    __version__: str

_MODULES = {
    "DISABLED_CHECKS": "jax_r2p._export",
    "OUT_NAME": "jax_r2p._primitives",
    "RESIDUAL_NAME": "jax_r2p._primitives",
    "Explanation": "jax_r2p._attention",
    "FallbackWarning": "jax_r2p._dispatch",
    "attention": "jax_r2p._attention",
    "dot_product_attention": "jax_r2p._dot_product_attention",
    "explain": "jax_r2p._attention",
    "from_zigzag": "jax_r2p._ring",
    "register": "jax_r2p._export",
    "ring_attention": "jax_r2p._ring",
    "to_zigzag": "jax_r2p._ring",
    "zigzag_order": "jax_r2p._ring",
}

__all__ = [
    "DISABLED_CHECKS",
    "OUT_NAME",
    "RESIDUAL_NAME",
    "Explanation",
    "FallbackWarning",
    "__version__",
    "attention",
    "dot_product_attention",
    "explain",
    "from_zigzag",
    "reference",
    "register",
    "ring_attention",
    "to_zigzag",
    "zigzag_order",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name == "reference":
        value = importlib.import_module("jax_r2p.reference")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("jax_r2p")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
