"""The table of kernels that the package ships.

`ForwardConfig` says what each column means. The milliseconds in the comments are of an H200 with 32k tokens
of bf16 and length 8192, the candidates of a row alternating in one run; docs/performance-log.md has the runs.
"""

import dataclasses
from typing import Literal

from jax_r2p.kernels.config import ForwardConfig, Mask

ARCH = "sm_90a"
"""Target of every kernel. The "a" allows WGMMA and `setmaxnreg`, and binds the cubin to capability 9.0."""


@dataclasses.dataclass(frozen=True)
class VariantRow:
    """One kernel to ship.

    Attributes:
      config: What to compile.
      declared_spills: Bytes of local memory per thread that are known and accepted. The build fails on any
        other number, so that a spill never comes or goes unseen.
    """

    config: ForwardConfig
    declared_spills: int = 0

    @property
    def name(self) -> str:
        """Name of the variant: the stem of its file and its key in the manifest."""
        return self.config.name


def _rows(dtype: Literal["bf16", "fp16"]) -> tuple[VariantRow, ...]:
    """The kernels of one dtype. bf16 and fp16 cost the same everywhere, so they share the table."""

    def row(
        head_dim: int, mask: Mask, tile_m: int, tile_n: int, min_blocks: int, producer: int, consumer: int
    ) -> VariantRow:
        return VariantRow(
            ForwardConfig(
                dtype=dtype,
                head_dim=head_dim,
                mask=mask,
                tile_m=tile_m,
                tile_n=tile_n,
                min_blocks=min_blocks,
                producer_registers=producer,
                consumer_registers=consumer,
                # Turns need two warpgroups to take them.
                ping_pong=tile_m > 64,
            )
        )

    return (
        # head dim, mask, tile_m, tile_n, CTAs per SM, registers of a producer and of a consumer thread
        # 4.29; with tile_n 112 4.55, 96 4.63; 160 spills (8.13); without turns 4.71.
        row(64, "none", 192, 128, 1, 32, 160),
        # 2.29; with tile_n 112 2.34, 96 2.39; 144 spills (4.08); without turns 2.46.
        row(64, "causal", 192, 128, 1, 32, 160),
        # Windows (64, 0) and (256, 0): 0.179 and 0.289; four CTAs an SM 0.174 and 0.311, two 0.234 and
        # 0.361.
        row(64, "window", 64, 64, 3, 24, 136),
        # 3.52; with tile_n 160 3.50, 128 3.64; without turns 3.57.
        row(128, "none", 128, 176, 1, 24, 240),
        # 1.81; with tile_n 160 1.79, but slower at length 512 and 2048; 112 1.86; without turns 1.84.
        row(128, "causal", 128, 128, 1, 24, 240),
        # Windows (64, 0) and (256, 0): 0.153 and 0.239; with tile_n 96 0.175 and 0.270; 128x64, one CTA an SM,
        # 0.205 and 0.323; 128x128 0.229 and 0.305. A third CTA finds no room for its registers.
        row(128, "window", 64, 64, 2, 24, 232),
    )


VARIANTS: dict[str, VariantRow] = {row.name: row for dtype in ("bf16", "fp16") for row in _rows(dtype)}
"""Every kernel by name."""
