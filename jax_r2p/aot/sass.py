"""Disassemble a cubin, count its instructions and find its loops.

Needs `nvdisasm`, from the package `nvidia-cuda-nvdisasm` or from PATH. No build step needs it: this is for
looking at what the compiler made of a kernel.
"""

import collections
import dataclasses
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence

# The lines of an instruction, as in "/*0150*/  @!P0 BRA `(.L_x_0) ;", and of a label, as in ".L_x_0:".
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:@(?P<guard>!?U?P[T0-9]+)\s+)?(?P<opcode>[A-Z][A-Za-z0-9_.]*)(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"^(?P<label>[.\w$]+):\s*$")
_TARGET = re.compile(r"`\((?P<label>[.\w$]+)\)")

# Instructions that leave the straight line. BSSY, BSYNC and WARPSYNC name labels as well, but only to bring
# the threads of a warp together again further down.
_BRANCHES = frozenset({"BRA", "JMP"})
_ENDS = frozenset({"EXIT", "RET", "BPT", "KILL"})
_UNFOLLOWED = frozenset({"BRX", "JMX", "CALL"})


class NvdisasmNotFoundError(RuntimeError):
    """There is no `nvdisasm` on this machine."""


class SassError(ValueError):
    """The text of the disassembler holds something that this module does not understand."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
      address: Bytes from the start of the kernel.
      opcode: With its modifiers, for example "ISETP.GT.AND".
      operands: The rest of the text, without the guard.
      guard: Predicate that must hold, for example "!P0", or None.
    """

    address: int
    opcode: str
    operands: str
    guard: str | None = None

    def is_a(self, opcode: str) -> bool:
        """Whether this is `opcode`, with any further modifiers: "BAR.SYNC" is a "BAR", but no "BAR.ARV"."""
        return self.opcode == opcode or self.opcode.startswith(opcode + ".")


@dataclasses.dataclass(frozen=True)
class Code:
    """Instructions in address order: a kernel, or a part of one."""

    instructions: tuple[Instruction, ...]

    def count(self, opcode: str) -> int:
        """Number of instructions that are `opcode` in the sense of `Instruction.is_a`."""
        return sum(instruction.is_a(opcode) for instruction in self.instructions)

    def counts(self, opcodes: Iterable[str]) -> dict[str, int]:
        """`count` of each of `opcodes`."""
        return {opcode: self.count(opcode) for opcode in opcodes}

    def __contains__(self, opcode: str) -> bool:
        return self.count(opcode) > 0

    def __len__(self) -> int:
        return len(self.instructions)


@dataclasses.dataclass(frozen=True)
class Loop(Code):
    """The body of a loop.

    Attributes:
      head: Address of the block that each round begins with.
    """

    head: int


@dataclasses.dataclass(frozen=True)
class Kernel(Code):
    """A whole kernel.

    Attributes:
      labels: Address of each label.
    """

    labels: dict[str, int] = dataclasses.field(default_factory=dict)

    def loops(self) -> tuple[Loop, ...]:
        """All loops, outer ones first, each with the instructions of the loops inside it.

        These are natural loops: what runs between the head of a loop and a jump back to it. Code that the
        compiler moved away, such as the slow path of a wait, belongs to the loop it returns to.
        """
        return _natural_loops(self)

    def innermost_loops(self, *opcodes: str) -> tuple[Loop, ...]:
        """The loops that hold all of `opcodes` and no smaller loop that does so too."""
        loops = [loop for loop in self.loops() if all(opcode in loop for opcode in opcodes)]
        bodies = [frozenset(loop.instructions) for loop in loops]
        return tuple(
            loop
            for loop, body in zip(loops, bodies, strict=True)
            if not any(other < body for other in bodies)
        )

    def divide_round(self, outer: Loop, inner: Sequence[Loop]) -> tuple[Code, tuple[Loop, ...]]:
        """Divides one round of `outer` at loops inside it that it runs through one after another.

        Returns:
          What a round runs through before the first of them, and `inner` in the order of the round.

        Raises:
          SassError: A round can run through them in more than one order, or there is none.
        """
        return _divide_round(self, outer, inner)

    def skipped(self, loop: Loop, opcode: str) -> tuple[Code, Code]:
        """The one part of `loop` with `opcode`, which some rounds jump over, and what runs before it.

        Returns:
          The part, straight code; and the instructions that every round runs through before it, in order.

        Raises:
          SassError: There are several such parts or none, or a round cannot jump over it.
        """
        return _skipped(self, loop, opcode)


def find_nvdisasm() -> pathlib.Path:
    """Returns the disassembler of the installed package, or else the one on PATH.

    Raises:
      NvdisasmNotFoundError: There is neither.
    """
    namespace = importlib.util.find_spec("nvidia")
    for folder in (namespace.submodule_search_locations if namespace else None) or ():
        for path in sorted(pathlib.Path(folder).glob("*/bin/nvdisasm")):
            return path
    on_path = shutil.which("nvdisasm")
    if on_path is None:
        raise NvdisasmNotFoundError("no nvdisasm: `pip install 'jax_r2p[audit]'`, or put it on PATH")
    return pathlib.Path(on_path)


def disassemble(cubin: bytes) -> Kernel:
    """Returns the instructions of the one kernel in `cubin`.

    Raises:
      NvdisasmNotFoundError: There is no disassembler.
      SassError: The disassembler refused the cubin, or wrote what `parse` cannot read.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([find_nvdisasm(), "-c", path], capture_output=True, text=True)
    if done.returncode != 0:
        raise SassError(f"nvdisasm failed with exit code {done.returncode}: {done.stderr.strip()}")
    return parse(done.stdout)


def parse(text: str) -> Kernel:
    """Parses the output of `nvdisasm -c` for one kernel.

    Raises:
      SassError: There is no instruction, more than one kernel, or a jump to a label that is not there.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    waiting: list[str] = []
    for line in text.splitlines():
        if match := _LABEL.match(line):
            waiting.append(match["label"])
        elif match := _INSTRUCTION.match(line):
            address = int(match["address"], 16)
            if instructions and address <= instructions[-1].address:
                raise SassError(
                    f"address {address:#x} follows {instructions[-1].address:#x}: more than one kernel?"
                )
            labels |= dict.fromkeys(waiting, address)
            waiting.clear()
            instructions.append(
                Instruction(address, match["opcode"], match["operands"].strip(), guard=match["guard"])
            )
    if not instructions:
        raise SassError("no instructions in the text of the disassembler")
    return Kernel(tuple(instructions), labels)


def _natural_loops(kernel: Kernel) -> tuple[Loop, ...]:
    successors = _flow(kernel)
    predecessors = _reversed(successors)
    dominators = _dominators(kernel.instructions[0].address, successors, predecessors)

    bodies: dict[int, set[int]] = {}
    for source, targets in successors.items():
        for head in targets & dominators.get(source, set()):
            body = bodies.setdefault(head, {head})
            todo = [source]
            while todo:
                block = todo.pop()
                if block not in body:
                    body.add(block)
                    todo.extend(block for block in predecessors[block] if block in dominators)
    blocks = _blocks(kernel, successors)
    loops = [
        Loop(tuple(i for block in sorted(body) for i in blocks[block]), head) for head, body in bodies.items()
    ]
    return tuple(sorted(loops, key=lambda loop: (-len(loop), loop.head)))


def _divide_round(kernel: Kernel, outer: Loop, inner: Sequence[Loop]) -> tuple[Code, tuple[Loop, ...]]:
    if not inner:
        raise SassError("no loops to divide a round at")
    body = {instruction.address for instruction in outer.instructions}
    # Without the jumps back to the head, and without those out of the loop.
    successors = {
        block: {target for target in targets if target in body and target != outer.head}
        for block, targets in _flow(kernel).items()
        if block in body
    }
    after = {loop.head: _reachable(loop.head, successors) for loop in inner}
    order = sorted(inner, key=lambda loop: -sum(other.head in after[loop.head] for other in inner))
    for number, loop in enumerate(order):
        later = {other.head for other in order[number + 1 :]}
        earlier = {other.head for other in order[:number]}
        if not later <= after[loop.head] or earlier & after[loop.head]:
            raise SassError(f"the loops at {', '.join(hex(loop.head) for loop in order)} have no fixed order")
    first = {instruction.address for instruction in order[0].instructions}
    predecessors = _reversed({block: targets for block, targets in successors.items() if block not in first})
    blocks = _blocks(kernel, _flow(kernel))
    leading = _reachable(order[0].head, predecessors) - {order[0].head}
    return Code(tuple(i for block in sorted(leading) for i in blocks[block])), tuple(order)


def _skipped(kernel: Kernel, loop: Loop, opcode: str) -> tuple[Code, Code]:
    body = {instruction.address for instruction in loop.instructions}
    flow = _flow(kernel)
    successors = {block: targets & body for block, targets in flow.items() if block in body}
    blocks = _blocks(kernel, flow)
    holding = [block for block in successors if opcode in Code(tuple(blocks[block]))]
    if len(holding) != 1:
        raise SassError(f"{len(holding)} parts of the loop at {loop.head:#x} have {opcode}, expected one")
    (part,) = holding
    before = _reversed(successors)[part]
    # Whoever comes to the part has a way around it, to where the part goes on.
    if len(before) != 1 or len(flow[part]) != 1 or not flow[part] < flow[next(iter(before))]:
        raise SassError(f"the {opcode} at {part:#x} stand behind no branch that skips them")
    predecessors = _reversed(successors)
    dominators = _dominators(loop.head, successors, predecessors)
    always = sorted(dominators[part] - {part}, key=lambda block: len(dominators[block]))
    return Code(tuple(blocks[part])), Code(tuple(i for block in always for i in blocks[block]))


def _reachable(start: int, successors: Mapping[int, set[int]]) -> set[int]:
    """Returns the blocks that can run after `start`, and itself."""
    found, todo = {start}, [start]
    while todo:
        new = successors.get(todo.pop(), set()) - found
        found |= new
        todo.extend(new)
    return found


def _reversed(successors: Mapping[int, set[int]]) -> dict[int, set[int]]:
    predecessors: dict[int, set[int]] = collections.defaultdict(set)
    for source, targets in successors.items():
        for target in targets:
            predecessors[target].add(source)
    return predecessors


def _flow(kernel: Kernel) -> dict[int, set[int]]:
    """Returns, for the address of each basic block, those of the blocks that can run next."""
    following = {
        here.address: after.address
        for here, after in zip(kernel.instructions, kernel.instructions[1:], strict=False)
    }
    leaders = {kernel.instructions[0].address}
    jumps: dict[int, set[int]] = {}
    for instruction in kernel.instructions:
        base = instruction.opcode.partition(".")[0]
        if base in _UNFOLLOWED:
            raise SassError(f"cannot follow {instruction.opcode} at {instruction.address:#x}")
        if base in _BRANCHES:
            match = _TARGET.search(instruction.operands)
            if match is None or match["label"] not in kernel.labels:
                raise SassError(f"no target for {instruction.opcode} {instruction.operands}")
            jumps[instruction.address] = {kernel.labels[match["label"]]}
        elif base in _ENDS:
            jumps[instruction.address] = set()
        else:
            continue
        # Not only the guard makes a jump conditional: so do predicate operands and BRA.DIV.
        conditional = (
            instruction.guard
            or instruction.operands.split("`")[0].strip(" ,")
            or ".DIV" in instruction.opcode
        )
        after = following.get(instruction.address)
        leaders |= jumps[instruction.address]
        if after is not None:
            leaders.add(after)
            if conditional:
                jumps[instruction.address].add(after)

    successors: dict[int, set[int]] = {}
    block = kernel.instructions[0].address
    for instruction in kernel.instructions:
        if instruction.address in leaders:
            block = instruction.address
        after = following.get(instruction.address)
        if instruction.address in jumps:
            successors[block] = jumps[instruction.address]
        elif after is None:
            successors[block] = set()
        elif after in leaders:
            successors[block] = {after}
    return successors


def _blocks(kernel: Kernel, successors: dict[int, set[int]]) -> dict[int, list[Instruction]]:
    blocks: dict[int, list[Instruction]] = {}
    for instruction in kernel.instructions:
        if instruction.address in successors:
            blocks[instruction.address] = current = []
        current.append(instruction)
    return blocks


def _dominators(
    entry: int, successors: dict[int, set[int]], predecessors: dict[int, set[int]]
) -> dict[int, set[int]]:
    """Returns, for each block that can be reached, the blocks that every path to it runs through."""
    order = [entry]
    for block in order:
        order.extend(sorted(successors[block] - set(order)))
    reachable = set(order)
    dominators = {block: set(reachable) for block in order}
    dominators[entry] = {entry}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [dominators[p] for p in predecessors[block] if p in reachable]
            update = {block} | set.intersection(*known)
            if update != dominators[block]:
                dominators[block] = update
                changed = True
    return dominators
