"""What all tests share: eight CPU devices, set before jax is imported, so that sharding can be tested."""

from __future__ import annotations

import os

import pytest

DEVICES = 8
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
)


@pytest.fixture(autouse=True)
def _compile_quickly(request):
    """Halves the time of tests whose programs run once; not where a GPU's program is what is tested."""
    import jax

    on_gpu = request.node.get_closest_marker("gpu") is not None
    jax.config.update("jax_disable_most_optimizations", not on_gpu)


@pytest.fixture(autouse=True)
def _forget_warnings():
    """Lets each test see the warnings that are given once in a process."""
    from jax_r2p import _dispatch

    _dispatch.warn_fallback.cache_clear()
