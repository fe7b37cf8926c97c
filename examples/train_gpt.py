"""Trains a small GPT on text that every Python ships, and compares implementations of attention.

    pip install 'jax_r2p[examples]'
    python examples/train_gpt.py --rows r2p.jsonl
    python examples/train_gpt.py --implementation jax --rows jax.jsonl --compare r2p.jsonl --plot curves.png

The text is the topics of Python's `help`, read byte by byte; its last twentieth is held out. Parameters are
float32 and products bfloat16. Layers are scanned and rematerialised: what is inside of them is computed
twice, apart from attention with `--remat-policy attention`. Each device takes its part of the batch. One seed
gives the same parameters and batches for each implementation, so that curves can be compared.

`--size tiny` takes seconds on a CPU. `small` and `medium` are for GPUs: they read the text several times, so
late in a run they learn it by heart. That is fine for comparing curves, and shows in the held-out loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import pydoc_data.topics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
import rich.progress
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_r2p

TOKENS = 256  # bytes
IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "r2p": jax_r2p.attention,
    "jax": functools.partial(jax.nn.dot_product_attention, implementation="xla"),
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, and how it is trained unless the command line says otherwise."""

    layers: int
    width: int
    heads: int
    length: int  # tokens of a sequence
    batch: int  # sequences of a step, over all devices
    steps: int
    learning_rate: float


SIZES = {
    "tiny": Size(2, 64, 2, 128, 16, 40, 1e-2),
    "small": Size(6, 512, 8, 1024, 16, 300, 1e-3),
    "medium": Size(12, 1024, 8, 2048, 16, 300, 5e-4),
}


class Layer(nnx.Module):
    """Attention and two dense products, each added to what came in."""

    def __init__(self, size: Size, attend: Callable[..., Array], rngs: nnx.Rngs):
        dense = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.heads, self.attend = size.heads, attend
        self.attention_norm, self.dense_norm = norm(), norm()
        self.into_heads, self.out_of_heads = dense(size.width, 3 * size.width), dense(size.width, size.width)
        self.up, self.down = dense(size.width, 4 * size.width), dense(4 * size.width, size.width)

    def __call__(self, x: Array) -> Array:
        """Maps (B, T, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.into_heads(self.attention_norm(x)).reshape(batch, length, 3, self.heads, -1)
        out = self.attend(*jnp.unstack(heads, axis=2), is_causal=True)
        x += self.out_of_heads(out.reshape(batch, length, width))
        return x + self.down(nnx.gelu(self.up(self.dense_norm(x))))


class GPT(nnx.Module):
    """A decoder. The parameters of its layers are stacked, so that one program runs for all of them."""

    def __init__(self, size: Size, attend: Callable[..., Array], saved: tuple[str, ...], rngs: nnx.Rngs):
        self.saved = saved  # names of what is not computed twice
        embed = functools.partial(nnx.Embed, features=size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.token, self.place = embed(TOKENS), embed(size.length)
        stack = nnx.split_rngs(splits=size.layers)(nnx.vmap(functools.partial(Layer, size, attend)))
        self.layers = stack(rngs)
        self.norm = nnx.RMSNorm(size.width, dtype=jnp.bfloat16, rngs=rngs)
        self.readout = nnx.Linear(size.width, TOKENS, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: Array) -> Array:
        """Maps tokens (B, T) to scores of the tokens that follow, (B, T, TOKENS)."""
        graph, parameters = nnx.split(self.layers)

        def layer(x, parameters):
            return nnx.merge(graph, parameters)(x), None

        # A product picks rows as a lookup does, but its derivative is a product, too. That of a lookup adds a
        # row for each token to one of 256 by scatter: a tenth of a step, and not as long on each GPU.
        chosen = jax.nn.one_hot(tokens, TOKENS, dtype=jnp.bfloat16)
        x = chosen @ self.token.embedding.astype(jnp.bfloat16) + self.place(jnp.arange(tokens.shape[1]))
        policy = jax.checkpoint_policies.save_only_these_names(*self.saved)
        # The scan keeps apart what is computed twice, so nothing else need prevent that it is merged.
        x, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False, policy=policy), x, parameters)
        return self.readout(self.norm(x))


def make_functions(graph: Any, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """Returns the functions `step(state, text) -> (state, loss)` and `evaluate(parameters, text) -> loss`.

    `text` is (B, T + 1), with B split over the mesh. Inside of `shard_map` each device calls attention with
    its own sequences, so nothing can gather them; means over devices are taken of loss and gradients.
    """

    def loss(parameters, text):
        scores = nnx.merge(graph, parameters)(text[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:].astype(jnp.int32)).mean()

    def mean_loss(parameters, text):
        return jax.lax.pmean(loss(parameters, text), "batch")

    def mean_gradient(parameters, text):
        # Each device differentiates by a copy of its own; without it, sums would be taken layer by layer.
        own = jax.tree.map(lambda x: jax.lax.pcast(x, "batch", to="varying"), parameters)
        return jax.lax.pmean(jax.value_and_grad(loss)(own, text), "batch")

    split = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P())

    def step(state, text):
        parameters, moments = state["parameters"], state["optimizer"]
        value, gradient = split(mean_gradient)(parameters, text)
        updates, moments = optimizer.update(gradient, moments, parameters)
        return {"parameters": optax.apply_updates(parameters, updates), "optimizer": moments}, value

    return jax.jit(step, donate_argnums=0), jax.jit(split(mean_loss))


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes to train on, and those held out: the last twentieth."""
    topics = pydoc_data.topics.topics
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def read_curve(path: Path) -> tuple[dict[int, float], str]:
    """Returns the curve of a run from its file of rows, {step: loss}, and its name."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if not rows or "device" not in rows[-1]:
        raise SystemExit(f"rows must end with the summary of a run that came to its end, got {path}")
    name = f"{rows[-1]['implementation']}, {rows[-1]['device']}"
    return {row["step"]: row["loss"] for row in rows if "loss" in row}, name


def plot(path: Path, curves: list[tuple[dict[int, float], str]]) -> None:
    """Draws curves of (loss by step, name) and, below, by how much the first of two is above the second."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ratios = {"height_ratios": [3, 1][: len(curves)]}
    figure, axes = plt.subplots(len(curves), sharex=True, squeeze=False, layout="constrained", **ratios)
    upper, *lower = axes[:, 0]
    for (curve, name), style in zip(curves, ("-", "--")[: len(curves)], strict=True):
        upper.plot(curve.keys(), curve.values(), style, label=name)
    upper.set(ylabel="loss (nats a byte)", title="GPT on the topics of Python's help")
    upper.legend()
    for axis in lower:
        (one, _), (other, _) = curves
        steps = sorted(one.keys() & other.keys())
        axis.plot(steps, [one[step] - other[step] for step in steps], color="tab:gray")
        axis.set(ylabel="solid\nminus dashed")
    axes[-1, 0].set(xlabel="step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=150)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Size]:
    """Returns the arguments, and the size that they give; exits with what is wrong about them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--size", choices=SIZES, default="tiny", help="model; its numbers can be changed:")
    for field in dataclasses.fields(Size):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=float if field.name == "learning_rate" else int
        )
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, default="r2p", help="of attention")
    parser.add_argument(
        "--remat-policy", choices=("nothing", "attention"), default="nothing", help="what each layer saves"
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--rows", type=Path, help="file for the curve and a summary, as JSON lines")
    parser.add_argument("--plot", type=Path, help="PNG file for the curve")
    parser.add_argument("--compare", type=Path, help="rows of another run, to plot beside this one's")
    parser.add_argument("--checkpoint", type=Path, help="directory to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    args = parser.parse_args(arguments)
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Size)}
    size = dataclasses.replace(SIZES[args.size], **{k: v for k, v in given.items() if v is not None})

    least = {f.name: 1 for f in dataclasses.fields(Size) if f.name != "learning_rate"}
    for name, bound in (least | {"steps": 2, "save_every": 1, "seed": 0}).items():
        got = getattr(size if name in given else args, name)
        if got < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}, got {got}")
    devices, held_out = jax.device_count(), len(read_text()[1])
    for wrong, message in (
        (not size.learning_rate > 0, f"--learning-rate must be above 0, got {size.learning_rate}"),
        (size.width % size.heads, f"--heads must divide --width {size.width}, got {size.heads}"),
        (size.batch % devices, f"--batch must be a multiple of the {devices} devices, got {size.batch}"),
        (size.length >= held_out, f"--length must be below the {held_out} bytes held out, got {size.length}"),
        (
            args.remat_policy == "attention" and args.implementation != "r2p",
            f"--remat-policy attention needs --implementation r2p, got {args.implementation}",
        ),
        (args.compare and not args.plot, f"--compare needs --plot, got --compare {args.compare} alone"),
        (args.compare and not args.compare.is_file(), f"--compare must be a file, got {args.compare}"),
        (
            args.plot and not args.plot.absolute().parent.is_dir(),
            f"--plot must be in a directory, got {args.plot}",
        ),
    ):
        if wrong:
            parser.error(message)
    return args, size


def open_checkpoints(directory: Path, size: Size, state: Any) -> tuple[ocp.CheckpointManager, int, Any]:
    """Returns the manager of a directory, how many steps its last checkpoint has seen, and its state."""
    manager = ocp.CheckpointManager(directory.resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2))
    done = manager.latest_step()
    if done is None:
        return manager, 0, state
    saved = manager.restore(done, args=ocp.args.Composite(size=ocp.args.JsonRestore()))["size"]
    for name in ("layers", "width", "heads", "length"):
        want, got = saved[name], getattr(size, name)
        if got != want:
            raise SystemExit(f"--{name} must be the {want} of the checkpoint in {directory}, got {got}")
    if done >= size.steps:
        raise SystemExit(f"--steps must be above the {done} of checkpoint {directory}, got {size.steps}")
    restore = ocp.args.Composite(state=ocp.args.StandardRestore(state))
    return manager, done, manager.restore(done, args=restore)["state"]


def save(manager: ocp.CheckpointManager, step: int, size: Size, state: Any) -> None:
    """Saves the state after a step, beside the size that `open_checkpoints` looks at."""
    sized = ocp.args.JsonSave(dataclasses.asdict(size))
    manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), size=sized))


def version(package: str) -> str | None:
    """Returns the version of an installed package; None where only its checkout is used."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(arguments: list[str] | None = None) -> None:
    """Train, evaluate, and write what was asked for."""
    args, size = parse(arguments)
    warnings.simplefilter("ignore", jax_r2p.FallbackWarning)  # what runs is said below
    compared = [read_curve(args.compare)] if args.compare else []
    text, held_out = read_text()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("batch",))

    def windows(source: np.ndarray, starts: np.ndarray) -> Array:
        chosen = source[starts[:, None] + np.arange(size.length + 1)]
        return jax.device_put(chosen, NamedSharding(mesh, P("batch")))

    def batch(step: int) -> Array:  # a function of seed and step, so that a run can be resumed
        starts = np.random.default_rng((args.seed, step)).integers(0, len(text) - size.length, size.batch)
        return windows(text, starts)

    saved = (jax_r2p.OUT_NAME, jax_r2p.RESIDUAL_NAME) if args.remat_policy == "attention" else ()
    model = GPT(size, IMPLEMENTATIONS[args.implementation], saved, nnx.Rngs(args.seed))
    graph, parameters = nnx.split(model)
    low, high = size.learning_rate / 10, size.learning_rate
    rate = optax.warmup_cosine_decay_schedule(low, high, max(1, size.steps // 10), size.steps, low)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    state = {"parameters": parameters, "optimizer": optimizer.init(parameters)}
    state, done, manager = jax.device_put(state, NamedSharding(mesh, P())), 0, None
    if args.checkpoint:
        manager, done, state = open_checkpoints(args.checkpoint, size, state)

    own_share = (size.batch // mesh.size, size.length, size.heads, size.width // size.heads)
    operand = jax.ShapeDtypeStruct(own_share, jnp.bfloat16)
    explanation = jax_r2p.explain(operand, operand, operand, is_causal=True)
    ran = str(explanation) if args.implementation == "r2p" else args.implementation
    count = sum(x.size for x in jax.tree.leaves(parameters))
    device = f"{mesh.size} x {jax.devices()[0].device_kind}"
    print(f"{count:,} parameters on {device}, from step {done + 1}. Attention: {ran}")

    step_function, evaluate = make_functions(graph, optimizer, mesh)
    start = time.perf_counter()
    step_function = step_function.lower(state, batch(done + 1)).compile()
    compile_seconds, memory = time.perf_counter() - start, step_function.memory_analysis()

    rows: list[dict[str, Any]] = []
    if args.rows and not done:
        args.rows.write_text("")  # else rows are added

    def record(row: dict[str, Any]) -> None:
        rows.append(row)
        if args.rows:
            with args.rows.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    steady_steps, steady_seconds, since, waiting = 0, 0.0, done, None
    columns = (*rich.progress.Progress.get_default_columns(), "loss {task.fields[loss]:.3f}")
    with rich.progress.Progress(*columns) as bar:
        task = bar.add_task("training", total=size.steps, loss=float("nan"))

        def settle(step: int, loss: Array) -> None:
            nonlocal steady_steps, steady_seconds, start, since
            record({"step": step, "loss": float(loss)})  # waits for the step
            now = time.perf_counter()
            if step > done + 1:  # the first step also loads the program
                steady_steps += step - since
                steady_seconds += now - start
            bar.update(task, completed=step, loss=rows[-1]["loss"])
            start, since = now, step

        for step in range(done + 1, size.steps + 1):
            state, loss = step_function(state, batch(step))
            if waiting:  # with this step under way, so that devices do not wait for the host
                settle(*waiting)
            ends = step in (done + 1, size.steps)
            waiting = (step, loss) if ends or step % max(1, size.steps // 50) == 0 else None
            if manager is not None and (step % args.save_every == 0 or step == size.steps):
                settle(step, loss)
                waiting = None
                save(manager, step, size, state)
                start = time.perf_counter()
        if waiting:
            settle(*waiting)
    if manager is not None:
        manager.close()  # waits for what is still being written

    # Windows that lie evenly over the held-out text, as many as fill batches and cover it.
    batches = -(-len(held_out) // (size.length * size.batch))
    starts = np.linspace(0, len(held_out) - size.length - 1, batches * size.batch).astype(int)
    losses = [evaluate(state["parameters"], windows(held_out, part)) for part in np.split(starts, batches)]

    speed = steady_steps * size.batch * size.length / steady_seconds if steady_steps else None
    packages = ("jax_r2p", "jax", "jaxlib", "flax", "optax")
    validation = float(np.mean(jax.device_get(losses)))
    first, last = rows[0], rows[-1]
    summary = {
        "implementation": args.implementation,
        "device": device,
        "attention": ran,
        "remat_policy": args.remat_policy,
        "tokens_per_second": speed,
        "validation_loss": validation,
        "compile_seconds": compile_seconds,
        "temporary_bytes": memory.temp_size_in_bytes,  # of a device, beside its arguments
        "argument_bytes": memory.argument_size_in_bytes,
        "parameters": count,
        "resumed_after": done,
        "seed": args.seed,
        "text_bytes": len(text) + len(held_out),
        **dataclasses.asdict(size),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in packages}},
    }
    record(summary)
    if args.plot:  # from the file, if any: that of a resumed run knows how it began
        own = {row["step"]: row["loss"] for row in rows[:-1]}, f"{args.implementation}, {device}"
        plot(args.plot, [read_curve(args.rows) if args.rows else own, *compared])
    for row in (first, last):
        print(f"step {row['step']}: loss {row['loss']:.3f}")
    print(f"held-out text: loss {validation:.3f}")
    print(f"tokens a second: {f'{speed:,.0f}' if speed else 'too few steps to tell'}")


if __name__ == "__main__":
    main()
