"""Programs in files, run by a fresh process that has done nothing but `import jax_r2p` and `register`."""

from __future__ import annotations

import exported
import jax
import numpy as np
import pytest
from exported import PROGRAMS, cotangent
from processes import start

pytest.importorskip("flatbuffers", reason="jax.export writes and reads files with flatbuffers")


@pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("written", ["now", "before"])
def test_file_runs_kernels(name, written, tmp_path):
    """Results and gradients are those of plain XLA, and the kernels were launched."""
    if name == "sharded" and len(jax.devices()) < 4:
        pytest.skip("needs four GPUs")
    file = exported.file(name)
    if written == "now":
        file = tmp_path / "program.bin"
        file.write_bytes(exported.export(name).serialize(vjp_order=1))
    launches = start("exported", str(file), str(tmp_path / "out.npz"), timeout=180).strip().splitlines()[-1]
    assert int(launches) > 0

    @jax.jit
    def both(*args):
        results, transpose = jax.vjp(lambda *a: PROGRAMS[name](*a, implementation="xla"), *args)
        return results, transpose(jax.tree.map(cotangent, results))

    with np.load(tmp_path / "out.npz") as saved:
        for got, want in zip(saved.values(), jax.tree.leaves(both(*exported.arrays())), strict=True):
            np.testing.assert_allclose(got, np.float32(want), 0.05, 0.05)
