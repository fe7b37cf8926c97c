"""The `jax-r2p` command: one module a subcommand. No function of the package imports this."""
