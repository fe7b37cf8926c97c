"""The implementations that are compared: each a function of query, key, value for one workload.

A rival is built by its row below. What is not installed, or refuses a workload, is listed as such and not
timed. To install the others: `pip install dew-flash-attn-cu13 fa4-jax tokamax`.

Nothing heavy is imported before a rival is built, so that arguments can be checked and rivals listed quickly.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal

import jax_r2p
from jax_r2p.bench.workloads import Workload

if TYPE_CHECKING:
    import jax

Arrays = tuple["jax.Array", "jax.Array", "jax.Array"]
"""query (batch, length, heads, head_dim); key and value (batch, length, kv_heads, head_dim)."""

Function = Callable[["jax.Array", "jax.Array", "jax.Array"], "jax.Array"]
"""From query, key, value to out, which is like query."""


@dataclasses.dataclass(frozen=True)
class Rival:
    """One implementation.

    Attributes:
      name: Key of the row.
      about: What it is, in a few words.
      module: What must be importable to run it.
      package: The distribution whose version is recorded.
      build: Makes the function for one workload.
    """

    name: str
    about: str
    module: str
    package: str
    build: Callable[[Workload], Function]

    def is_installed(self) -> bool:
        """Whether its module can be found. Imports nothing."""
        return importlib.util.find_spec(self.module) is not None

    def package_version(self) -> str | None:
        """The version of its distribution, or None if there is none by that name."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _r2p(implementation: Literal["r2p", "xla"]) -> Callable[[Workload], Function]:
    def build(w: Workload) -> Function:
        return lambda q, k, v: jax_r2p.attention(
            q, k, v, is_causal=w.is_causal, local_window_size=w.window, implementation=implementation
        )

    return build


def _jax_nn(implementation: Literal["cudnn", "xla"]) -> Callable[[Workload], Function]:
    def build(w: Workload) -> Function:
        import jax

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
        Rival(OURS, "the kernels of this package", "jax_r2p", "jax-r2p", _r2p("r2p")),
        Rival("cudnn", "cuDNN by jax.nn.dot_product_attention", "jax", "jax", _jax_nn("cudnn")),
        Rival("fa3", "FlashAttention-3, C++", "dew_flash_attn", "dew-flash-attn-cu13", _fa3),
        Rival("fa4", "FlashAttention-4, CuTeDSL, compiled at run time", "fa4_jax", "fa4-jax", _fa4),
        Rival("tokamax", "Pallas Mosaic GPU", "tokamax", "tokamax", _tokamax),
        Rival("xla", "plain XLA, all scores in memory", "jax", "jax", _jax_nn("xla")),
        Rival("reference", "this package without its kernels", "jax_r2p", "jax-r2p", _r2p("xla")),
    )
}

DEFAULT = (OURS, "cudnn", "fa3", "fa4", "tokamax")


def select(names: str, *, default: tuple[str, ...] = DEFAULT) -> tuple[Rival, ...]:
    """Returns rivals by name, each once, in the order of the names.

    Args:
      names: "default", or names separated by commas.
      default: What "default" stands for.

    Raises:
      ValueError: A name is not in the table.
    """
    wanted = default if names == "default" else tuple(dict.fromkeys(names.split(",")))
    if unknown := [name for name in wanted if name not in RIVALS]:
        raise ValueError(f"must be default, or some of {', '.join(RIVALS)}; got {', '.join(unknown)!r}")
    return tuple(RIVALS[name] for name in wanted)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Why a rival is not timed on a workload.

    Attributes:
      reason: "not installed", or "refused: " and what it said.
    """

    reason: str


NOT_INSTALLED = "not installed"


def prepare(rival: Rival, w: Workload, arrays: Arrays) -> Function | Unavailable:
    """Returns the compiled function, called once; or why there is none.

    Anything a rival raises is its answer, whatever the type: it must not end the run of the others.

    Args:
      rival: What to build.
      w: The workload to build it for.
      arrays: Inputs of that workload.
    """
    import jax

    if not rival.is_installed():
        return Unavailable(NOT_INSTALLED)
    try:
        f = jax.jit(rival.build(w))
        jax.block_until_ready(f(*arrays))
    except Exception as error:  # noqa: BLE001
        said = str(error).partition("\n")[0][:160]
        return Unavailable(f"refused: {type(error).__name__}: {said}")
    return f
