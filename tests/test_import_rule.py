"""Who imports whom: the run time knows no compiler, and a module knows only what stands to its right."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import jax_r2p

PACKAGE = pathlib.Path(jax_r2p.__file__).parent

# From what callers use to what everything uses. `__init__` imports nothing, and loads modules by name on
# demand. `cli` and `bench` are folders.
ORDER = [
    "__main__",
    "cli",
    "bench",
    "__init__",
    "flax",
    "_dot_product_attention",
    "_ring",
    "_attention",
    "_arguments",
    "_export",
    "_primitives",
    "_kernel_call",
    "_batching",
    "_sharding",
    "_dispatch",
    "_ffi",
    "_manifest",
    "_blockwise",
    "reference",
    "_promotion",
    "_scores",
    "_spec",
]
BUILD_TIME = {"aot", "kernels"}
COMPILER = {"cutlass", "cuda", "tvm", "torch", "triton"}


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports anywhere: "jax_r2p._spec" for `from jax_r2p import _spec`, too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def imports_of(module: str) -> set[str]:
    """Every module that one of the package imports; for a folder, all its files together."""
    folder = PACKAGE / module
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{module}.py"]
    return set().union(*map(imports, files))


def own(names: set[str]) -> set[str]:
    """The modules of the package among `names`."""
    return {name.split(".")[1] for name in names if name.startswith("jax_r2p.")}


def test_every_module_has_its_place():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert (files | folders) - {"__pycache__", "cubins"} == {*ORDER, *BUILD_TIME}


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_to_its_right(module):
    right = ORDER[ORDER.index(module) + 1 :]
    itself = [module] if (PACKAGE / module).is_dir() else []
    # The command also looks at the build's side: `jax-r2p audit` reads machine code.
    build_time = BUILD_TIME if module == "cli" else set()
    assert own(imports_of(module)) & {*ORDER, *BUILD_TIME} <= {*itself, *right, *build_time}


@pytest.mark.parametrize("module", ORDER)
def test_run_time_knows_no_compiler(module):
    names = imports_of(module)
    assert {name.split(".")[0] for name in names} & COMPILER == set()
    assert module == "cli" or own(names) & BUILD_TIME == set()


def test_what_both_sides_share_needs_no_jax():
    for module in ("_manifest", "_spec"):
        names = {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py")}
        assert names & {"jax", "jaxlib", "numpy"} == set()


@pytest.mark.parametrize("folder", sorted(BUILD_TIME))
def test_build_time_uses_only_what_is_shared(folder):
    allowed = {"aot": {"aot", "kernels", "_manifest", "_spec"}, "kernels": {"kernels", "_spec"}}[folder]
    for path in (PACKAGE / folder).rglob("*.py"):
        assert own(imports(path)) <= allowed, path


def python(code: str) -> str:
    """Runs code in a fresh interpreter and returns what it prints."""
    return subprocess.run(
        # -P: the installed package, not the checkout that a test run starts in.
        [sys.executable, "-P", "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout.strip()


def test_import_alone_loads_neither_jax_nor_a_compiler():
    heavy = sorted({"jax", "jaxlib", "numpy", *COMPILER})
    code = f"import sys, jax_r2p; print([name for name in {heavy} if name in sys.modules])"
    assert python(code) == "[]"


def test_using_it_loads_no_compiler():
    """And needs none: the compiler cannot be imported here."""
    code = f"""
import sys
for name in {sorted(COMPILER)}:
    sys.modules[name] = None
import jax, jax.numpy as jnp, jax_r2p
x = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.bfloat16)
f = jax.jit(lambda x: jax_r2p.attention(x, x, x, is_causal=True, implementation="r2p"))
assert jax.eval_shape(f, x).shape == x.shape
assert jax_r2p._ffi.TARGET in f.trace(x).lower(lowering_platforms=("cuda",)).as_text()
assert jax_r2p.attention(*[jnp.ones((2, 8, 2, 64))] * 3, implementation="xla").shape == (2, 8, 2, 64)
print([name for name in sys.modules if name.startswith(("jax_r2p.aot", "jax_r2p.kernels"))])
"""
    assert python(code) == "[]"


def test_public_names():
    assert set(jax_r2p.__all__) == {
        "DISABLED_CHECKS",
        "OUT_NAME",
        "RESIDUAL_NAME",
        "Explanation",
        "FallbackWarning",
        "__version__",
        "attention",
        "dot_product_attention",
        "explain",
        "from_zigzag",
        "reference",
        "register",
        "ring_attention",
        "to_zigzag",
        "zigzag_order",
    }
    assert set(jax_r2p.__all__) <= set(dir(jax_r2p))
    for name in jax_r2p.__all__:
        assert getattr(jax_r2p, name) is getattr(jax_r2p, name)
    with pytest.raises(AttributeError, match="module 'jax_r2p' has no attribute 'flash'"):
        jax_r2p.flash  # noqa: B018
