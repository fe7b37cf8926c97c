"""The table of kernels that the package ships.

`ForwardConfig` says what each column means. The milliseconds in the comments are of an H200 with 32k tokens
of bf16 and length 8192, the candidates of a row alternating in one run; docs/performance-log.md has the runs.
"""

import dataclasses
from typing import Any, Literal

from jax_r2p.kernels.config import BackwardConfig, ForwardConfig, Mask, PreprocessConfig

ARCH = "sm_90a"
"""Target of every kernel. The "a" allows WGMMA and `setmaxnreg`, and binds the cubin to capability 9.0."""


@dataclasses.dataclass(frozen=True)
class VariantRow:
    """One kernel to ship.

    Attributes:
      config: What to compile.
      declared_spills: Bytes of local memory per thread that are known and accepted. The build fails on any
        other number, so that a spill never comes or goes unseen.
      suffix: Added to the name; tells apart kernels of the same width and mask.
      least_span: Keys that a row's window must have for this kernel to be chosen before those with less.
    """

    config: ForwardConfig | BackwardConfig | PreprocessConfig
    declared_spills: int = 0
    suffix: str = ""
    least_span: int = 0

    @property
    def name(self) -> str:
        """Name of the variant: the stem of its file and its key in the manifest."""
        return self.config.name + self.suffix


def _forward_rows(dtype: Literal["bf16", "fp16"]) -> tuple[VariantRow, ...]:
    """The forward kernels of one dtype. bf16 and fp16 cost the same everywhere, so they share the table."""

    def row(
        head_dim: int | tuple[int, int],
        mask: Mask,
        tile_m: int,
        tile_n: int,
        min_blocks: int,
        producer: int,
        consumer: int,
        query: Literal["registers", "shared", "under out"],
        *,
        least_span: int = 0,
        **choices: Any,
    ) -> VariantRow:
        query_width, value_width = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        return VariantRow(
            ForwardConfig(
                dtype=dtype,
                head_dim=query_width,
                value_head_dim=value_width,
                mask=mask,
                tile_m=tile_m,
                tile_n=tile_n,
                min_blocks=min_blocks,
                producer_registers=producer,
                consumer_registers=consumer,
                query_in_registers=query == "registers",
                out_in_query=query == "under out",
                **choices,
            ),
            suffix="_wide" if least_span else "",
            least_span=least_span,
        )

    # Warpgroups compute the blocks of their own 64 rows alone, as small CTAs would, but they share loads.
    own: dict[str, Any] = {"own_blocks": True}
    ahead: dict[str, Any] = {**own, "query_stages": 2}
    early: dict[str, Any] = {"early_scores": True}
    late: dict[str, Any] = {"rescale_late": True}
    skip: dict[str, Any] = {"skip_rescale": True}
    return (
        # head dim (of query and key, and of value if it is another), mask, tile_m, tile_n, CTAs per SM,
        # registers of a producer and of a consumer thread, and where a consumer reads its query rows from:
        # "under out" is shared memory that the out tile takes over
        # 4.24; with tile_n 112 4.34. One tile a CTA: 4.29; with tile_n 96 4.63; without turns 4.71. With the
        # query in registers they spill; tile_n 112 then has room and is 0 to 1 % slower. Rescaling left out
        # where it can be: 0.98; causal 1.01.
        row(64, "none", 192, 128, 1, 32, 160, "shared", **skip),
        # 64x64, three CTAs an SM, over 192x128: 0.71 at length 512, 0.77 at 1024, 0.97 at 2048, 1.13 at 8192.
        row(64, "causal", 64, 64, 3, 24, 136, "registers"),
        # 2.23; with tile_n 112 2.33. One tile a CTA: 2.29; with tile_n 96 2.39; without turns 2.46.
        row(64, "causal", 192, 128, 1, 32, 160, "shared", least_span=3072),
        # Windows (64, 0), (256, 0) and (128, 128), over three CTAs of 64x64: 0.99, 0.97, 0.96; with 4 or 8
        # stages 1.01, 0.98, 0.98; 192x64 0.98 to 1.0; tile_n 48, 80 or 96 1.1 to 1.2.
        row(64, "window", 256, 64, 1, 24, 112, "under out", stages=6, **ahead),
        # Causal 1.95; 128x128 with the query in registers 2.03, in shared memory 2.17. With tile_n 128 the
        # 192 rows spill. Rescaling left out where it can be: 0.98. Dense calls take the same tiles.
        row(96, "none", 192, 112, 1, 32, 160, "shared"),
        row(96, "causal", 192, 112, 1, 32, 160, "shared", **skip),
        # Windows (64, 0) and (256, 0), over three CTAs of 64x64: 0.91 and 1.01.
        row(96, "window", 192, 64, 1, 32, 160, "under out", stages=4, **ahead),
        # tile_n 144 is 0 to 1 % faster at length 8192, but 13 % slower at 512, of which it computes 576 keys.
        # The query in shared memory: 1 to 2 % slower, with tile_n 160 as fast as 144 but 20 % slower at 512;
        # with it in registers 160 spill. 176 leave no room for the out tile. Early scores: 0.97 to 1.00, 0.96
        # to 0.99 at length 512; the same with late rescaling 0.99 and 1.05.
        row(128, "none", 128, 128, 1, 24, 240, "registers", **early),
        # 64x64, two CTAs an SM, over 128x128 with early scores: 0.56 at length 64, 0.92 at 113, 1.04 at 256,
        # 1.01 at 512.
        row(128, "causal", 64, 64, 2, 24, 232, "registers"),
        # The query in shared memory: 1 to 2 % slower. tile_n 112 is 3 % slower, 144 was as fast, but slower
        # at lengths 512 and 2048. Early scores: 0.97 to 0.99.
        row(128, "causal", 128, 128, 1, 24, 240, "registers", least_span=256, **early),
        # Windows (64, 0) and (256, 0), over two CTAs of 64x64: 0.95 and 0.93; with the next query rows not
        # before the end of a tile 0.92 and 0.95; 128x64 with the query in registers 0.94 and 0.95; tile_n 48,
        # 80 or 128 0.93 to 0.96 and 1.04 to 1.13.
        row(128, "window", 192, 64, 1, 32, 160, "under out", stages=4, **ahead),
        # Over 192x64: window (1024, 0) 0.97, (256, 0) 1.03 to 1.09. Early scores: 0.96 to 0.99 of that.
        row(128, "window", 128, 128, 1, 24, 240, "registers", least_span=768, **early),
        # Causal 1.71; tile_n 96 1.72; 80 with the query in registers and an out tile of its own, the most
        # there is room for, 1.75. Windows (64, 0) and (256, 0), over two CTAs of 64x48: 0.90 and 0.88; tile_n
        # 48 0.91 and 0.97; the next query rows not before the end of a tile, three stages, 0.96 and 1.01.
        row(192, "none", 128, 112, 1, 24, 240, "under out"),
        row(192, "causal", 128, 112, 1, 24, 240, "under out"),
        row(192, "window", 128, 64, 1, 24, 240, "under out", **ahead),
        # Causal 1.41; the query in shared memory 1.43, tile_n 96 1.44. 128 has no room for the out tile.
        # Windows (64, 0) and (256, 0), over two CTAs of 64x48: 0.99 and 0.86; 192x64 1.01 and 0.95.
        row((192, 128), "none", 128, 112, 1, 24, 240, "registers"),
        row((192, 128), "causal", 128, 112, 1, 24, 240, "registers"),
        row((192, 128), "window", 128, 64, 1, 24, 240, "registers", stages=3, **own),
        # Causal 1.88 and, at length 512, 0.218; tile_n 64 2.00 and 0.214. 80 is the most that finds room.
        # Windows (64, 0) and (256, 0), over warpgroups that take turns and compute all blocks: 0.97 and 0.94.
        # Late rescaling: dense 0.93, causal 0.95; at other head dims 1.00 to 1.03.
        row(256, "none", 128, 80, 1, 24, 240, "under out", **late),
        row(256, "causal", 128, 80, 1, 24, 240, "under out", **late),
        row(256, "window", 128, 64, 1, 24, 240, "under out", **own),
    )


def _backward_rows(dtype: Literal["bf16", "fp16"]) -> tuple[VariantRow, ...]:
    """The backward kernels of one dtype."""

    def row(head_dim: int, mask: Mask, tile_m: int, tile_n: int, **config: Any) -> VariantRow:
        return VariantRow(
            BackwardConfig(dtype=dtype, head_dim=head_dim, mask=mask, tile_m=tile_m, tile_n=tile_n, **config)
        )

    wide: dict[str, Any] = {"dout_stages": 1, "overlap_dkey": False}
    return (
        # head dim, mask, query rows of a step, keys of a CTA
        # The times are of the whole backward pass. 64x64 with two CTAs an SM: 5.99 and 12.30 against 5.76 and
        # 10.48. dK into the next step finds no registers with 128x128. Window (256, 0): 0.93; 64x64 0.97 to
        # 1.04.
        row(64, "none", 128, 128, overlap_dkey=False, delay_dquery=True),
        row(64, "causal", 128, 128, overlap_dkey=False, delay_dquery=True),
        row(64, "window", 128, 128, overlap_dkey=False, delay_dquery=True),
        # dK into the next step: 4.77 against 4.95. Scores of the next step under this one's: 5.40. 64x64 with
        # two CTAs an SM leaves too few registers, and 128x128 even more so.
        row(128, "none", 64, 128, overlap_dkey=True),
        row(128, "causal", 64, 128, overlap_dkey=True),
        row(128, "window", 64, 128, overlap_dkey=True),
        # The only tiles that find room; heads of 192 columns take them too.
        row(256, "none", 64, 64, **wide),
        row(256, "causal", 64, 64, **wide),
        row(256, "window", 64, 64, **wide),
    )


_DTYPES: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")

FORWARD: dict[str, VariantRow] = {row.name: row for dtype in _DTYPES for row in _forward_rows(dtype)}
"""The forward kernels by name."""

BACKWARD: dict[str, VariantRow] = {row.name: row for dtype in _DTYPES for row in _backward_rows(dtype)}
"""The backward kernels by name."""

PREPROCESS: dict[str, VariantRow] = {
    row.name: row
    for row in (
        VariantRow(PreprocessConfig(dtype=dtype, value_head_dim=width))
        for dtype in _DTYPES
        for width in (64, 128, 256)
    )
}
"""The kernels that prepare what the backward ones read, by name."""

VARIANTS: dict[str, VariantRow] = FORWARD | BACKWARD | PREPROCESS
"""Every kernel by name."""


def without_r2p(row: VariantRow) -> VariantRow:
    """The same kernel with integer compares an element in place of R2P, named with `_compare` at the end."""
    if not isinstance(row.config, ForwardConfig):
        raise ValueError(f"{row.name} is no forward kernel")
    config = dataclasses.replace(row.config, mask_lowering="compare")
    return dataclasses.replace(row, config=config, suffix=f"{row.suffix}_compare")
