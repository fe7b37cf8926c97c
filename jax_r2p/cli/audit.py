"""Count the instructions of the kernels, with and without R2P.

For each variant, for the whole kernel and for each of its loops over key blocks: how many instructions there
are in all and of each kind, in the shipped kernel (with R2P), in the same kernel compiled with integer
compares an element (without R2P), and the difference. Only loops cost time; what stands outside them runs
once a tile, or never. Backward kernels, which have one loop, over query tiles, are counted as they are
shipped; their step is counted with the part that masks, and that part once more by itself. In their masks a
row is a key and a column a query.

Needs no GPU. The disassembler comes with `pip install 'jax_r2p[audit]'`, the compiler for the kernels without
R2P with `pip install 'jax_r2p[aot]'`; those are compiled once and kept in the user's cache folder.

Exit status: 0; 1 if --check finds a deviation or something is missing; 2 after wrong arguments.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax_r2p._manifest import Variant, load_manifest, package_file, read_cubin
from jax_r2p.cli.output import EXIT_FAILED, CommandError, UsageError, print_json, print_table, progress

DEFAULT = ("fwd_bf16_d128_none", "fwd_bf16_d128_causal_wide", "fwd_bf16_d128_window")
"""One of each mask: the end of the sequence alone, causal, window."""

WITHOUT, WITH, DIFFERENCE = "without", "with R2P", "difference"

_TITLES = {"none": "sequence end only", "causal": "causal", "window": "window"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the subcommand."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--variant",
        action="append",
        metavar="NAME",
        help="a kernel of `jax-r2p variants`; can be given again (default: bf16, head dim 128, each mask)",
    )
    which.add_argument("--all", action="store_true", help="every kernel; the default of --check and --update")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--no-compare", action="store_true", help="count the shipped kernels alone; needs no compiler"
    )
    how.add_argument(
        "--show", action="store_true", help="print the masks instead: which bit goes to which predicate"
    )
    how.add_argument(
        "--check", action="store_true", help="compare with the expected counts that the package carries"
    )
    how.add_argument(
        "--update", action="store_true", help="write the expected counts anew, after a change that is meant"
    )
    parser.add_argument("--cache", type=pathlib.Path, metavar="DIR", help="where compiled kernels are kept")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilations at once (default: one a processor)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit status."""
    from jax_r2p.aot import sass
    from jax_r2p.aot.compile import BuildError

    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs must be at least 1, got {options.jobs}")
    chosen = _choose(options)
    try:
        sass.find_nvdisasm()  # before anything is compiled
        if options.check:
            return _check(chosen, options)
        if options.update:
            return _update(chosen, options)
        if options.show:
            return _show(chosen, options)
        return _tables(chosen, options)
    except BuildError as error:
        raise CommandError(f"{error}\n--no-compare counts the shipped kernels alone, without it") from error
    except (sass.NvdisasmNotFoundError, sass.SassError) as error:
        raise CommandError(str(error)) from error


def _choose(options: argparse.Namespace) -> list[Variant]:
    shipped = {variant.name: variant for variant in load_manifest().variants}
    if unknown := [name for name in options.variant or () if name not in shipped]:
        raise UsageError(f"--variant must be one of {', '.join(shipped)}, got {', '.join(unknown)}")
    everything = options.all or options.check or options.update
    names = options.variant or (shipped if everything else DEFAULT)
    return [shipped[name] for name in dict.fromkeys(names)]


# Tables ----------------------------------------------------------------------------------------------------


def _gated(chosen: Sequence[Variant]) -> dict[str, dict[str, dict[str, int]]]:
    """The counts that are compared with the expected ones."""
    from jax_r2p.aot import audit

    cubins = {variant.name: read_cubin(variant) for variant in chosen}
    return _count(chosen, cubins, {variant.name: audit.gated(variant.role) for variant in chosen})


def _tables(chosen: Sequence[Variant], options: argparse.Namespace) -> int:
    from jax_r2p.aot import audit

    # Backward kernels mask in no other way.
    forward = [variant for variant in chosen if variant.role == "forward" and not options.no_compare]
    built = _compile_without(forward, options) if forward else {}
    opcodes = dict.fromkeys((variant.name for variant in chosen), audit.OPCODES)
    shipped = _count(chosen, {variant.name: read_cubin(variant) for variant in chosen}, opcodes)
    compared, facts = {}, {}
    if built:
        compared = _count(forward, {name: cubin for name, (_, cubin) in built.items()}, opcodes)
        facts = {name: variant for name, (variant, _) in built.items()}
    documents = [
        _document(variant, shipped[variant.name], compared.get(variant.name), facts.get(variant.name))
        for variant in chosen
    ]
    if options.json:
        print_json({"variants": documents})
        return 0
    for document in documents:
        _print(document, audit.TOTAL, audit.OPCODES)
    return 0


def _compile_without(
    chosen: Sequence[Variant], options: argparse.Namespace
) -> dict[str, tuple[Variant, bytes]]:
    """The kernels without R2P, under the names of those with it."""
    from jax_r2p.aot import cache
    from jax_r2p.aot.variants import VARIANTS, without_r2p

    rows = {variant.name: without_r2p(VARIANTS[variant.name]) for variant in chosen}
    with progress("compiling without R2P", len(rows)) as advance:
        try:
            built = cache.get(list(rows.values()), root=options.cache, jobs=options.jobs, advance=advance)
        except OSError as error:
            raise CommandError(
                f"compiled kernels cannot be kept: {error}; --cache DIR sets another place"
            ) from error
    return {name: built[row.name] for name, row in rows.items()}


def _count(
    chosen: Sequence[Variant], cubins: dict[str, bytes], opcodes: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, dict[str, int]]]:
    """Counts by variant and part, of the instructions asked for of each variant."""
    from jax_r2p.aot import audit, sass

    with progress("disassembling", len(chosen)) as advance:
        counts = {}
        for variant in chosen:
            kernel = sass.disassemble(cubins[variant.name])
            counts[variant.name] = audit.count_parts(
                kernel, variant.mask, opcodes[variant.name], variant.role
            )
            advance(variant.name)
    return counts


def _document(
    variant: Variant,
    shipped: dict[str, dict[str, int]],
    compared: dict[str, dict[str, int]] | None,
    facts: Variant | None,
) -> dict[str, Any]:
    """What --json prints of one variant; the tables show the same."""

    def three(with_r2p: int, without: int | None) -> dict[str, int]:
        if without is None:
            return {"with_r2p": with_r2p}
        return {"without_r2p": without, "with_r2p": with_r2p, "difference": with_r2p - without}

    return {
        "name": variant.name,
        "role": variant.role,
        "mask": variant.mask,
        "tile_m": variant.tile_m,
        "tile_n": variant.tile_n,
        "registers": three(variant.registers, facts.registers if facts else None),
        "shared_memory": three(variant.shared_memory, facts.shared_memory if facts else None),
        "parts": {
            part: {
                name: three(number, compared[part][name] if compared else None)
                for name, number in counts.items()
            }
            for part, counts in shipped.items()
        },
    }


def _print(document: dict[str, Any], total: str, opcodes: Sequence[str]) -> None:
    columns = [name for name in opcodes if name not in ("LDL", "STL")]
    rows = []
    for part, counts in document["parts"].items():
        for number, (label, key) in enumerate(
            ((WITHOUT, "without_r2p"), (WITH, "with_r2p"), (DIFFERENCE, "difference"))
        ):
            if key not in counts[total]:
                continue
            sign = "+" if key == "difference" else ""
            cells = [f"{counts[name][key]:{sign}d}" for name in columns]
            if key == "difference":
                share = counts[total][key] / counts[total]["without_r2p"]
                first = f"{counts[total][key]:+d} ({share:+.0%})"
            else:
                first = str(counts[total][key])
            local = f"{counts['LDL'][key]:{sign}d}/{counts['STL'][key]:{sign}d}"
            only = "without_r2p" not in counts[total]
            rows.append([part if number == 0 or only else "", label, first, *cells, local])

    def change(counts: dict[str, int]) -> str:
        return " -> ".join(str(counts[key]) for key in ("without_r2p", "with_r2p") if key in counts)

    title = (
        f"{document['name']}: {_TITLES[document['mask']]}, tiles {document['tile_m']} x "
        f"{document['tile_n']}, registers {change(document['registers'])}, bytes of shared memory "
        f"{change(document['shared_memory'])}"
    )
    print_table(title, ["part", "masks", total, *columns, "LDL/STL"], rows, left=2)


# Masks -----------------------------------------------------------------------------------------------------


def _show(chosen: Sequence[Variant], options: argparse.Namespace) -> int:
    from jax_r2p.aot import audit, mask_sites, sass

    documents = []
    for variant in chosen:
        kernel = sass.disassemble(read_cubin(variant))
        for part, code in audit.parts(kernel, variant.mask, variant.role).items():
            if part not in (audit.WHOLE, audit.STEP) and "R2P" in code:
                site = audit.mask_site(kernel, part, code)
                documents.append(mask_sites.document(variant.name, part, site))
    if options.json:
        print_json({"sites": documents})
        return 0
    for document in documents:
        lines = [*document["words"], *document["tests"]]
        print_table(
            f"{document['variant']}, {document['part']}: {len(document['words'])} words of mask bits, "
            f"{len(document['tests'])} instructions turn them into predicates for {document['scores']} "
            "scores",
            ["instruction", "what it does", "decides on scores (row:element=column)"],
            [[line["instruction"], line["meaning"], " ".join(line.get("scores", ()))] for line in lines],
            left=3,
        )
    return 0


# Gates -----------------------------------------------------------------------------------------------------


def _check(chosen: Sequence[Variant], options: argparse.Namespace) -> int:
    from jax_r2p.aot import audit

    expected = audit.load_expected()
    found = _gated(chosen)
    problems = [
        line for name, parts in found.items() for line in audit.deviations(name, parts, expected.get(name))
    ]
    if options.json:
        print_json({"checked": list(found), "deviations": problems})
    else:
        print("\n".join(problems) or f"{len(found)} kernels have the expected instructions")
    return EXIT_FAILED if problems else 0


def _update(chosen: Sequence[Variant], options: argparse.Namespace) -> int:
    from jax_r2p.aot import audit

    path = pathlib.Path(str(package_file("aot", audit.EXPECTED_FILE)))
    shipped = {variant.name for variant in load_manifest().variants}
    old = audit.load_expected() if path.exists() else {}
    found = _gated(chosen)
    changes = [line for name, parts in found.items() for line in audit.deviations(name, parts, old.get(name))]
    kept = {name: parts for name, parts in old.items() if name in shipped}
    try:
        audit.save_expected(path, {**kept, **found})
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error}") from error
    if options.json:
        print_json({"written": str(path), "changes": changes})
    else:
        print("\n".join([*changes, f"wrote the counts of {len(found)} kernels to {path}"]))
    return 0
