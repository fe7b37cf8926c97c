"""Named attention calls for tests: small, but each with something that breaks naive code."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """query (B, T, N, H), key (B, S, K, H), value (B, S, K, Hv), and a mask: `window` is `local_window_size`.

    Hv None is H.
    """

    id: str
    B: int = 2
    T: int
    S: int
    N: int = 4
    K: int = 2
    H: int = 16
    Hv: int | None = None
    causal: bool = False
    window: tuple[int, int] | None = None
    dtype: str = "float32"

    @property
    def mask(self) -> dict[str, Any]:
        """The arguments of `attention` that say which keys are visible."""
        return {"is_causal": self.causal, "local_window_size": self.window}

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of query, key and value."""
        query, key = (self.B, self.T, self.N, self.H), (self.B, self.S, self.K, self.H)
        value = (*key[:-1], self.H if self.Hv is None else self.Hv)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype)) for shape in (query, key, value))

    def arrays(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Standard normal query, key and value; equal seeds, equal arrays."""
        rng = np.random.default_rng(seed)  # jax.random would compile a program for each shape
        return tuple(jnp.asarray(rng.standard_normal(x.shape).astype(x.dtype)) for x in self.structs)

    def replace(self, **changes: Any) -> Case:
        return dataclasses.replace(self, **changes)


CASES = (
    # Head layouts.
    Case(id="mha", T=9, S=9, N=3, K=3),
    Case(id="gqa", T=9, S=9, N=6, K=2),
    Case(id="mqa", T=9, S=9, N=4, K=1),
    # More keys than queries and the other way round: masks are aligned with the last key.
    Case(id="causal", T=9, S=9, causal=True),
    Case(id="causal-decode", T=1, S=12, causal=True),
    Case(id="causal-few-queries", T=5, S=12, causal=True),
    Case(id="causal-few-keys", T=12, S=5, causal=True),  # the first seven queries see nothing
    # Windows: narrow, lopsided, together with causal, wider than everything.
    Case(id="window-left", T=11, S=11, window=(3, 0)),
    Case(id="window-right", T=11, S=11, window=(0, 3)),
    Case(id="window-both", T=7, S=13, window=(2, 4)),
    Case(id="window-self", T=11, S=11, window=(0, 0)),
    Case(id="window-causal", T=11, S=13, window=(3, 5), causal=True),
    Case(id="window-few-keys", T=13, S=4, window=(1, 2)),
    Case(id="window-all", T=11, S=7, window=(200, 200)),
    # Head dims that are no power of two, and the 16-bit types.
    Case(id="head-dim-24", T=9, S=9, H=24, causal=True),
    # Values wider and narrower than keys, and odd widths.
    Case(id="wide-values", T=9, S=7, H=8, Hv=20, causal=True),
    Case(id="narrow-values", T=9, S=11, H=24, Hv=5, window=(4, 2)),
    Case(id="bf16", T=33, S=40, H=24, causal=True, dtype="bfloat16"),
    Case(id="fp16", T=33, S=40, H=24, window=(7, 2), dtype="float16"),
)


def ids(case: Case) -> str:
    """For `pytest.mark.parametrize(..., ids=ids)`."""
    return case.id
