"""Everything in this folder runs the compiled kernel, so it needs a Hopper GPU (compute capability 9.0).

One H200 finishes the folder in about a minute: `pytest -m gpu -n 12 tests/gpu`. Workers share the GPU, hence
no preallocation. Where there is no such GPU every test is skipped with the reason.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.resolve().parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def hopper():
    """The GPU all tests here use; skips them where there is none."""
    import jax

    try:
        devices = jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"no GPU: {str(error).splitlines()[0]}")
    capability = str(getattr(devices[0], "compute_capability", "unknown"))
    if capability != "9.0":
        pytest.skip(f"needs compute capability 9.0, {devices[0].device_kind} has {capability}")
    return devices[0]
