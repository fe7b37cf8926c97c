"""Run JAX's own tests of `dot_product_attention` against the one of this package.

    python tools/run_jax_tests.py JAX/tests/nn_test.py      JAX: a checkout of the installed version of JAX

Needs pytest, absl-py and scipy. Tests that ask for cuDNN are skipped where there is no GPU, by JAX's file
itself. Prints pytest's lines and exits with its status.
"""

import argparse
import sys
import warnings
from pathlib import Path

import jax
import pytest

import jax_r2p


class Replace:
    """Puts the function in the place of JAX's, and counts its calls."""

    calls = 0

    def pytest_configure(self) -> None:
        """Before any test module is imported."""

        original = jax.nn.dot_product_attention
        inside = False

        def replacement(*args, **kwargs):
            nonlocal inside
            if inside:  # what the package itself leaves to JAX
                return original(*args, **kwargs)
            self.calls += 1
            inside = True
            try:
                with warnings.catch_warnings():  # JAX's tests make errors of them
                    warnings.simplefilter("ignore", jax_r2p.FallbackWarning)
                    return jax_r2p.dot_product_attention(*args, **kwargs)
            finally:
                inside = False

        jax.nn.dot_product_attention = replacement


def main() -> int:
    """Runs the tests; fails also if none of them called the function."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="tests/nn_test.py of JAX")
    options = parser.parse_args()
    if not options.file.is_file():
        parser.error(f"file must be JAX's tests/nn_test.py, got {options.file}, which is not there")
    plugin = Replace()
    status = pytest.main(
        [
            *("-q", "-rf", "--tb=short", "-p", "no:cacheprovider"),
            *("-c", "/dev/null", "--rootdir", str(options.file.parent)),
            *("-W", "ignore::jax_r2p.FallbackWarning", "-k", "DotProductAttention"),
            str(options.file),
        ],
        plugins=[plugin],
    )
    print(f"jax {jax.__version__}: jax_r2p.dot_product_attention was called {plugin.calls} times")
    return status if plugin.calls else status or 1


if __name__ == "__main__":
    sys.exit(main())
