"""What a caller asked for: which keys a query may see.

Letters used in the whole package: B batch, T query length, S key length, N query heads, K key and value
heads, G = N // K query heads of one key head, H elements of a query or key head, Hv of a value or out head.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

MaskKind = Literal["none", "causal", "window"]

UNBOUNDED = 1 << 29
"""How a kernel is told that a side has no bound, and the greatest T and S it takes: sums of a row, a key and
a bound then stay within 32 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static part of a call; it travels through the primitive as its parameter.

    Key j is visible to query i when `i + o - left <= j <= i + o + right`, with the offset `o = S - T`, which
    aligns the last query with the last key. Both ends are inclusive.

    Attributes:
      left: Keys visible before the diagonal, at least 0; None for all of them.
      right: Keys visible after the diagonal, at least 0; None for all of them.
    """

    left: int | None = None
    right: int | None = None

    @property
    def mask_kind(self) -> MaskKind:
        """The least general mask that expresses this spec."""
        if self.left is None and self.right is None:
            return "none"
        if self.left is None and self.right == 0:
            return "causal"
        return "window"

    def bounds(self, queries: int, keys: int) -> tuple[int | None, int | None]:
        """Returns (low, high): query i sees key j when `low <= j - i <= high`. None bounds nothing."""
        offset = keys - queries
        low = None if self.left is None else offset - self.left
        high = None if self.right is None else offset + self.right
        return low, high

    def effective(self, queries: int, keys: int) -> AttentionSpec:
        """Returns the spec without the bounds that hide no key at these lengths.

        It masks the same elements, often with a cheaper mask kind: a single causal query, for example, sees
        every key.
        """
        # The last query loses keys to the left bound first, the first query to the right one.
        left_binds = self.left is not None and self.left < keys - 1
        right_binds = self.right is not None and self.right < queries - 1
        return AttentionSpec(
            left=self.left if left_binds else None, right=self.right if right_binds else None
        )
