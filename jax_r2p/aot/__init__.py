"""Compiles the kernels to cubin files and writes their manifest: `python -m jax_r2p.aot --out DIR`.

Runs at build time. It needs the CuTeDSL compiler, but neither jax nor a GPU nor a driver.
"""
