"""Programs in files: written here, and read where nothing but the package is imported; files of before."""

from __future__ import annotations

import re
import subprocess
import sys

import exported
import jax
import numpy as np
import pytest
from exported import PROGRAMS, cotangent, place
from pages import check_page

import jax_r2p
from jax_r2p import _export, _ffi, _sharding
from jax_r2p._manifest import load_manifest

pytestmark = pytest.mark.filterwarnings("ignore::jax_r2p.FallbackWarning")
pytest.importorskip("flatbuffers", reason="jax.export writes and reads files with flatbuffers")

VARIANTS = {variant.name: variant.role for variant in load_manifest().variants}
ROLES = {
    _ffi.BACKWARD_TARGET: "backward",
    _sharding.BACKWARD_TARGET: "backward",
    _ffi.PREPROCESS_TARGET: "preprocess",
}
"""Of the kernels in a target's calls; those of the others are forward."""
ADVICE = """
tests/data/{file} stands for files that users of released versions keep. It must go on running:
- a call of another signature (operands, results, attributes, or what one of them means) needs a target
  name with a new version, and ffi/ keeps the handler of the old name;
- a kernel that needs operands of another shape (another tile_m of a backward kernel) needs another name,
  and the old one stays in the manifest.
Only while no release has written such calls may the file be written anew: python tests/exported.py {name}
"""


def read(name: str) -> jax.export.Exported:
    return jax.export.deserialize(bytearray(exported.file(name).read_bytes()))


def close(got, want):
    """Results in bfloat16 that were rounded a few times."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.float32(x), np.float32(y), 0.03, 0.03)


def with_gradient(function, *args):
    results, transpose = jax.vjp(function, *args)
    return results, transpose(jax.tree.map(cotangent, results))


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_of_before_run_on_cpu(name):
    """With nothing registered for it; results and gradients are those of the reference."""
    program = read(name)
    got = with_gradient(program.call, *place(exported.arrays(), program.nr_devices))

    def reference(*args):
        return PROGRAMS[name](*args, implementation="xla")

    close(got, with_gradient(reference, *exported.arrays()))


def calls(text: str) -> list[dict[str, str]]:
    """Every call of this package in a program, with all that its handler sees of it."""
    pattern = r"custom_call @(jax_r2p\.[\w.]+)\([^)]*\) \{(.*)\} : \(([^()]*)\) -> \(([^()]*)\)"
    names = ("target", "attributes", "operands", "results")
    found = re.findall(pattern, text)
    assert len(found) == text.count("custom_call @jax_r2p.")
    return [dict(zip(names, call, strict=True)) for call in found]


def both_passes(program: jax.export.Exported) -> list[dict]:
    return [call for part in (program, program.vjp()) for call in calls(part.mlir_module())]


@pytest.mark.parametrize("name", PROGRAMS)
def test_files_of_before_call_what_there_is(name):
    """Targets, operands, results, attributes and kernels, as the library takes them now."""
    advice = ADVICE.format(file=exported.file(name).name, name=name)
    old, new = both_passes(read(name)), both_passes(exported.export(name))
    assert old, "the file holds no call"
    for call in old:
        assert call["target"] in _export.TARGETS, f"no handler for {call['target']}.{advice}"
        kernel = re.search(r"(?:fwd|bwd|pre)_\w+", call["attributes"])[0]
        assert VARIANTS.get(kernel) == ROLES.get(call["target"], "forward"), f"no kernel {kernel}.{advice}"
    # Names that nothing calls any more are for tests of the handlers that were kept for them.
    current = {call["target"] for call in new}
    changed = [call for call in old if call["target"] in current and call not in new]
    assert not changed, f"calls that are made otherwise now: {changed}{advice}"


def test_the_files_hold_every_call():
    found = {call["target"] for name in PROGRAMS for call in both_passes(read(name))}
    assert found == set(_export.TARGETS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_export_demands_the_names(name):
    """The checks are needed, and they are enough."""
    function = jax.jit(lambda *args: PROGRAMS[name](*args))
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        jax.export.export(function, platforms=("cuda",))(*exported.structs(name))
    exported.export(name).serialize(vjp_order=1)


def test_disabled_checks_name_every_target():
    checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in _export.TARGETS]
    assert list(jax_r2p.DISABLED_CHECKS) == checks
    assert set(_export.TARGETS) == {*_ffi._SYMBOLS, _sharding.TARGET, _sharding.BACKWARD_TARGET}


# Another process


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


RUN = """
import sys
import jax, jax.export
import numpy as np
import jax_r2p
with open(sys.argv[1], "rb") as file:
    program = jax.export.deserialize(bytearray(file.read()))
arrays = [x.view(jax.numpy.bfloat16) for x in np.load(sys.argv[2]).values()]
results, transpose = jax.vjp(program.call, *arrays)
cotangents = [np.load(sys.argv[3])[f"arr_{i}"].astype(x.dtype) for i, x in enumerate(results)]
leaves = [*results, *transpose(tuple(cotangents))]
np.savez(sys.argv[4], *[np.float32(x) for x in leaves])
print([name for name in sys.modules if name.startswith("jax_r2p.")])
"""


def test_another_process_runs_it(tmp_path):
    """One that only imports the package; results, residual and gradients."""
    (tmp_path / "program").write_bytes(exported.export("plain").serialize(vjp_order=1))
    arrays = exported.arrays()
    want = with_gradient(PROGRAMS["plain"], *arrays)
    np.savez(tmp_path / "in.npz", *[np.asarray(x).view(np.uint16) for x in arrays])
    np.savez(tmp_path / "cotangents.npz", *[np.float32(cotangent(x)) for x in want[0]])
    names = ("program", "in.npz", "cotangents.npz", "out.npz")
    assert python(RUN, *(str(tmp_path / name) for name in names)) == "[]"
    with np.load(tmp_path / "out.npz") as saved:
        for got, expected in zip(saved.values(), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, np.float32(expected), 0.03, 0.03)


REGISTER = """
import jax_r2p
import jax
from jax._src import xla_bridge
seen = set()
register = jax.ffi.register_ffi_target
def record(name, handlers, *, platform):
    seen.add((name, platform))
    register(name, handlers, platform=platform)
jax.ffi.register_ffi_target = record
jax_r2p.register()
jax_r2p.register()
assert not xla_bridge._backends, "a backend was started"
assert seen == {(name, "CUDA") for name in jax_r2p._ffi._SYMBOLS}, seen
print(jax.jit(lambda x: x + 1)(1))  # the backend starts with what was registered before
"""


def test_register_starts_no_backend():
    assert python(REGISTER) == "2"


def test_register_says_what_is_wrong(monkeypatch):
    def broken():
        raise _ffi.InstallationError("libjax_r2p.so is missing")

    monkeypatch.setattr(_ffi, "_register_once", broken)
    with pytest.raises(RuntimeError, match="is missing"):
        jax_r2p.register()


def test_code_of_the_page(tmp_path):
    check_page("export.md", tmp_path)
