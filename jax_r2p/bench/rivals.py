"""The implementations that are compared: each a function of query, key, value for one workload.

For training what is timed are the gradients of that function, by JAX, from a given cotangent of its result.

A rival is built by its row below. What is not installed, or refuses a workload, is listed as such and not
timed. To install the others: `pip install dew-flash-attn-cu13 fa4-jax tokamax`.

Nothing heavy is imported before a rival is built, so that arguments can be checked and rivals listed quickly.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal

import jax_r2p
from jax_r2p.bench.workloads import PASSES, Pass, Workload

if TYPE_CHECKING:
    import jax

Arrays = tuple["jax.Array", ...]
"""query (batch, length, heads, head_dim); key and value (batch, length, kv_heads, head_dim). For training
also the cotangent of out, which is like out.
"""

Function = Callable[["jax.Array", "jax.Array", "jax.Array"], "jax.Array"]
"""From query, key, value to out, which is like query."""

Timed = Callable[..., Any]
"""From the arrays of a workload to out, or for training to the gradients of query, key and value."""


@dataclasses.dataclass(frozen=True)
class Rival:
    """One implementation.

    Attributes:
      name: Key of the row.
      about: What it is, in a few words.
      module: What must be importable to run it.
      package: The distribution whose version is recorded.
      build: Makes the function for one workload.
      passes: What it can be timed for.
      lacks: Why its gradients would not come from a kernel; None if they do, or if it raises by itself.
    """

    name: str
    about: str
    module: str
    package: str
    build: Callable[[Workload], Function]
    passes: tuple[Pass, ...] = PASSES
    lacks: Callable[[Workload], str | None] | None = None

    def timed(self, w: Workload) -> Timed:
        """What is timed on a workload."""
        return gradients(self.build(w)) if w.training else self.build(w)

    def is_installed(self) -> bool:
        """Whether its module can be found. Imports nothing."""
        return importlib.util.find_spec(self.module) is not None

    def package_version(self) -> str | None:
        """The version of its distribution, or None if there is none by that name."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def gradients(forward: Function) -> Timed:
    """Returns the function from query, key, value and the cotangent of out to the three gradients."""

    def training(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array) -> Any:
        import jax

        _, pull_back = jax.vjp(forward, query, key, value)
        return pull_back(dout)

    return training


def _r2p(
    implementation: Literal["r2p", "xla"], *, deterministic: bool = False
) -> Callable[[Workload], Function]:
    def build(w: Workload) -> Function:
        return lambda q, k, v: jax_r2p.attention(
            q,
            k,
            v,
            is_causal=w.is_causal,
            local_window_size=w.window,
            implementation=implementation,
            deterministic=deterministic,
        )

    return build


def _no_backward_kernel(w: Workload) -> str | None:
    """Why the gradients of this package would come from plain XLA; `implementation="r2p"` lets that pass."""
    import jax.numpy as jnp

    from jax_r2p import _arguments, _dispatch

    choice = _dispatch.choose(
        _arguments.make_spec(w.is_causal, w.window),
        (w.batch, w.length, w.heads, w.head_dim),
        (w.batch, w.length, w.kv_heads, w.head_dim),
        (w.batch, w.length, w.kv_heads, w.value_head_dim),
        jnp.dtype(jnp.bfloat16),
        _dispatch.lowering_capability(),
        role="backward",
    )
    return choice if isinstance(choice, str) else None


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


OURS, DETERMINISTIC, REFERENCE = "jax_r2p", "jax_r2p_deterministic", "reference"
OWN = (OURS, DETERMINISTIC, REFERENCE)
"""What is of this package, and so no rival of it."""

RIVALS = {
    r.name: r
    for r in (
        Rival(
            OURS,
            "the kernels of this package",
            "jax_r2p",
            "jax-r2p",
            _r2p("r2p"),
            lacks=_no_backward_kernel,
        ),
        Rival(
            DETERMINISTIC,
            "gradients that are the same bits in each run",
            "jax_r2p",
            "jax-r2p",
            _r2p("r2p", deterministic=True),
            passes=("training",),
            lacks=_no_backward_kernel,
        ),
        Rival("cudnn", "cuDNN by jax.nn.dot_product_attention", "jax", "jax", _jax_nn("cudnn")),
        Rival("fa3", "FlashAttention-3, C++", "dew_flash_attn", "dew-flash-attn-cu13", _fa3),
        Rival("fa4", "FlashAttention-4, CuTeDSL, compiled at run time", "fa4_jax", "fa4-jax", _fa4),
        Rival("tokamax", "Pallas Mosaic GPU", "tokamax", "tokamax", _tokamax),
        Rival("xla", "plain XLA, all scores in memory", "jax", "jax", _jax_nn("xla")),
        Rival(REFERENCE, "this package without its kernels", "jax_r2p", "jax-r2p", _r2p("xla")),
    )
}

DEFAULT: dict[Pass, tuple[str, ...]] = {
    "forward": (OURS, "cudnn", "fa3", "fa4", "tokamax"),
    "training": (OURS, DETERMINISTIC, "cudnn", "fa3", "fa4", "tokamax"),
}


def select(
    names: str, *, pass_: Pass = "forward", default: tuple[str, ...] | None = None
) -> tuple[Rival, ...]:
    """Returns rivals by name, each once, in the order of the names.

    Args:
      names: "default", or names separated by commas.
      pass_: What they are to be timed for.
      default: What "default" stands for; None for `DEFAULT` of the pass.

    Raises:
      ValueError: A name is not in the table, or not to be timed for this pass.
    """
    if default is None:
        default = DEFAULT[pass_]
    wanted = default if names == "default" else tuple(dict.fromkeys(names.split(",")))
    known = [name for name, rival in RIVALS.items() if pass_ in rival.passes]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"must be default, or some of {', '.join(known)}; got {', '.join(unknown)!r}")
    return tuple(RIVALS[name] for name in wanted)


@dataclasses.dataclass(frozen=True)
class Unavailable:
    """Why a rival is not timed on a workload.

    Attributes:
      reason: "not installed", "refused: " and what it said, or "not timed: " and why another code than its
        kernels would run.
    """

    reason: str


NOT_INSTALLED = "not installed"
NO_KERNEL = "not timed: "


def prepare(rival: Rival, w: Workload, arrays: Arrays) -> Timed | Unavailable:
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
        if w.training and rival.lacks and (reason := rival.lacks(w)):
            return Unavailable(f"{NO_KERNEL}{reason}")
        f = jax.jit(rival.timed(w))
        jax.block_until_ready(f(*arrays))
    except Exception as error:  # noqa: BLE001
        said = str(error).partition("\n")[0][:160]
        return Unavailable(f"refused: {type(error).__name__}: {said}")
    return f
