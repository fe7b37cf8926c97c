"""Broadcasting and mixed dtypes in this package are meant, whatever the caller has JAX say about them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def promoting(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Returns `function` with `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion` as JAX has them.

    They are flags for finding mistakes in the caller's code. Set to "raise" and "strict", they would refuse
    ours.
    """

    @functools.wraps(function)
    def allowed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return allowed
