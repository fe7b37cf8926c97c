"""The SM90 kernels, in CuTeDSL. Imported by the build (`jax_r2p.aot`) and by tests, never at run time."""
