"""Timing attention implementations side by side: what `jax-r2p bench` runs."""
