"""Static choices of the kernels and the hardware limits that bound them. Imports no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Role = Literal["forward", "backward", "preprocess"]
Mask = Literal["none", "causal", "window"]
MaskLowering = Literal["r2p", "compare"]

WARPGROUP = 128
"""Threads of a warpgroup, the unit that issues one WGMMA."""

WARPGROUP_ROWS = 64
"""Query rows that one consumer warpgroup owns: the M of every SM90 WGMMA."""

MAX_HEAD_DIM = 256
"""The most columns of a WGMMA, and so of an out tile."""

MAX_CONSUMER_WARPGROUPS = 4
"""As many as named barriers are numbered for, and as still leave each thread enough registers."""

REGISTER_FILE = 65536
"""32-bit registers of one SM."""

SHARED_MEMORY_PER_SM = 233472
"""Bytes of shared memory that the CTAs of one SM divide among them (228 KiB)."""

SHARED_MEMORY_PER_CTA = 232448
"""Most bytes one CTA can have (227 KiB)."""

SHARED_MEMORY_RESERVED = 1024
"""Bytes the driver takes from each CTA's share."""

FINISH_WARPS = 2
"""Warps of the backward kernel that turn finished sums of dQ into rows."""

VECTOR = 8
"""Elements of a 16-bit type in 16 bytes, the most that a thread loads at once."""

ROWS_AT_ONCE = 8
"""Rows that a thread of the preprocess kernel loads before it adds anything up."""

BOX_COLUMNS = (64, 32)
"""Columns that a TMA box can have: what the 128- and 64-byte swizzles span, in elements of a 16-bit type."""


def box_columns(width: int) -> int:
    """Columns of the TMA boxes of a tile of `width` columns: the widest swizzle that divides them.

    `hopper_helpers.get_smem_layout_atom` and the launcher (`MapBoxColumns` in ffi/tensor_map.h) choose alike.
    """
    return next(columns for columns in BOX_COLUMNS if width % columns == 0)


def check_registers(config: ForwardConfig | BackwardConfig) -> None:
    """Refuse what `setmaxnreg` cannot give: a wrong sum hangs the kernel instead of failing."""
    for role, registers in (
        ("producer", config.producer_registers),
        ("consumer", config.consumer_registers),
    ):
        if registers % 8 or not 24 <= registers <= 256:
            raise ValueError(f"{role}_registers={registers} must be a multiple of 8 in 24..256")
    # Before `setmaxnreg` a thread has an equal share, in steps of 8.
    at_entry = REGISTER_FILE // (config.threads * config.min_blocks) // 8 * 8
    pool = at_entry * (config.consumer_warpgroups + 1)
    asked = config.consumer_registers * config.consumer_warpgroups + config.producer_registers
    if asked > pool:
        raise ValueError(
            f"setmaxnreg asks for {asked} registers a thread column, the CTA's pool holds {pool} "
            f"({config.threads} threads, {config.min_blocks} CTAs an SM)"
        )


def shared_memory_limit(config: ForwardConfig | BackwardConfig) -> int:
    """The most bytes of shared memory that each of `min_blocks` CTAs of an SM can have."""
    return min(SHARED_MEMORY_PER_CTA, SHARED_MEMORY_PER_SM // config.min_blocks - SHARED_MEMORY_RESERVED)


def check_shared_memory(config: ForwardConfig | BackwardConfig) -> None:
    """Refuse tiles that find no room."""
    limit = shared_memory_limit(config)
    if config.shared_memory > limit:
        raise ValueError(
            f"tiles need {config.shared_memory} bytes of shared memory, {limit} are left to each of "
            f"{config.min_blocks} CTAs"
        )


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """One compiled form of the forward kernel.

    Attributes:
      dtype: `"bf16"` or `"fp16"`, of query, key, value and out.
      head_dim: columns of a query or key tile, a multiple of 32 up to 256. Narrower heads run in it by the
        TMA's zero fill.
      value_head_dim: columns of a value or out tile, likewise; None for as many.
      mask: which mask code is compiled in. The end of the keys is always masked.
      tile_m: query rows of a CTA, a multiple of 64; one consumer warpgroup per 64.
      tile_n: keys of a block, a multiple of 16.
      stages: depth of the key and of the value pipeline, in blocks.
      min_blocks: CTAs that must fit on an SM together; bounds registers and shared memory.
      producer_registers, consumer_registers: what `setmaxnreg` gives a thread of each role.
      own_blocks: a warpgroup computes only the key blocks that its own rows see, and not all that its tile
        does. Warpgroups then have blocks of different number, so they do not take turns.
      early_scores: the first scores of the next tile are computed under the end of this one. Needs the
        query in registers or `query_stages=2`.
      rescale_late: what has been summed of O shrinks to a block's new maximum under the scores of the next
        block, not before their turn.
      skip_rescale: a warp leaves out that O shrinks where none of its rows has a new maximum. The results
        are the same, as it would multiply by 1.
      query_stages: tiles whose query rows are in shared memory at a time: with 2 the next ones come under
        all of a tile, not only under its end.
      query_in_registers: a consumer keeps its query rows in registers, head_dim / 4 a thread, in place of
        reading them from shared memory for each block.
      out_in_query: the out tile has no shared memory of its own, but takes the place of the query rows that
        it belongs to. They must have stayed in shared memory, and the next ones for the same stage are loaded
        only when the store has read the tile.
      mask_lowering: `"r2p"` or `"compare"` (one or two integer compares an element; the baseline of
        ablations).
      mask_every_block: every block takes every mask of the variant, needed or not (the other baseline).
    """

    role: ClassVar[Role] = "forward"

    dtype: Literal["bf16", "fp16"]
    head_dim: int
    value_head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    mask: Mask
    tile_m: int
    tile_n: int
    stages: int = 2
    min_blocks: int = 1
    producer_registers: int
    consumer_registers: int
    own_blocks: bool = False
    early_scores: bool = False
    rescale_late: bool = False
    skip_rescale: bool = False
    query_stages: int = 1
    query_in_registers: bool = False
    out_in_query: bool = False
    mask_lowering: MaskLowering = "r2p"
    mask_every_block: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot run: a wrong register sum hangs the kernel instead of failing."""
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        step = BOX_COLUMNS[-1]
        for name in ("head_dim", "value_head_dim"):
            width = getattr(self, name)
            if width % step or not step <= width <= MAX_HEAD_DIM:
                raise ValueError(f"{name}={width} must be a multiple of {step} in {step}..{MAX_HEAD_DIM}")
        if self.query_stages not in (1, 2):
            raise ValueError(f"query_stages={self.query_stages} must be 1 or 2")
        if self.early_scores and (self.own_blocks or self.out_in_query):
            raise ValueError("early_scores is for own_blocks=False and out_in_query=False")
        if self.early_scores and not self.query_in_registers and self.query_stages < 2:
            raise ValueError("early_scores needs the query in registers, or query_stages=2")
        if self.out_in_query and (self.query_in_registers or self.head_dim != self.value_head_dim):
            raise ValueError(
                f"out_in_query needs query rows that stay in shared memory and are as wide as out, got "
                f"query_in_registers={self.query_in_registers}, head_dim={self.head_dim}, "
                f"value_head_dim={self.value_head_dim}"
            )
        if self.tile_m not in [n * WARPGROUP_ROWS for n in range(1, MAX_CONSUMER_WARPGROUPS + 1)]:
            raise ValueError(
                f"tile_m={self.tile_m} must be a multiple of {WARPGROUP_ROWS} for 1 to "
                f"{MAX_CONSUMER_WARPGROUPS} warpgroups"
            )
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n} must be a multiple of 16 in 16..256")
        check_registers(self)
        check_shared_memory(self)

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute; one more feeds them."""
        return self.tile_m // WARPGROUP_ROWS

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups take turns at issuing matmuls, so that one's softmax runs under another's."""
        return self.consumer_warpgroups > 1 and not self.own_blocks

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumer_warpgroups + 1)

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: barriers, then query, out, key and value tiles."""
        query, out = self.query_stages * self.tile_m * self.head_dim, self.tile_m * self.value_head_dim
        blocks = self.stages * self.tile_n * (self.head_dim + self.value_head_dim)
        return 1024 + 2 * (query + (0 if self.out_in_query else out) + blocks)

    @property
    def name(self) -> str:
        """Name of the variant, of its cubin file and, with a prefix, of its entry symbol."""
        value = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return f"fwd_{self.dtype}_d{self.head_dim}{value}_{self.mask}"


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """One compiled form of the backward kernel.

    Attributes:
      dtype: `"bf16"` or `"fp16"`, of query, key, value and their cotangents.
      head_dim: columns of a query or key tile: 64, 128 or 256. Narrower heads run in it by the TMA's zero
        fill.
      value_head_dim: columns of a value tile, likewise; None for as many.
      mask: which mask code is compiled in. The ends of the keys and queries are always masked.
      tile_m: query rows of a step, 64, or 128 with two consumer warpgroups.
      tile_n: keys of a CTA, 64 for each of one or two consumer warpgroups. With heads of more than 128
        columns, two warpgroups share 64 keys and divide the columns.
      stages, dout_stages: depths of the query and of the dout pipeline, in steps.
      min_blocks: CTAs that must fit on an SM together; bounds registers and shared memory.
      overlap_dkey: dK of a step may run on into the next step; costs tile_m / 4 registers a thread.
      delay_dquery: dQ of a step is computed in the next one, so that no warpgroup waits for the dS of
        another. Not where warpgroups divide columns, nor where one has more than 64 x 64 elements of dQ.
      producer_registers, consumer_registers: what `setmaxnreg` gives a thread of each role.
    """

    role: ClassVar[Role] = "backward"

    dtype: Literal["bf16", "fp16"]
    head_dim: int
    value_head_dim: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    mask: Mask
    tile_m: int
    tile_n: int
    stages: int = 2
    dout_stages: int = 2
    min_blocks: int = 1
    overlap_dkey: bool
    delay_dquery: bool = False
    producer_registers: int = 24
    consumer_registers: int = 240

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for name, allowed in (
            ("head_dim", (64, 128, 256)),
            ("value_head_dim", (64, 128, 256)),
            ("tile_n", (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS)),
            ("tile_m", (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)} must be one of {allowed}")
        if self.split_columns:
            if (self.tile_m, self.tile_n) != (WARPGROUP_ROWS, WARPGROUP_ROWS):
                raise ValueError(
                    f"heads of more than 128 columns need tile_m={WARPGROUP_ROWS} and "
                    f"tile_n={WARPGROUP_ROWS}, got {self.tile_m} and {self.tile_n}"
                )
            if min(self.head_dim, self.value_head_dim) < 128:
                raise ValueError(
                    f"two warpgroups divide columns in parts of 64 at least, got head_dim={self.head_dim} "
                    f"and value_head_dim={self.value_head_dim}"
                )
        elif self.tile_m > self.tile_n:
            raise ValueError(f"tile_m={self.tile_m} must be at most tile_n={self.tile_n}")
        elif self.tile_m * self.head_dim < self.tile_n * 64:
            raise ValueError(
                f"tile_m={self.tile_m} and head_dim={self.head_dim} leave less than 64 x 64 elements of dQ "
                f"to each of {self.consumer_warpgroups} warpgroups"
            )
        if self.delay_dquery and self.split_columns:
            raise ValueError("delay_dquery is not for warpgroups that divide columns")
        if self.delay_dquery and self.tile_m * self.head_dim != self.tile_n * 64:
            raise ValueError(
                f"delay_dquery is for 64 x 64 elements of dQ of each warpgroup, got tile_m={self.tile_m}, "
                f"tile_n={self.tile_n} and head_dim={self.head_dim}"
            )
        if self.overlap_dkey and self.stages < 2:
            raise ValueError("overlap_dkey needs 2 stages: a step's query rows stay until the next has begun")
        check_registers(self)
        check_shared_memory(self)

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute; one more feeds them."""
        return 2 if self.split_columns else self.tile_n // WARPGROUP_ROWS

    @property
    def split_columns(self) -> bool:
        """Whether warpgroups divide the columns of dK and dV, which are too many for one's registers."""
        return max(self.head_dim, self.value_head_dim) > 128

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (self.consumer_warpgroups + 1)

    @property
    def finish_columns(self) -> int:
        """Columns of dQ that a warp turns into rows at a time: 32, or 16 where more find no room."""
        return 32 if self._room >= FINISH_WARPS * WARPGROUP_ROWS * 32 * 4 else 16

    @property
    def finish_stages(self) -> int:
        """Stages in which the sums for that come by shared memory, two if there is room."""
        return 2 if self._room >= 2 * self._finish_stage else 1

    @property
    def shared_memory(self) -> int:
        """Bytes of dynamic shared memory: barriers and row statistics, then the tiles."""
        return self._tiles + self.finish_stages * self._finish_stage

    @property
    def _finish_stage(self) -> int:
        return FINISH_WARPS * WARPGROUP_ROWS * self.finish_columns * 4

    @property
    def _room(self) -> int:
        return shared_memory_limit(self) - self._tiles

    @property
    def _tiles(self) -> int:
        head = 256 + (self.stages + self.dout_stages) * self.tile_m * 4
        halves = self.tile_n * (self.head_dim + self.value_head_dim)
        halves += self.tile_m * (self.stages * self.head_dim + self.dout_stages * self.value_head_dim)
        # Two tiles of dS, and one of weights where they go through shared memory too.
        halves += (3 if self.split_columns else 2) * self.tile_n * self.tile_m
        dquery = self.consumer_warpgroups * WARPGROUP_ROWS * 64
        return -(-head // 1024) * 1024 + 2 * halves + 4 * dquery

    @property
    def name(self) -> str:
        """Name of the variant, of its cubin file and, with a prefix, of its entry symbol."""
        value = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return f"bwd_{self.dtype}_d{self.head_dim}{value}_{self.mask}"


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """One compiled form of the kernel that prepares what the backward kernel reads.

    Attributes:
      dtype: `"bf16"` or `"fp16"`, of out and its cotangent.
      value_head_dim: columns of out: 64, 128 or 256. Of narrower heads some threads have no columns.
    """

    role: ClassVar[Role] = "preprocess"
    mask: ClassVar[Mask] = "none"
    tile_m: ClassVar[int] = 128
    tile_n: ClassVar[int] = 0
    shared_memory: ClassVar[int] = 0

    dtype: Literal["bf16", "fp16"]
    value_head_dim: int

    def __post_init__(self) -> None:
        """Refuse what cannot run: lanes of a row must divide a warp."""
        if self.value_head_dim not in (64, 128, 256):
            raise ValueError(f"value_head_dim={self.value_head_dim} must be one of (64, 128, 256)")

    @property
    def head_dim(self) -> int:
        """The same as `value_head_dim`, since there is no other array."""
        return self.value_head_dim

    @property
    def lanes(self) -> int:
        """Threads that share a row, with 16 bytes of it each."""
        return self.value_head_dim // VECTOR

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.tile_m // ROWS_AT_ONCE * self.lanes

    @property
    def min_blocks(self) -> int:
        """CTAs that must fit on an SM together: 512 threads, with more loads in flight than memory needs."""
        return 512 // self.threads

    @property
    def name(self) -> str:
        """Name of the variant, of its cubin file and, with a prefix, of its entry symbol."""
        return f"pre_{self.dtype}_d{self.value_head_dim}"
