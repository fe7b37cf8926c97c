"""`jax_r2p.dot_product_attention` against that of `jax.nn`: all that a caller changes is the module."""

from __future__ import annotations

import functools
import inspect
import warnings

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close
from pages import check_page

import jax_r2p
from jax_r2p import _dispatch, _ffi
from jax_r2p._dot_product_attention import Plan, plan

ours = jax_r2p.dot_product_attention
theirs = functools.partial(jax.nn.dot_product_attention, implementation="xla")
BF16, FP16, F32 = "bfloat16", "float16", "float32"

# On this machine calls for the kernel run as the reference, and say so.
pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")


def make(b=2, t=9, s=9, n=4, k=2, h=16, dtype=BF16, seed=0):
    """Query, key and value; without batch dimension for b = 0."""
    rng = np.random.default_rng(seed)
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h)]
    return [
        jnp.asarray(rng.standard_normal(shape if b else shape[1:], np.float32), dtype) for shape in shapes
    ]


def same(arrays, kernel=None, **keywords):
    """Compares out and residual with those of jax.nn in float32, to the rounding of the dtype."""
    dtype = arrays[0].dtype
    keywords["return_residual"] = True

    @jax.jit  # both in one program: compiling is what takes time here
    def compute(*arrays):
        exact = [x.astype(jnp.float32) for x in arrays]
        return ours(*arrays, **keywords), theirs(*exact, **keywords)

    (got, got_residual), (exact, exact_residual) = compute(*arrays)
    plain, plain_residual = jax.eval_shape(functools.partial(theirs, **keywords), *arrays)
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    assert (got_residual.shape, got_residual.dtype) == (plain_residual.shape, plain_residual.dtype)
    eps = float(jnp.finfo(dtype).eps)
    assert_close(got, exact, 4 * eps, name="out")
    hidden = np.asarray(exact_residual) < -1e38
    rounded = exact_residual.astype(dtype)
    np.testing.assert_array_equal(np.asarray(got_residual)[hidden], np.asarray(rounded)[hidden])
    both = (np.where(hidden, 0, np.asarray(x, np.float32)) for x in (got_residual, exact_residual))
    assert_close(*both, 8 * eps, name="residual")
    if kernel is not None:
        assert runs_kernel(arrays, **keywords) == kernel


def lower(function, *operands, platform="cuda"):
    # A new function each time: jit would remember what it lowered before.
    return jax.jit(lambda *x: function(*x)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def runs_kernel(arrays, **keywords) -> bool:
    return _ffi.TARGET in lower(functools.partial(ours, **keywords), *arrays)


def i32(*lengths: int):
    return jnp.array(lengths, jnp.int32)


def test_signature():
    """Names, order, kinds and defaults. Of the annotations `implementation` takes one more name."""
    mine, that = (inspect.signature(f).parameters for f in (ours, jax.nn.dot_product_attention))
    assert list(mine) == list(that)
    for name in that:
        assert (mine[name].kind, mine[name].default) == (that[name].kind, that[name].default), name


SAME = i32(3, 7)

# Shape, keywords, whether a Hopper GPU runs the kernel.
TABLE = {
    "plain": ({}, {}, True),
    "fp16": ({"dtype": FP16}, {}, True),
    "float32": ({"dtype": F32}, {}, False),
    "no batch": ({"b": 0}, {"is_causal": True}, True),
    "one head": ({"n": 1, "k": 1}, {}, True),
    "mha": ({"n": 2, "k": 2}, {}, True),
    "mqa": ({"n": 4, "k": 1}, {"is_causal": True}, True),
    "scale": ({}, {"scale": 0.7}, True),
    "negative scale": ({}, {"scale": -0.3}, True),
    "causal": ({}, {"is_causal": True}, True),
    "causal, T < S": ({"t": 4}, {"is_causal": True}, True),
    "causal, T > S": ({"s": 4}, {"is_causal": True}, True),
    "causal, one query": ({"t": 1}, {"is_causal": True}, True),
    "causal, one key": ({"s": 1}, {"is_causal": True}, True),
    "window": ({}, {"local_window_size": (3, 2)}, True),
    "window as int": ({}, {"local_window_size": 2}, True),
    "window as list": ({}, {"local_window_size": [1, 2]}, True),
    "window, T < S": ({"t": 4}, {"local_window_size": (2, 1)}, True),
    "window, T > S": ({"s": 7}, {"local_window_size": (3, 1)}, True),
    "window, rows see nothing": ({"t": 12, "s": 4}, {"local_window_size": (3, 1)}, True),
    "window, causal": ({}, {"local_window_size": (3, 2), "is_causal": True}, True),
    "window, causal, T < S": ({"t": 4}, {"local_window_size": (2, 2), "is_causal": True}, True),
    "window, causal, T > S": ({"s": 4}, {"local_window_size": (2, 2), "is_causal": True}, True),
    "window, all": ({"t": 4, "s": 7}, {"local_window_size": (3, 6)}, True),
    "window, negative": ({}, {"local_window_size": (-1, 3)}, False),
    "query lengths": ({}, {"query_seq_lengths": i32(3, 9)}, True),
    "query lengths, causal": ({}, {"query_seq_lengths": i32(3, 0), "is_causal": True}, True),
    "query lengths, causal, T < S": (
        {"t": 4},
        {"query_seq_lengths": i32(3, 20), "is_causal": True},
        True,
    ),
    "query lengths, window, rows see nothing": (
        {"t": 12, "s": 4},
        {"query_seq_lengths": i32(11, 2), "local_window_size": (3, 1)},
        True,
    ),
    "key lengths": ({}, {"key_value_seq_lengths": i32(3, 8)}, True),
    "key length 0": ({}, {"key_value_seq_lengths": i32(0, 5)}, True),
    "key length below 0": ({}, {"key_value_seq_lengths": i32(-2, 5)}, True),
    "key length above S": ({}, {"key_value_seq_lengths": i32(99, 5)}, True),
    "key lengths, decoding": ({"t": 1}, {"key_value_seq_lengths": i32(3, 8)}, True),
    "key lengths, causal": ({}, {"key_value_seq_lengths": i32(3, 8), "is_causal": True}, False),
    "key lengths, window": ({}, {"key_value_seq_lengths": i32(3, 8), "local_window_size": 2}, False),
    "both lengths": ({}, {"query_seq_lengths": i32(4, 9), "key_value_seq_lengths": i32(0, 5)}, True),
    "both lengths, causal": (
        {},
        {"query_seq_lengths": i32(4, 9), "key_value_seq_lengths": i32(2, 5), "is_causal": True},
        False,
    ),
    "same lengths, causal": (
        {},
        {"query_seq_lengths": SAME, "key_value_seq_lengths": SAME, "is_causal": True},
        True,
    ),
    "same lengths, window": (
        {},
        {"query_seq_lengths": SAME, "key_value_seq_lengths": SAME, "local_window_size": (2, 3)},
        True,
    ),
    "same lengths, causal, T < S": (
        {"t": 5},
        {"query_seq_lengths": SAME, "key_value_seq_lengths": SAME, "is_causal": True},
        True,
    ),
    "same lengths, causal, T > S": (
        {"s": 5},
        {"query_seq_lengths": SAME, "key_value_seq_lengths": SAME, "is_causal": True},
        False,
    ),
    "equal lists, causal": (
        {},
        {"query_seq_lengths": [3, 7], "key_value_seq_lengths": [3, 7], "is_causal": True},
        True,
    ),
    "bias": ({}, {"bias": jnp.ones((1, 4, 9, 9), BF16) * jnp.arange(9)}, False),
    "bias, causal": ({}, {"bias": jnp.ones((2, 1, 1, 9)) * jnp.arange(9), "is_causal": True}, False),
    "mask": ({}, {"mask": jnp.tril(jnp.ones((1, 1, 9, 9), bool), 2)}, False),
    "mask, nothing seen": ({}, {"mask": jnp.zeros((1, 1, 9, 9), bool)}, False),
    "mask of rank 3": ({}, {"mask": jnp.arange(9)[None, None] < 5}, False),
    "mask, lengths": (
        {},
        {"mask": jnp.tril(jnp.ones((1, 1, 9, 9), bool)), "key_value_seq_lengths": i32(3, 8)},
        False,
    ),
    "wide heads": ({"h": 264, "t": 3, "s": 3}, {}, False),
    "odd heads": ({"h": 20}, {"is_causal": True}, True),
}


@pytest.mark.parametrize("case", TABLE)
def test_values(case):
    shape, keywords, kernel = TABLE[case]
    same(make(**shape), kernel, **keywords)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_values_of_any_call(data):
    """All lengths, windows and lengths of sequences together."""
    t, s = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    side = st.integers(0, 7)
    some_lengths = st.none() | st.tuples(st.integers(-1, 8), st.integers(-1, 8))
    queries, keys = data.draw(some_lengths), data.draw(some_lengths)
    lengths = [x if x is None else i32(*x) for x in (queries, keys)]
    if queries is not None and data.draw(st.booleans()):
        lengths[1] = lengths[0]
    same(
        make(t=t, s=s, h=8, n=2, k=1),
        is_causal=data.draw(st.booleans()),
        local_window_size=data.draw(st.none() | st.tuples(side, side)),
        query_seq_lengths=lengths[0],
        key_value_seq_lengths=lengths[1],
    )


@pytest.mark.parametrize("left", [None, 0, 1, 2, 5])
@pytest.mark.parametrize("right", [None, 0, 1, 2, 5])
def test_plans_see_the_same_keys(left, right):
    """Element by element, for all small T and S and all lengths."""
    for t in range(1, 6):
        for s in range(1, 6):
            i, j = np.mgrid[:t, :s]
            want = np.full((t, s), True)
            want &= True if left is None else j >= i - left
            want &= True if right is None else j <= i + right
            for length in (None, *range(7)):
                call = plan(left, right, t, s, length is not None, length is not None, True)
                if isinstance(call, str):
                    assert length is not None, call
                    assert t != s
                    continue
                there = (i < (t if length is None else length)) & (j < (s if length is None else length))
                own_t = min(call.queries, t if length is None else length)
                own_s = min(call.keys, s if length is None else length)
                low, high = call.spec.bounds(own_t, own_s)
                got = (i < own_t) & (j < own_s)
                got &= True if low is None else j - i >= low
                got &= True if high is None else j - i <= high
                np.testing.assert_array_equal(got, want & there, err_msg=f"{t=} {s=} {length=} {call}")
                assert (call.spec.left or 0) >= 0
                assert (call.spec.right or 0) >= 0


def test_plan_gives_the_kernel_no_more_than_is_seen():
    assert plan(None, 0, 1, 4096, False, False, True) == Plan(
        spec=plan(None, 0, 1, 1, False, False, True).spec.__class__(right=0),
        queries=1,
        keys=1,
        query_lengths=False,
        key_lengths=False,
    )


# Transformations.

GRADS = {
    "plain": ({}, {}),
    "causal, T < S": ({"t": 4}, {"is_causal": True}),
    "rows see nothing": ({"t": 12, "s": 4}, {"local_window_size": (3, 1)}),
    "key length 0": ({}, {"key_value_seq_lengths": i32(0, 5), "query_seq_lengths": i32(6, 9)}),
    "bias": ({}, {"bias": jnp.ones((1, 1, 9, 9)) * jnp.arange(9)}),
}


@pytest.mark.parametrize("case", GRADS)
def test_gradients(case):
    shape, keywords = GRADS[case]
    arrays = make(**shape)
    cotangent = make(**shape, seed=1)[0].astype(jnp.float32)

    def loss(function, *arrays):
        out, residual = function(*arrays, return_residual=True, **keywords)
        return jnp.sum(out * cotangent) + jnp.where(residual < -1e30, 0, residual).astype(jnp.float32).sum()

    @jax.jit
    def compute(*arrays):
        exact = [x.astype(jnp.float32) for x in arrays]
        of_ours, of_theirs = (jax.grad(functools.partial(loss, f), (0, 1, 2)) for f in (ours, theirs))
        return of_ours(*arrays), of_theirs(*exact)

    got, want = compute(*arrays)
    for name, mine, that in zip("qkv", got, want, strict=True):
        assert mine.dtype == jnp.bfloat16
        assert_close(mine, that, 0.05, name=name)


def test_gradient_by_bias():
    arrays = make()
    bias = jnp.ones((1, 4, 9, 9)) * jnp.arange(9)
    got, want = (jax.grad(lambda bias, f=f: f(*arrays, bias).sum())(bias) for f in (ours, theirs))
    np.testing.assert_array_equal(got, want)


def test_vmap_and_jit():
    arrays = make(b=3)
    lengths = i32(2, 0, 9)

    def call(function, query, key, value, length):
        return function(query, key, value, key_value_seq_lengths=length[None])

    got = jax.jit(jax.vmap(functools.partial(call, ours)))(*arrays, lengths)
    want = theirs(*arrays, key_value_seq_lengths=lengths)
    assert_close(got, want, 0.03, name="out")
    mapped = jax.vmap(functools.partial(ours, is_causal=True), in_axes=(0, None, None))
    query = jnp.stack([arrays[0], -arrays[0]])
    want = theirs(-arrays[0], *arrays[1:], is_causal=True)
    assert_close(mapped(query, *arrays[1:])[1], want, 0.03, name="out")


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("name", ["query_seq_lengths", "key_value_seq_lengths"])
def test_sharded(name, explicit):
    """Batch over two devices, in `shard_map` and on an explicit mesh, with what is done beside the kernel."""
    window = {"local_window_size": (2, 1)} if name == "query_seq_lengths" else {}
    operands = [*make(t=9, s=5), i32(0, 4)]

    def call(query, key, value, lengths):
        return ours(query, key, value, return_residual=True, **{name: lengths}, **window)

    want = call(*operands)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("x",), (kind,), devices=jax.devices()[:2])
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        function = call if explicit else jax.shard_map(call, in_specs=spec, out_specs=spec)
        got = jax.jit(function)(*(jax.device_put(x, sharding) for x in operands))
    for mine, that in zip(got, want, strict=True):
        assert_close(mine, that, 0.01, name="result")
        assert mine.sharding.is_equivalent_to(sharding, mine.ndim)


def test_scale_and_lengths_may_be_traced():
    query, key, value = make()
    call = jax.jit(
        lambda scale, lengths: ours(
            query,
            key,
            value,
            scale=scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
        )
    )
    for scale, lengths in ((0.5, i32(3, 5)), (-1.0, i32(0, 9))):
        want = theirs(
            query,
            key,
            value,
            scale=scale,
            is_causal=True,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
        )
        assert_close(call(scale, lengths), want, 0.03, name="out")
    assert call._cache_size() == 1


def test_hidden_elements_have_no_influence():
    """Unlike in jax.nn, where a hidden NaN value makes the output NaN."""
    query, key, value = make()
    keywords = {"key_value_seq_lengths": i32(5, 6)}
    want = ours(query, key, value, **keywords)
    poisoned = [x.at[:, 6:].set(jnp.nan) for x in (key, value)]
    np.testing.assert_array_equal(ours(query, *poisoned, **keywords), want)


def test_numpy_arrays_and_mixed_ranks():
    query, key, value = make(b=1, dtype=F32)
    as_numpy = [np.asarray(x) for x in (query, key, value)]
    np.testing.assert_array_equal(ours(*as_numpy), theirs(*as_numpy))
    query, key, value = make(b=1)
    np.testing.assert_array_equal(ours(query[0], key, value)[None], ours(query, key, value))


@pytest.mark.parametrize("shape", [{"t": 0}, {"b": 2, "n": 0, "k": 1}], ids=str)
def test_nothing_to_compute(shape, recwarn):
    arrays = make(**shape)
    assert ours(*arrays, implementation="r2p").shape == theirs(*arrays).shape == arrays[0].shape
    assert not recwarn.list


# Which code runs, and what is said.


def test_only_a_program_for_cuda_names_the_kernel():
    arrays = make()
    assert _ffi.TARGET in lower(ours, *arrays)
    assert _ffi.TARGET not in lower(ours, *arrays, platform="cpu")
    assert _ffi.TARGET not in lower(functools.partial(ours, implementation="xla"), *arrays)


@pytest.mark.filterwarnings("default::jax_r2p.FallbackWarning")
def test_other_gpus_run_jax_nn(monkeypatch):
    """Not the reference, which is slower there."""
    monkeypatch.setattr(_dispatch, "cuda_capabilities", lambda: frozenset({(8, 0)}))
    arrays = make()
    with pytest.warns(jax_r2p.FallbackWarning, match=r"calls jax\.nn.*no kernel for compute capability 8\.0"):
        got = ours(*arrays)
    np.testing.assert_array_equal(got, theirs(*arrays))


def test_xla_and_cudnn_are_those_of_jax_nn():
    """Not executed: the program alone tells."""
    arrays = make()
    for name in ("xla", "cudnn"):
        mine, that = (
            functools.partial(f, implementation=name, is_causal=True)
            for f in (ours, jax.nn.dot_product_attention)
        )
        try:
            want = str(jax.make_jaxpr(that)(*arrays))
        except RuntimeError as error:  # no cuDNN here
            with pytest.raises(type(error)):
                jax.make_jaxpr(mine)(*arrays)
        else:
            assert str(jax.make_jaxpr(mine)(*arrays)) == want


REASONS = {
    "bias": ({}, {"bias": jnp.zeros((1, 1, 9, 9))}, "no kernel takes bias"),
    "mask": ({}, {"mask": jnp.ones((1, 1, 9, 9), bool)}, "no kernel takes mask"),
    "float32": ({"dtype": F32}, {}, "no kernel takes dtype float32; bfloat16 and float16 have one"),
    "wide": ({"h": 264, "t": 2, "s": 2}, {}, "no kernel takes head_dim=264"),
    "negative window": ({}, {"local_window_size": (-1, 2)}, r"no kernel takes local_window_size=\(-1, 2\)"),
    "traced window": ({}, {"local_window_size": (jnp.int32(1), 2)}, "no kernel takes local_window_size="),
    "causal as int": ({}, {"is_causal": 1}, "no kernel takes is_causal=1"),
    "scale": ({}, {"scale": jnp.ones(9)}, "no kernel takes a scale that is no scalar"),
    "key lengths": (
        {},
        {"is_causal": True, "key_value_seq_lengths": i32(1, 2)},
        "no kernel takes key_value_seq_lengths with is_causal or a window, unless",
    ),
    "same lengths": (
        {"s": 5},
        {"is_causal": True, "query_seq_lengths": SAME, "key_value_seq_lengths": SAME},
        "no kernel takes lengths, a window, T = 9 and S = 5 together",
    ),
}


@pytest.mark.filterwarnings("default::jax_r2p.FallbackWarning")
@pytest.mark.parametrize("case", REASONS)
def test_reasons(case):
    """Said once; an error where the kernel is demanded."""
    shape, keywords, reason = REASONS[case]
    arrays = make(**shape)
    expected = rf"^jax_r2p\.dot_product_attention calls jax\.nn\.dot_product_attention: {reason}"
    with pytest.warns(jax_r2p.FallbackWarning, match=expected):
        out = ours(*arrays, **keywords)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(ours(*arrays, **keywords), out)
        ours(*arrays, implementation="xla", **keywords)
    np.testing.assert_array_equal(theirs(*arrays, **keywords), out)
    with pytest.raises(NotImplementedError, match=f"implementation='r2p' was asked for, but {reason}"):
        ours(*arrays, implementation="r2p", **keywords)


@pytest.mark.filterwarnings("default::jax_r2p.FallbackWarning")
def test_another_platform_is_said_too():
    with pytest.warns(jax_r2p.FallbackWarning, match="this is for platform cpu"):
        ours(*make(h=24))
    with pytest.raises(NotImplementedError, match="this is for platform cpu"):
        ours(*make(), implementation="r2p")


X = jnp.zeros((2, 9, 4, 8), BF16)
REFUSED = {
    "rank": ((X, X, X[None]), {}),
    "key width": ((X, X[..., :4], X[..., :4]), {}),
    "value width": ((X, X, X[..., :4]), {}),
    "batch": ((X, X[:1], X[:1]), {}),
    "heads": ((X, X[:, :, :3], X[:, :, :3]), {}),
    "dtypes": ((X, X.astype(F32), X.astype(F32)), {}),
    "value dtype": ((X, X, X.astype(F32)), {}),
    "float mask": ((X, X, X), {"mask": jnp.zeros((1, 1, 9, 9))}),
    "rank of mask": ((X, X, X), {"mask": jnp.zeros((1, 1, 1, 9, 9), bool)}),
    "rank of bias": ((X, X, X), {"bias": jnp.zeros((1, 1, 1, 9, 9))}),
    "lengths as float": ((X, X, X), {"query_seq_lengths": jnp.ones(2)}),
    "shape of lengths": ((X, X, X), {"key_value_seq_lengths": i32(1, 2, 3)}),
    "three windows": ((X, X, X), {"local_window_size": (1, 2, 3)}),
}


@pytest.mark.parametrize("implementation", [None, "r2p"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_jax_refuses_is_refused_alike(case, implementation, recwarn):
    arrays, keywords = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as that:
        theirs(*arrays, **keywords)
    with pytest.raises(type(that.value)) as mine:
        ours(*arrays, implementation=implementation, **keywords)
    assert str(mine.value) == str(that.value)
    assert not recwarn.list


@pytest.mark.parametrize("name", ["flash", 1, "R2P"])
def test_unknown_implementation(name):
    with pytest.raises(ValueError, match=r"implementation must be one of .*'xla', 'cudnn', 'r2p'"):
        ours(X, X, X, implementation=name)


def test_traced_causal_is_refused():
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda flag: ours(X, X, X, is_causal=flag))(True)


def test_code_of_the_documentation(tmp_path):
    check_page("drop-in.md", tmp_path)
