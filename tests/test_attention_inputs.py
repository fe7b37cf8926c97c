"""What the public functions refuse, with the message that a caller gets; and the odd things they take."""

from __future__ import annotations

import fractions
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close

import jax_r2p

attention = functools.partial(jax_r2p.attention, implementation="xla")


def struct(*shape: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


QUERY, KEY = struct(2, 5, 4, 8), struct(2, 7, 2, 8)


def call(function, query=QUERY, key=KEY, value=None, **keywords):
    """Calls with arrays of these shapes, or with whatever is no struct; the value defaults to the key."""
    value = key if value is None else value
    arrays = [
        jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for x in (query, key, value)
    ]
    return function(*arrays, **keywords)


FUNCTIONS = pytest.mark.parametrize(
    "function", [jax_r2p.attention, jax_r2p.explain], ids=["attention", "explain"]
)


@FUNCTIONS
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"query": struct(4, 8)}, r"query must have the dimensions \(\.\.\., T, N, H\), got shape \(4, 8\)"),
        ({"query": struct()}, r"query must have the dimensions .*, got shape \(\)"),
        ({"key": struct(7, 2, 8)}, r"key must have as many dimensions as query, 4; got shape \(7, 2, 8\)"),
        ({"key": struct(1, 7, 2, 8)}, r"key must have the batch dimensions of query, \(2,\); got \(1,\)"),
        (
            {"value": struct(2, 6, 2, 8)},
            r"value must have the shape of key but for the last .*, \(2, 7, 2, 8\); got \(2, 6, 2, 8\)",
        ),
        ({"value": struct(2, 7, 1, 16)}, r"value must have the shape of key .*; got \(2, 7, 1, 16\)"),
        ({"value": struct(7, 2, 8)}, r"value must have the shape of key"),
        (
            {"value": struct(2, 7, 2, 0)},
            r"last dimension of value must be at least 1, got shape \(2, 7, 2, 0\)",
        ),
        ({"key": struct(2, 7, 2, 16)}, r"key must have the head_dim=8 of query, got 16"),
        ({"query": struct(2, 5, 4, 0), "key": struct(2, 7, 2, 0)}, r"head_dim=0 of query must be at least 1"),
        ({"key": struct(2, 7, 3, 8)}, r"must be a multiple of key's; got heads=4 and kv_heads=3"),
        ({"key": struct(2, 7, 8, 8)}, r"must be a multiple of key's; got heads=4 and kv_heads=8"),
        ({"key": struct(2, 7, 0, 8)}, r"must be a multiple of key's; got heads=4 and kv_heads=0"),
    ],
)
def test_wrong_shapes(function, arrays, message):
    with pytest.raises(ValueError, match=message):
        call(function, **arrays)


@FUNCTIONS
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"query": [[[0.0] * 8] * 4]}, "query must be an array.*, got list"),
        ({"key": 1.0}, "key must be an array.*, got float"),
        ({"value": "abc"}, "value must be an array.*, got str"),
        ({"query": struct(2, 5, 4, 8, dtype="int32")}, "query must have a dtype out of .*; got int32"),
        ({"key": struct(2, 7, 2, 8, dtype="bool")}, "key must have a dtype out of .*; got bool"),
        (
            {"key": struct(2, 7, 2, 8, dtype="float8_e4m3fn")},
            "key must have a dtype out of .*; got float8_e4m3fn",
        ),
        (
            {"value": struct(2, 7, 2, 8, dtype="complex64")},
            "value must have a dtype out of .*; got complex64",
        ),
        (
            {"key": struct(2, 7, 2, 8, dtype="bfloat16")},
            "key must have the dtype of query, float32; got bfloat16",
        ),
        (
            {"value": struct(2, 7, 2, 8, dtype="float16")},
            "value must have the dtype of query, float32; got float16",
        ),
    ],
)
def test_wrong_dtypes(function, arrays, message):
    with pytest.raises(TypeError, match=message):
        call(function, **arrays)


@FUNCTIONS
@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
        ({"is_causal": None}, TypeError, "is_causal must be a bool, got None"),
        ({"return_residual": "yes"}, TypeError, "return_residual must be a bool, got 'yes'"),
        ({"local_window_size": -1}, ValueError, "local_window_size must not be negative, got -1"),
        (
            {"local_window_size": (3, -1)},
            ValueError,
            r"local_window_size must not be negative, got \(3, -1\)",
        ),
        (
            {"local_window_size": True},
            TypeError,
            "local_window_size must be None, an int or two ints .*; got True",
        ),
        ({"local_window_size": (1, False)}, TypeError, r"local_window_size must be .*; got \(1, False\)"),
        ({"local_window_size": 2.0}, TypeError, r"local_window_size must be .*; got 2\.0"),
        ({"local_window_size": (1, None)}, TypeError, r"local_window_size must be .*; got \(1, None\)"),
        ({"local_window_size": (1, 2, 3)}, TypeError, r"local_window_size must be .*; got \(1, 2, 3\)"),
        ({"scale": "1"}, TypeError, "scale must be a real number, got '1'"),
        ({"scale": True}, TypeError, "scale must be a real number, got True"),
        ({"scale": 1j}, TypeError, "scale must be a real number, got 1j"),
        ({"scale": np.True_}, TypeError, "scale must be a real number, got .*True"),
        ({"scale": jnp.complex64(1)}, TypeError, "scale must be a real number"),
        ({"scale": np.ones(1)}, ValueError, r"scale must be a scalar, got shape \(1,\)"),
        ({"scale": jnp.ones((2, 3))}, ValueError, r"scale must be a scalar, got shape \(2, 3\)"),
        (
            {"query_seq_lengths": jnp.ones(2)},
            TypeError,
            "^query_seq_lengths must have dtype int32, got float32",
        ),
        (
            {"query_seq_lengths": jnp.ones(2, jnp.int16)},
            TypeError,
            "^query_seq_lengths must have dtype int32, got int16",
        ),
        (
            {"query_seq_lengths": np.ones(2, np.uint32)},
            TypeError,
            "^query_seq_lengths must have dtype int32, got uint32",
        ),
        (
            {"query_seq_lengths": [True, False]},
            TypeError,
            "^query_seq_lengths must have dtype int32, got bool",
        ),
        (
            {"query_seq_lengths": "ab"},
            TypeError,
            "^query_seq_lengths must be None or an int32 array, got str",
        ),
        (
            {"query_seq_lengths": jnp.ones((2, 1), jnp.int32)},
            ValueError,
            r"^query_seq_lengths must have the batch dimensions of query, \(2,\); got shape \(2, 1\)",
        ),
        (
            {"query_seq_lengths": jnp.ones(3, jnp.int32)},
            ValueError,
            r"^query_seq_lengths must have .*; got shape \(3,\)",
        ),
        ({"query_seq_lengths": 3}, ValueError, r"^query_seq_lengths must have .*; got shape \(\)"),
        (
            {"key_value_seq_lengths": jnp.ones(2)},
            TypeError,
            "^key_value_seq_lengths must have dtype int32, got float32",
        ),
        (
            {"key_value_seq_lengths": jnp.ones(2, jnp.int16)},
            TypeError,
            "^key_value_seq_lengths must have dtype int32, got int16",
        ),
        (
            {"key_value_seq_lengths": np.ones(2, np.uint32)},
            TypeError,
            "^key_value_seq_lengths must have dtype int32, got uint32",
        ),
        (
            {"key_value_seq_lengths": [True, False]},
            TypeError,
            "^key_value_seq_lengths must have dtype int32, got bool",
        ),
        (
            {"key_value_seq_lengths": "ab"},
            TypeError,
            "^key_value_seq_lengths must be None or an int32 array, got str",
        ),
        (
            {"key_value_seq_lengths": jnp.ones((2, 1), jnp.int32)},
            ValueError,
            r"^key_value_seq_lengths must have the batch dimensions of query, \(2,\); got shape \(2, 1\)",
        ),
        (
            {"key_value_seq_lengths": jnp.ones(3, jnp.int32)},
            ValueError,
            r"^key_value_seq_lengths must have .*; got shape \(3,\)",
        ),
        ({"key_value_seq_lengths": 3}, ValueError, r"^key_value_seq_lengths must have .*; got shape \(\)"),
        (
            {"implementation": "cudnn"},
            ValueError,
            r"implementation must be one of .*'r2p', 'xla'\), got 'cudnn'",
        ),
        ({"implementation": 1}, ValueError, "implementation must be one of .*, got 1"),
    ],
)
def test_wrong_keywords(function, keywords, error, message):
    with pytest.raises(error, match=message):
        call(function, **keywords)


@pytest.mark.parametrize("name", ["is_causal", "return_residual"])
def test_traced_flags_are_refused(name):
    with pytest.raises(
        TypeError, match=rf"{name} must be a bool known when tracing.* static argument of jit"
    ):
        jax.jit(lambda flag: call(attention, **{name: flag}))(True)


def test_traced_window_is_refused():
    with pytest.raises(TypeError, match=r"local_window_size must be .* known when tracing"):
        jax.jit(lambda size: call(attention, local_window_size=size))(3)


def test_structs_are_for_explain_only():
    with pytest.raises(TypeError, match="query must be an array, got ShapeDtypeStruct"):
        jax_r2p.attention(QUERY, KEY, KEY)
    with pytest.raises(TypeError, match=r"query_seq_lengths must be None or .* got ShapeDtypeStruct"):
        call(jax_r2p.attention, query_seq_lengths=struct(2, dtype="int32"))


@pytest.mark.parametrize("lengths", [[3, 5], (3, 5), np.array([3, 5])], ids=lambda x: type(x).__name__)
def test_kinds_of_lengths(arrays, lengths):
    """Whatever becomes an int32 array, as in jax.nn; 64-bit integers do unless jax_enable_x64 is set."""
    want = attention(*arrays, key_value_seq_lengths=jnp.array([3, 5], jnp.int32))
    np.testing.assert_array_equal(attention(*arrays, key_value_seq_lengths=lengths), want)
    with jax.enable_x64(True), pytest.raises(TypeError, match="must have dtype int32, got int64"):
        attention(*arrays, key_value_seq_lengths=lengths)


def test_length_of_one_sequence(arrays):
    single = [x[0] for x in arrays]
    want = attention(*single, query_seq_lengths=jnp.int32(3))
    np.testing.assert_array_equal(attention(*single, query_seq_lengths=3), want)


@pytest.mark.parametrize("args", [(True,), (True, None), (None, 0.5)], ids=str)
def test_options_are_keywords(args):
    with pytest.raises(TypeError, match="positional argument"):
        jax_r2p.attention(*(jnp.zeros(x.shape) for x in (QUERY, KEY, KEY)), *args)


# What is taken.


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(x.shape, np.float32) for x in (QUERY, KEY, KEY)]


def test_numpy_arrays(arrays):
    out = attention(*arrays)
    assert isinstance(out, jax.Array)
    np.testing.assert_array_equal(out, attention(*map(jnp.asarray, arrays)))


def test_float64_is_float32_unless_enabled(arrays):
    out = attention(*(x.astype(np.float64) for x in arrays))
    assert out.dtype == jnp.float32
    with jax.enable_x64(True):
        assert attention(*(x.astype(np.float64) for x in arrays)).dtype == jnp.float64


def test_objects_that_stand_for_arrays(arrays):
    class Parameter:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return jnp.asarray(self.x)

    np.testing.assert_array_equal(attention(*map(Parameter, arrays)), attention(*arrays))


@pytest.mark.parametrize(
    "scale",
    [
        0.5,
        np.float32(0.5),
        np.float64(0.5),
        np.array(0.5),
        jnp.float32(0.5),
        jnp.bfloat16(0.5),
        fractions.Fraction(1, 2),
    ],
    ids=lambda x: type(x).__name__,
)
def test_kinds_of_scale(arrays, scale):
    np.testing.assert_array_equal(attention(*arrays, scale=scale), attention(*arrays, scale=0.5))


@pytest.mark.parametrize("scale", [2, np.int32(2), jnp.int32(2)], ids=lambda x: type(x).__name__)
def test_integer_scale(arrays, scale):
    np.testing.assert_array_equal(attention(*arrays, scale=scale), attention(*arrays, scale=2.0))


def test_default_scale(arrays):
    np.testing.assert_array_equal(attention(*arrays), attention(*arrays, scale=8**-0.5))


@pytest.mark.parametrize(
    ("size", "same"),
    [(3, (3, 3)), ([1, 2], (1, 2)), (np.int64(2), (2, 2)), ((np.int32(1), 0), (1, 0))],
    ids=str,
)
def test_kinds_of_window(arrays, size, same):
    np.testing.assert_array_equal(
        attention(*arrays, local_window_size=size), attention(*arrays, local_window_size=same)
    )


def test_causal_cuts_the_right_side_of_a_window(arrays):
    both = attention(*arrays, local_window_size=(3, 5), is_causal=np.True_)
    np.testing.assert_array_equal(both, attention(*arrays, local_window_size=(3, 0)))
    assert not np.array_equal(both, attention(*arrays, local_window_size=(3, 5)))


def test_residual_is_ordered_as_the_query(arrays):
    out, residual = attention(*arrays, return_residual=True)
    query, key, value = arrays
    assert residual.shape == query.shape[:-1]
    for head in range(4):
        one = [query[:, :, head : head + 1], *(x[:, :, head // 2 : head // 2 + 1] for x in (key, value))]
        want_out, want_residual = attention(*one, return_residual=True)
        assert_close(out[:, :, head], want_out[:, :, 0], 1e-6, name="out")
        assert_close(residual[:, :, head], want_residual[:, :, 0], 1e-6, name="residual")
