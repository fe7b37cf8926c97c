"""Derivatives beyond the first backward pass, on top of the kernels: against those of the reference.

JAX differentiates the reference itself, in float32 with the same inputs. Forward mode and second derivatives
are plain XLA (docs/derivatives.md), from the kernels' results. What they may be off by is the tolerance of
`test_half_precision` on CPU, which is that of rounding out, its cotangent and the results to the dtype; twice
that, since the kernels round weights and their cotangents, too; and as much again for each further derivative
that starts from a rounded one, and for the square of one. Plain XLA without kernels stays below a sixth of
it, and with normal noise of 2^-8 (fp16: 2^-11) of a row on out and the kernels' gradients below a half. What
a missing term costs is of the size of the result.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Call
from numerics import FLOOR, assert_close

import jax_r2p
from jax_r2p import _ffi

TOLERANCE = {"bfloat16": 2**-5, "float16": 2**-8}
"""Times the largest element of what is expected, for first derivatives."""

CALLS = {
    "causal": Call(t=200, b=2, n=4, k=2, h=64, is_causal=True),
    "window": Call(t=200, s=230, n=4, k=2, h=64, dtype="float16", window=(60, 11)),
}
ARRAYS = (0, 1, 2)


def results(query, key, value, scale, *, call: Call, implementation: str):
    keywords = call.keywords() | {"scale": scale}
    return jax_r2p.attention(
        query, key, value, **keywords, return_residual=True, implementation=implementation
    )


def losses(*operands, **options):
    """One of out alone, and one of the residual alone."""
    out, residual = results(*operands, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.float32))), jnp.sum(jnp.cos(residual))


def each(derive):
    """A derivative of each of the two losses, in one program."""

    def function(operands, directions, **options):
        return [
            derive(lambda *x, index=index: losses(*x, **options)[index])(operands, directions)
            for index in range(2)
        ]

    return function


def jvp(operands, directions, **options):
    return jax.jvp(functools.partial(results, **options), operands, directions)


def linearize(operands, directions, **options):
    values, linear = jax.linearize(functools.partial(results, **options), *operands)
    return values, linear(*directions)


def jvp_of_grad(loss):
    """By the arrays, along these and scale."""
    return lambda operands, directions: jax.jvp(jax.grad(loss, ARRAYS), operands, directions)


def grad_of_grad(loss):
    def of_gradient(*operands):
        return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.grad(loss, ARRAYS)(*operands))

    return lambda operands, directions: jax.grad(of_gradient, ARRAYS)(*operands)


def hvp(loss):
    """Hessian times vector, by the gradient of gradient times vector."""

    def along(operands, directions):
        gradient = jax.grad(loss, ARRAYS)(*operands)
        pairs = zip(gradient, directions[:3], strict=True)
        return sum(jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32)) for x, y in pairs)

    return lambda operands, directions: jax.grad(along)(operands, directions)[:3]


def grad_of_shared_keys(loss):
    """Of three queries, each with gradients of its own by the keys and values that they share."""

    def function(operands, directions):
        query, *rest = operands
        queries = jnp.stack([query, directions[0], -query])
        return jax.vmap(jax.grad(loss, ARRAYS), (0, None, None, None))(queries, *rest)

    return function


# Each with the kernels that its results need, and with its share of the tolerance.
DERIVATIVES = {
    "jvp": (jvp, [_ffi.TARGET], 1),
    "linearize": (linearize, [_ffi.TARGET], 1),
    "jvp of grad": (each(jvp_of_grad), [_ffi.TARGET, _ffi.BACKWARD_TARGET], 2),
    "grad of grad": (each(grad_of_grad), [_ffi.TARGET, _ffi.BACKWARD_TARGET], 4),
    "hvp": (each(hvp), [_ffi.TARGET], 2),
    "vmap of grad": (each(grad_of_shared_keys), [_ffi.TARGET, _ffi.BACKWARD_TARGET], 1),
}


def compile_and_run(function, *arguments) -> tuple:
    """What it gives, and the text of its program; products are not tuned, which takes longer than they do."""
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    on_gpu = jax.default_backend() == "gpu"
    program = jax.jit(function, compiler_options=options if on_gpu else None).lower(*arguments).compile()
    return jax.tree.map(np.asarray, program(*arguments)), program.as_text()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives(derivative, name):
    call = CALLS[name]
    function, targets, factor = DERIVATIVES[derivative]
    p, q = call.problem(), Call(**{**call.__dict__, "seed": 1}).problem()
    operands = (*map(jnp.asarray, (p.query, p.key, p.value)), jnp.float32(0.125))
    directions = (*map(jnp.asarray, (q.query, q.key, q.value)), jnp.float32(0.1))
    exact = [[*(x.astype(jnp.float32) for x in xs[:3]), xs[3]] for xs in (operands, directions)]

    kernels = functools.partial(function, call=call, implementation="r2p")
    reference = functools.partial(function, call=call, implementation="xla")
    got, text = compile_and_run(kernels, operands, directions)
    want, _ = compile_and_run(reference, *map(tuple, exact))
    for target in targets:
        assert f'custom_call_target="{target}"' in text, f"{target} is not called"
    tolerance = factor * TOLERANCE[call.dtype]
    for number, (x, y) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)):
        allowed = tolerance * float(np.abs(y).max()) + FLOOR
        assert_close(x, y, allowed, name=f"{derivative}, {call}: result {number}")
