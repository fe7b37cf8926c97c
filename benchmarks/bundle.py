"""Kernels that are not shipped: compiled into a folder here, called from it on a machine with a GPU."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_r2p._manifest import Variant, load_manifest
from jax_r2p._spec import AttentionSpec
from jax_r2p.aot.compile import BuildError, CompiledVariant, compile_variants
from jax_r2p.aot.variants import VariantRow
from jax_r2p.bench.workloads import Workload
from jax_r2p.cli.output import progress


def compile_into(
    folder: Path, rows: Sequence[VariantRow], *, skip_failures: bool = False
) -> tuple[list[CompiledVariant], dict[str, str]]:
    """Compiles kernels, as many at once as there are processors, and writes those that compile to `folder`.

    Args:
      folder: Where to; what it held before goes, unless nothing compiles.
      rows: What to compile.
      skip_failures: Whether a kernel that cannot be built is left out, in place of ending the build.

    Returns:
      The kernels, and for each that could not be built why.
    """
    from jax_r2p.aot import output

    compiled: list[CompiledVariant] = []
    failed: dict[str, str] = {}
    with progress("compiling", len(rows)) as advance:
        todo = list(rows)
        while todo:
            try:
                for done in compile_variants(todo):
                    compiled.append(done)
                    advance(done.variant.name)
            except BuildError as error:
                name = str(error).partition(":")[0]
                if not skip_failures or name not in {row.name for row in todo}:
                    raise
                failed[name] = str(error).partition(": ")[2].splitlines()[0]
                advance(name)
            finished = failed.keys() | {done.variant.name for done in compiled}
            todo = [row for row in todo if row.name not in finished]
    if compiled:
        output.write(folder, compiled, keep_others=False)
    return compiled, failed


def with_tile(row: VariantRow, tile_m: int, tile_n: int, ctas: int, suffix: str, **config: Any) -> VariantRow:
    """The same kernel with other tiles, with `suffix` added to its name.

    Args:
      row: What is changed.
      tile_m: Query rows.
      tile_n: Keys of a block.
      ctas: Thread blocks that share an SM.
      suffix: Added to the name.
      **config: Further fields of its `ForwardConfig`.

    Raises:
      ValueError: It cannot fit.
    """
    changed = dataclasses.replace(
        row.config,
        tile_m=tile_m,
        tile_n=tile_n,
        min_blocks=ctas,
        **config,
    )
    return dataclasses.replace(row, config=changed, suffix=row.suffix + suffix)


def add_run_arguments(command: argparse.ArgumentParser, rounds: int) -> None:
    """The arguments that every run of kernels takes."""
    command.add_argument("folder", type=Path)
    command.add_argument("--out", type=Path, required=True, help="JSON lines, appended")
    command.add_argument("--commit", default="unknown", help="what the kernels were built from")
    command.add_argument(
        "--rounds", type=int, default=rounds, help="samples of each kernel (default %(default)s)"
    )


def register(folder: Path) -> dict[str, Variant]:
    """Makes the kernels of a folder callable. Returns them and the shipped ones by name."""
    from jax_r2p import _ffi

    return {v.name: v for v in (*load_manifest().variants, *_ffi.register_folder(folder))}


def mask_of(w: Workload) -> str:
    """The mask kind of the kernels for a workload."""
    return "window" if w.window else "causal" if w.is_causal else "none"


def shipped(w: Workload) -> Variant:
    """The shipped forward kernel that a call of a workload runs."""
    import numpy as np
    from jax.numpy import bfloat16

    from jax_r2p import _dispatch

    query, key, value = (
        (w.batch, w.length, w.heads, w.head_dim),
        (w.batch, w.length, w.kv_heads, w.head_dim),
        (w.batch, w.length, w.kv_heads, w.value_head_dim),
    )
    choice = _dispatch.choose(bounds(w), query, key, value, np.dtype(bfloat16), _dispatch.HOPPER)
    if isinstance(choice, str):
        raise LookupError(f"{w.name}: {choice}")
    return choice


def bounds(w: Workload) -> AttentionSpec:
    """The visible keys of a workload."""
    left, right = (None, None) if w.window is None else w.window
    return AttentionSpec(left=left, right=0 if w.is_causal else right)


def call(w: Workload, variant: Variant) -> Callable[..., Any]:
    """A call of one kernel with the arrays of a workload: query, key, value to out."""
    import jax.numpy as jnp

    from jax_r2p import _ffi

    scale = jnp.float32(w.head_dim**-0.5)
    spec = bounds(w).effective(w.length, w.length)

    def function(query: Any, key: Any, value: Any) -> Any:
        out, _ = _ffi.attention_forward(
            query, key, value, scale, variant=variant, spec=spec, kv_repeat=1, kv_inner=1
        )
        return out

    return function
