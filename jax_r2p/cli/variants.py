"""List the kernels that are shipped.

Head dims are those that a kernel takes, of query and key and, if they differ, of value and out; a call runs
in the narrowest kernel that takes its own. A mask "window>=512" is for windows in which a query sees 512 keys
or more. The role is what a kernel computes: "forward" attention, "backward" the gradients by query, key and
value. Tiles are queries x keys. "CTAs an SM" counts the thread blocks that fit on a multiprocessor
together. Shared memory is bytes of a thread block; registers and spills (in bytes) are of a thread. Needs
neither jax nor a GPU.

Exit status: 0; 1 if the package has no readable manifest; 2 after wrong arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from jax_r2p._manifest import HEAD_DIM_MULTIPLE, Toolchain, Variant, load_manifest
from jax_r2p.cli.output import UsageError, print_json, print_table

_HASH_DIGITS = 12
"""Of the hash in the table: enough to tell builds apart. --json has it whole."""

_HEADER = (
    "name",
    "role",
    "dtype",
    "mask",
    "head dims",
    "tile",
    "threads",
    "CTAs an SM",
    "shared memory",
    "registers",
    "spills",
    "bytes",
    "sha256",
)
_WORDS = 4
"""Leading columns that are words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="show only these kernels (default: all)")


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    manifest = load_manifest()
    variants = _select(manifest.variants, options.names)
    if options.json:
        print_json(
            {
                "toolchain": dataclasses.asdict(manifest.toolchain),
                "variants": [dataclasses.asdict(variant) for variant in variants],
            }
        )
    else:
        print_table("Kernels for Hopper GPUs", _HEADER, [_cells(v) for v in variants], left=_WORDS)
        print(_toolchain_line(manifest.toolchain))
    return 0


def _select(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    known = [variant.name for variant in variants]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no kernel is called {', '.join(unknown)}; there are {', '.join(known)}")
    return [variant for variant in variants if not names or variant.name in names]


def _cells(variant: Variant) -> tuple[str, ...]:
    # Of query and key, and of value if that is another.
    widths = dict.fromkeys((variant.head_dim, variant.value_head_dim))
    return (
        variant.name,
        variant.role,
        variant.dtype,
        variant.mask + (f">={variant.least_span}" if variant.least_span else ""),
        "/".join(f"{HEAD_DIM_MULTIPLE}-{width}" for width in widths),
        f"{variant.tile_m} x {variant.tile_n}",
        str(variant.threads),
        str(variant.min_blocks),
        str(variant.shared_memory),
        str(variant.registers),
        str(variant.spills),
        str(variant.size),
        variant.sha256[:_HASH_DIGITS],
    )


def _toolchain_line(toolchain: Toolchain) -> str:
    return (
        f"Compiled with cutlass-dsl {toolchain.cutlass_dsl}, nvvm {toolchain.nvvm}, ptx {toolchain.ptx}, "
        f"cuda {toolchain.cuda}."
    )
