"""The attention calls that are timed, and the work in each: one table for every rival.

Sizes are those of real models at 32k tokens a call and hidden size 2048 (query heads * head dim), so
batch = 32768 / length.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Pass = Literal["forward", "training"]
"""What is timed: the result, or the gradients of query, key and value, which take the result first."""

PASSES: tuple[Pass, ...] = ("forward", "training")

TOKENS, HIDDEN = 32_768, 2048
BANDWIDTH = 4.3e12
"""Bytes a second that a plain copy moves on an H200; what an attention call cannot be faster than."""

DENSE_PEAK_TFLOPS = 989.5
"""bf16 tensor-core peak of an H100 or H200 SXM without sparsity, by NVIDIA's data sheet."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One call, in bf16.

    Attributes:
      name: Key of the row, for example "causal_d128_s8192".
      batch: Sequences.
      length: Tokens of a sequence, queries and keys alike.
      heads: Query heads. query is (batch, length, heads, head_dim).
      kv_heads: Key heads. key is (batch, length, kv_heads, head_dim), value the same with value_head_dim.
      head_dim: Elements of a head of query and key.
      value_head_dim: Elements of a head of value and out.
      is_causal: Whether a query sees no later key.
      window: (left, right) tokens seen besides the own one, both ends included; None is unbounded.
      training: Whether the call is forward and backward: from query, key, value and the cotangent of out to
        their gradients.
      calls: Calls of one compiled program, as of the layers of a model: the query of each is the out of the
        one before. Above 1 for calls so short that the device waits for the host between programs.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    training: bool = False
    calls: int = 1

    @property
    def pass_(self) -> Pass:
        """Which pass it is of."""
        return "training" if self.training else "forward"

    @property
    def mask(self) -> str:
        """The mask in words: "full", "causal" or "window (left, right)"."""
        words = ["causal"] if self.is_causal else []
        if self.window is not None:
            words.append(f"window {self.window}")
        return ", ".join(words) or "full"

    def pairs(self) -> int:
        """Query-key pairs that one head computes: those the mask lets through."""
        return visible_pairs(self.length, self.length, self.is_causal, self.window)

    def flops(self) -> int:
        """Operations: 2 a multiply-add, visible pairs only.

        Two matmuls forward; five more backward, which with equal head dims is 3.5 times the forward in all.
        """
        widths = self.head_dim + self.value_head_dim
        if self.training:
            # the scores again, dquery and dkey; the cotangent of the weights, and dvalue
            widths += 3 * self.head_dim + 2 * self.value_head_dim
        return 2 * self.batch * self.heads * widths * self.pairs()

    def bytes_moved(self) -> int:
        """Bytes of the least traffic with memory, each array moved once by each pass.

        Forward: query, key, value are read, out and the residual are written. Backward: all five and the
        cotangent of out are read, three gradients are written.
        """
        rows = self.batch * self.length
        arrays = 2 * rows * (self.heads + self.kv_heads) * (self.head_dim + self.value_head_dim)
        residual = 4 * rows * self.heads
        return 3 * arrays + 2 * residual if self.training else arrays + residual

    def byte_floor_ms(self) -> float:
        """Milliseconds that `bytes_moved` takes at `BANDWIDTH`."""
        return self.bytes_moved() / BANDWIDTH * 1e3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matmul:
    """A product of two square bf16 matrices, the yardstick of how fast the tensor cores get.

    Attributes:
      name: Key of the row.
      size: Rows and columns.
      pass_: That of the calls it takes turns with.
    """

    name: str
    size: int
    pass_: Pass = "forward"

    def flops(self) -> int:
        """Operations."""
        return 2 * self.size**3

    def bytes_moved(self) -> int:
        """Bytes of the least traffic with memory."""
        return 3 * 2 * self.size**2


MATMUL = Matmul(name="matmul_8192", size=8192)
MATMUL_WITH = "full_d128_s8192"
"""The workload that `MATMUL` takes turns with."""


def visible_pairs(t: int, s: int, is_causal: bool, window: tuple[int, int] | None) -> int:
    """Counts the pairs (i, j) with i+s-t-left <= j <= i+s-t+right, without going through them all.

    Args:
      t: Queries: 0 <= i < t.
      s: Keys: 0 <= j < s.
      is_causal: Whether `right` is at most 0.
      window: (left, right) tokens; None is unbounded.
    """
    left, right = (t + s, t + s) if window is None else window
    if is_causal:
        right = min(right, 0)
    offset = s - t
    # Row i sees keys max(0, i+offset-left) .. min(s-1, i+offset+right): those up to the right end, less those
    # before the left end.
    cut_left = _sum_clamped(offset - left, t, s)
    seen_below = _sum_clamped(offset + right + 1, t, s)
    return seen_below - cut_left


def _sum_clamped(first: int, count: int, limit: int) -> int:
    """Returns the sum of min(max(first + i, 0), limit) over i in 0 .. count-1."""

    def positive(start: int) -> int:
        """Returns the sum of max(start + i, 0)."""
        skipped = min(max(-start, 0), count)
        terms, low = count - skipped, start + skipped
        return terms * low + terms * (terms - 1) // 2

    return positive(first) - positive(first - limit)


def _row(
    kind: str,
    head_dim: int,
    length: int,
    *,
    value_head_dim: int | None = None,
    kv_heads: int | None = None,
    batch: int | None = None,
    calls: int = 1,
) -> Workload:
    """One row of the table.

    Args:
      kind: "full", "causal", "localL" or "localL_R", a window of L tokens to the left and R, else 0, to the
        right.
      head_dim: Elements of a head.
      length: Tokens.
      value_head_dim: Elements of a value; None for as many.
      kv_heads: Key heads, shared by twice the query heads of the other rows; None for a head each.
      batch: None for `TOKENS` in all, or one sequence if that is longer.
      calls: Of one program.
    """
    heads = HIDDEN // head_dim if kv_heads is None else 2 * HIDDEN // head_dim
    shared = "" if kv_heads is None else f"_gqa{heads // kv_heads}"
    value = "" if value_head_dim is None else f"v{value_head_dim}"
    window = None
    if kind.startswith("local"):
        left, _, right = kind.removeprefix("local").partition("_")
        window = (int(left), int(right or 0))
    return Workload(
        name=f"{kind}{shared}_d{head_dim}{value}_s{length}" + (f"_x{calls}" if calls > 1 else ""),
        batch=batch or max(1, TOKENS // length),
        length=length,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        is_causal=kind == "causal",
        window=window,
        calls=calls,
    )


WORKLOADS = (
    _row("full", 64, 8192),
    _row("full", 128, 4096),
    _row("full", 128, 8192),
    _row("full", 128, 512),
    _row("causal", 64, 8192),
    _row("causal", 128, 8192),
    _row("causal", 128, 2048),
    _row("causal", 128, 512),
    _row("causal", 128, 16_384),
    _row("causal", 128, 8192, kv_heads=4),
    _row("local64", 64, 8192),
    _row("local64", 128, 8192),
    _row("local256", 64, 8192),
    _row("local256", 128, 8192),
    _row("local1024", 128, 8192),
    _row("local128_128", 64, 8192),
    _row("causal", 128, 384),  # three tiles of 128 rows, or six of 64
    _row("causal", 128, 113, batch=64),  # short and no multiple of a tile
    _row("causal", 128, 113, batch=64, calls=10),
    _row("full", 256, 8192),
    _row("causal", 256, 8192),
    _row("causal", 96, 8192),
    _row("causal", 192, 8192),
    _row("causal", 192, 8192, value_head_dim=128),
)

SOME_LENGTHS = (512, 8192, 32_768, 131_072)
ALL_LENGTHS = (512, 2048, *SOME_LENGTHS[1:])

LENGTHS = tuple(
    _row(kind, head_dim, length, value_head_dim=value_head_dim)
    for kind, head_dim, value_head_dim, lengths in (
        *((kind, head_dim, None, ALL_LENGTHS) for kind in ("full", "causal") for head_dim in (64, 128, 256)),
        *((kind, head_dim, None, SOME_LENGTHS) for kind in ("full", "causal") for head_dim in (96, 192)),
        *((kind, 192, 128, SOME_LENGTHS) for kind in ("full", "causal")),
        *(("local64", head_dim, None, ALL_LENGTHS) for head_dim in (64, 128)),
        *(("local256", head_dim, None, ALL_LENGTHS) for head_dim in (64, 128, 256)),
    )
    for length in lengths
)
"""How a mask and a head dim behave over lengths: `--cases lengths`, drawn by `--plot-lengths`."""

TUNING = (
    *(_row("full", head_dim, 8192) for head_dim in (96, 192)),
    _row("full", 192, 8192, value_head_dim=128),
    *(_row(kind, head_dim, 8192) for head_dim in (96, 192, 256) for kind in ("local64", "local256")),
    *(_row(kind, 192, 8192, value_head_dim=128) for kind in ("local64", "local256")),
)
"""Calls of the forward kernels that no call of `WORKLOADS` runs, for `benchmarks/tune.py`."""

TABLE = {w.name: w for w in (*WORKLOADS, *LENGTHS, *TUNING)}
"""All of them by name, in the order of the tables. Some are in two, and the same there."""

HEADLINE = ("causal_d128_s8192", "full_d128_s8192", "causal_d64_s8192", "local64_d128_s8192")
"""A quick run: `--cases headline`."""

TRAINING = (
    "full_d64_s8192",
    "full_d128_s8192",
    "causal_d64_s8192",
    "causal_d128_s8192",
    "causal_d128_s2048",
    "causal_gqa8_d128_s8192",
    "local256_d64_s8192",
    "local256_d128_s8192",
    "local1024_d128_s8192",
    "causal_d256_s8192",
)
"""What is timed forward and backward: `--cases training`."""


def select(names: str) -> tuple[Workload, ...]:
    """Returns workloads by name, in the order of the tables.

    Args:
      names: "all", "headline", "training", "lengths", or names separated by commas.

    Raises:
      ValueError: A name is in no table.
    """
    groups = {
        "all": [w.name for w in WORKLOADS],
        "headline": HEADLINE,
        "training": TRAINING,
        "lengths": [w.name for w in LENGTHS],
    }
    wanted = groups.get(names) or names.split(",")
    if unknown := [name for name in wanted if name not in TABLE]:
        raise ValueError(
            f"must be {', '.join(groups)}, or some of {', '.join(TABLE)}; got {', '.join(unknown)!r}"
        )
    return tuple(w for name, w in TABLE.items() if name in wanted)


def shrink(w: Workload, factor: int) -> Workload:
    """The same kind of call with batch and length divided by `factor`, but at least 1 and 16.

    For trying the benchmark itself, where there is no fast GPU.
    """
    if factor == 1:
        return w
    return dataclasses.replace(w, batch=max(1, w.batch // factor), length=max(16, w.length // factor))
