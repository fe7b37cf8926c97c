"""Build the cubins: `python -m jax_r2p.aot --out DIR`."""

import argparse
import contextlib
import importlib.util
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from jax_r2p.aot import output
from jax_r2p.aot.compile import BuildError, CompiledVariant, compile_variants
from jax_r2p.aot.variants import VARIANTS, VariantRow

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 if the build or the comparison failed, or 2 after wrong usage."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.only or () if name not in VARIANTS]
    if unknown:
        print(f"unknown variants: {', '.join(unknown)}\nknown are: {', '.join(VARIANTS)}", file=sys.stderr)
        return EXIT_USAGE
    rows = [row for row in VARIANTS.values() if options.only is None or row.name in options.only]
    try:
        if options.check:
            return _check(rows, options.out, options.jobs, whole=options.only is None)
        compiled = _compile(rows, options.jobs)
        output.write(options.out, compiled, keep_others=options.only is not None)
    except (BuildError, output.OutputError) as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    print(f"wrote {len(compiled)} of {len(VARIANTS)} variants to {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_r2p.aot", description="Compile the kernels to cubins."
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the cubins")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="build only these variants, keep the others that DIR has"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, but fail if a build differs from what DIR holds"
    )
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="variants to compile at once (default: one per processor)"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _check(rows: Sequence[VariantRow], folder: pathlib.Path, jobs: int | None, *, whole: bool) -> int:
    different = output.differences(folder, _compile(rows, jobs), whole=whole)
    for line in different:
        print(line, file=sys.stderr)
    if different:
        return EXIT_FAILED
    print(f"{folder} holds what these sources build ({len(rows)} of {len(VARIANTS)} variants compared)")
    return 0


def _compile(rows: Sequence[VariantRow], jobs: int | None) -> list[CompiledVariant]:
    """Compiles `rows`, tells how far it is, and returns the results in the order of `rows`."""
    order = [row.name for row in rows]
    start = time.monotonic()
    compiled = []
    with _progress(len(rows)) as advance:
        for done in compile_variants(rows, jobs=jobs):
            compiled.append(done)
            variant = done.variant
            advance(
                f"{variant.name}: {variant.registers} registers, {variant.shared_memory} bytes of shared "
                f"memory, {variant.size} bytes of cubin, after {time.monotonic() - start:.1f} s"
            )
    return sorted(compiled, key=lambda done: order.index(done.variant.name))


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes one line for each finished step. On a terminal a bar follows the lines."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda line: print(line, flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task("", total=total)

        def advance(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)
            progress.advance(task)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
