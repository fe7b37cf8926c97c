"""The implementations that are compared: each a function of query, key, value for one workload.

A rival is built by its row below. What is not installed, or refuses a workload, is listed as such and not
timed. To install the others: `pip install dew-flash-attn-cu13 fa4-jax tokamax`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
from workloads import Workload

Function = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Rival:
    """name; package: the distribution whose version is recorded; build: the function for one workload."""

    name: str
    package: str
    build: Callable[[Workload], Function]

    def package_version(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _r2p(w: Workload) -> Function:
    import jax_r2p

    return lambda q, k, v: jax_r2p.attention(
        q, k, v, is_causal=w.is_causal, local_window_size=w.window, implementation="r2p"
    )


def _reference(w: Workload) -> Function:
    import jax_r2p

    return lambda q, k, v: jax_r2p.attention(
        q, k, v, is_causal=w.is_causal, local_window_size=w.window, implementation="xla"
    )


def _jax_nn(implementation: str) -> Callable[[Workload], Function]:
    def build(w: Workload) -> Function:
        # cuDNN takes a left window only together with a causal mask, which is the same set of keys
        causal = w.is_causal or (w.window is not None and w.window[1] == 0)
        return lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=w.window, implementation=implementation
        )

    return build


def _fa3(w: Workload) -> Function:
    from dew_flash_attn import flash_mha

    window = (-1, -1) if w.window is None else w.window
    return lambda q, k, v: flash_mha(q, k, v, is_causal=w.is_causal, window_size=window)


def _fa4(w: Workload) -> Function:
    from fa4_jax import flash_attn

    return lambda q, k, v: flash_attn(q, k, v, causal=w.is_causal, window_size=w.window)


def _tokamax(w: Workload) -> Function:
    import tokamax

    return lambda q, k, v: tokamax.dot_product_attention(
        q, k, v, is_causal=w.is_causal, local_window_size=w.window, implementation="mosaic"
    )


OURS = "jax_r2p"

RIVALS = {
    r.name: r
    for r in (
        Rival(OURS, "jax-r2p", _r2p),
        Rival("cudnn", "jax", _jax_nn("cudnn")),  # cuDNN through jax.nn.dot_product_attention
        Rival("fa3", "dew-flash-attn-cu13", _fa3),  # FlashAttention-3, C++
        Rival("fa4", "fa4-jax", _fa4),  # FlashAttention-4's kernels in CuTeDSL, compiled at run time
        Rival("tokamax", "tokamax", _tokamax),  # Pallas Mosaic GPU
        Rival("xla", "jax", _jax_nn("xla")),  # all scores in memory
        Rival("reference", "jax-r2p", _reference),  # this package without its kernel
    )
}

DEFAULT = (OURS, "cudnn", "fa3", "fa4", "tokamax")


def select(names: str) -> tuple[Rival, ...]:
    """Rivals by name: "default" or names separated by commas.

    Raises:
      ValueError: a name that is not in the table.
    """
    wanted = DEFAULT if names == "default" else tuple(names.split(","))
    if unknown := set(wanted) - RIVALS.keys():
        raise ValueError(f"no implementation {', '.join(sorted(unknown))}; there are {', '.join(RIVALS)}")
    return tuple(RIVALS[name] for name in wanted)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Why a rival is not timed on a workload: "not installed" or what it said."""

    reason: str


def prepare(rival: Rival, w: Workload, arrays: tuple[Any, Any, Any]) -> Function | Unavailable:
    """The compiled function, called once; or why there is none.

    Anything a rival raises is its answer, whatever the type: it must not end the run of the others.
    """
    try:
        f = jax.jit(rival.build(w))
        jax.block_until_ready(f(*arrays))
    except ImportError as error:
        return Unavailable(f"not installed ({error})")
    except Exception as error:  # noqa: BLE001
        return Unavailable(f"refused: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return f
