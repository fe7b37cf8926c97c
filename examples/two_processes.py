"""One sequence over two processes: causal attention by `ring_attention`, compared with that of one device.

    python examples/two_processes.py

starts two processes on this machine, which talk to each other as those on two machines would. They use CPUs,
so this runs anywhere. On GPU machines, start one process for each machine, call `jax.distributed.initialize`
with the address of the first, and leave out the two lines about CPUs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings

PROCESSES, DEVICES_EACH = 2, 2
BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 1, 256, 4, 2, 32


def start() -> None:
    """Start the processes and wait for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen([sys.executable, __file__, address, str(number)]) for number in range(PROCESSES)
    ]
    failed = [process.wait() for process in processes]
    if any(failed):
        raise SystemExit("a process has failed")


def work(address: str, number: int) -> None:
    """What each process does: the same, but for the devices that it has."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES_EACH}"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=PROCESSES, process_id=number)

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import jax_r2p

    warnings.simplefilter("ignore", jax_r2p.FallbackWarning)  # no kernel on CPUs
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec(None, "sequence")

    # The whole arrays are known to every process here, so that it can compare. Real programs load shards.
    rng = np.random.default_rng(0)
    whole = [
        rng.standard_normal((BATCH, LENGTH, heads, HEAD_DIM), np.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    sharding = NamedSharding(mesh, spec)
    shards = [
        jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        for x in (jax_r2p.to_zigzag(x, devices, axis=1) for x in whole)
    ]

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    def attend(query, key, value):
        return jax_r2p.ring_attention(
            query, key, value, axis_name="sequence", is_causal=True, layout="zigzag"
        )

    @jax.jit
    def gradient(query, key, value):
        return jax.grad(lambda query: jnp.sum(jnp.sin(attend(query, key, value))))(query)

    def one_device(query, key, value):
        return jax_r2p.attention(query, key, value, is_causal=True)

    def one_device_gradient(query, key, value):
        return jax.grad(lambda query: jnp.sum(jnp.sin(one_device(query, key, value))))(query)

    pairs = {"result": (attend, one_device), "gradient": (gradient, one_device_gradient)}
    for name, (ours, theirs) in pairs.items():
        got, want = ours(*shards), jax_r2p.to_zigzag(np.asarray(jax.jit(theirs)(*whole)), devices, axis=1)
        parts = got.addressable_shards
        errors = [np.abs(np.asarray(part.data) - want[part.index]).max() for part in parts]
        error = np.max(errors)  # NaN if one is
        if not error < 1e-5:
            raise SystemExit(f"process {number}: {name} differs by {error:.1e}")
    print(f"process {number}: {len(got.addressable_shards)} of {devices} shards as on one device", flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2])) if sys.argv[1:] else start()
