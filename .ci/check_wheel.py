"""What an installed wheel must do by itself: no kernel compiler, no GPU, no driver, no checkout."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import warnings

for absent in ("cutlass", "cuda", "torch", "pytest"):
    assert importlib.util.find_spec(absent) is None, f"this environment has {absent}"

import jax_r2p  # noqa: E402 - after the check of the environment

assert "jax" not in sys.modules, "import jax_r2p imports jax"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jax_r2p import _ffi  # noqa: E402
from jax_r2p._manifest import load_manifest, read_cubin  # noqa: E402

installed = pathlib.Path(jax_r2p.__file__).parent
assert installed.parent.name == "site-packages", installed
print("jax", jax.__version__, "in", installed.parent)

# Every cubin is the one that the manifest describes, and the library takes it.
variants = load_manifest().variants
for variant in variants:
    read_cubin(variant)
_ffi.register()
print(len(variants), "kernels")

# A call that a Hopper GPU would run.
array = jax.ShapeDtypeStruct((2, 300, 4, 64), jnp.bfloat16)
explanation = jax_r2p.explain(array, array, array, is_causal=True)
print(explanation)
assert explanation.variant == "fwd_bf16_d64_causal", explanation
assert explanation.implementation == "xla", explanation


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention."""
    return jax_r2p.attention(query, key, value, is_causal=True)


# It lowers for CUDA where there is no CUDA,
lowered = jax.jit(attend).trace(array, array, array).lower(lowering_platforms=("cuda",)).as_text()
assert _ffi.TARGET in lowered, lowered
assert "fwd_bf16_d64_causal" in lowered, lowered

# and runs on what there is, after a warning that it is not the kernel.
query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 300, 4, 64), jnp.float32).astype(jnp.bfloat16)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    out = np.asarray(attend(query, key, value), np.float32)
assert [warning.category for warning in caught] == [jax_r2p.FallbackWarning], caught
expected = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (query, key, value)), is_causal=True)
np.testing.assert_allclose(out, np.asarray(expected), atol=2e-2)
print("the reference agrees with jax.nn.dot_product_attention")
