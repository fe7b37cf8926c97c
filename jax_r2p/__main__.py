"""`python -m jax_r2p` is the `jax-r2p` command."""

import sys

from jax_r2p.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
