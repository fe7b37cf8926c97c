"""What a caller asked for: which keys a query may see.

Letters used in the whole package: B batch, T query length, S key length, N query heads, K key and value
heads, G = N // K query heads of one key head, H elements of a query or key head, Hv of a value or out head.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

MaskKind = Literal["none", "causal", "window"]

UNBOUNDED = 1 << 29
"""How a kernel is told that a side has no bound, and the greatest T and S it takes: sums of a row, a key and
a bound then stay within 32 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static part of a call; it travels through the primitive as its parameter.

    Key j is visible to query i when `i + o - left <= j <= i + o + right`, with the offset `o = S - T`, which
    aligns the last query with the last key. Both ends are inclusive. Where the sequences of a batch have
    lengths of their own, those stand for T and S.

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

    def span(self, queries: int, keys: int) -> int:
        """Most keys that a query can see at these lengths."""
        left = keys if self.left is None else self.left
        right = queries if self.right is None else self.right
        return min(left + right + 1, keys)

    def bounds(self, queries: Any, keys: Any) -> tuple[Any | None, Any | None]:
        """Returns (low, high): query i sees key j when `low <= j - i <= high`. None bounds nothing.

        `queries` and `keys` are integers, or arrays of the lengths of sequences, as then are the results.
        """
        offset = keys - queries
        low = None if self.left is None else offset - self.left
        high = None if self.right is None else offset + self.right
        return low, high

    def empties_rows(self, queries: int, keys: int) -> bool:
        """Whether some query sees no key at these lengths. A left bound alone always leaves the last key."""
        if not keys:
            return True
        return self.right is not None and queries > keys + self.right

    def effective(self, queries: int, keys: int) -> AttentionSpec:
        """Returns the spec without the bounds that hide no key at these lengths.

        It masks the same elements, often with a cheaper mask kind: a single causal query, for example, sees
        every key. It also does so for sequences of t <= T queries and s <= S keys.
        """
        # The last query, t - 1, loses keys to the left bound first: key 0 if (t - 1) + s - t - left > 0, that
        # is if left < s - 1, whatever t is. The first query loses keys to the right bound first: key s - 1 if
        # s - t + right < s - 1, that is if right < t - 1, whatever s is. So a bound that hides nothing at the
        # full lengths hides nothing at smaller ones.
        left_binds = self.left is not None and self.left < keys - 1
        right_binds = self.right is not None and self.right < queries - 1
        return AttentionSpec(
            left=self.left if left_binds else None, right=self.right if right_binds else None
        )
