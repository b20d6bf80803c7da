"""Costs of a compiled kernel, read from its machine code.

For NVIDIA GPUs, registers and stack are read from `cuobjdump -res-usage` and the rest from the SASS that `cuobjdump
-sass` prints; Triton brings this program. For AMD GPUs, everything is read from the assembly text. An instruction
counts once however often it runs, and padding does not count.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BULK = 16
"""Bytes counted for a load by a copy engine (TMA), which is as good as the widest load of a thread."""


@dataclass(frozen=True)
class Figures:
    """The figures of one kernel on one target.

    registers:    vector registers per thread (on AMD with accumulators).
    scalars:      scalar registers per wave (AMD only).
    spills:       on NVIDIA instructions that move a spilled register (LDL and STL), on AMD registers spilled.
    stack:        bytes of stack and local memory per thread (on AMD scratch memory).
    shared:       bytes of shared memory per program.
    instructions: number of instructions.
    matrix:       number of instructions of the matrix units by kind, without their shape: {"HGMMA.F32.BF16": 4}.
    waits:        number of waits for products of the matrix units of Hopper (WARPGROUP.DEPBAR). A warp starts several
                  products and waits once; as many waits as products mean that ptxas lets each of them wait for the one
                  before, because registers are short or other instructions lie between. None where there are none.
    loads:        number of loads from global memory by bytes per thread: {"16": 8, "2": 1}.
    wrong:        instructions that cannot be right: reads of uniform registers that no earlier instruction writes, and
                  products whose descriptor has an upper word that is no constant (NVIDIA only).
    """

    registers: int
    spills: int
    stack: int
    shared: int
    instructions: int
    scalars: int = 0
    matrix: dict[str, int] = field(default_factory=dict)
    waits: int | None = None
    loads: dict[str, int] = field(default_factory=dict)
    wrong: int = 0

    @property
    def narrowest_load(self) -> int | None:
        return min(map(int, self.loads), default=None)

    @property
    def mean_load(self) -> float | None:
        count = sum(self.loads.values())
        return sum(int(width) * times for width, times in self.loads.items()) / count if count else None


def figures_of(compiled: Any) -> Figures:
    """The figures of what `triton.compile` returned."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        return of_cubin(compiled.asm["cubin"], shared)
    return of_amdgcn(compiled.asm["amdgcn"], shared)


def of_cubin(cubin: bytes, shared: int) -> Figures:
    """The figures of an NVIDIA kernel. `shared` is that of a launch, which is not in the cubin."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return of_sass(text, shared)


def of_sass(text: str, shared: int) -> Figures:
    """The figures from what `cuobjdump -res-usage -sass` prints."""
    # a function that is not inlined has a line of its own, which the kernel's line includes
    usage = {name: max(map(int, re.findall(rf"\b{name}:(\d+)", text))) for name in ("REG", "STACK", "LOCAL")}
    opcodes = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.MULTILINE)
    opcodes = [opcode for opcode in opcodes if opcode != "NOP"]
    names = Counter(opcode.split(".")[0] for opcode in opcodes)
    return Figures(
        registers=usage["REG"],
        spills=names["LDL"] + names["STL"],
        stack=usage["STACK"] + usage["LOCAL"],
        shared=shared,
        instructions=len(opcodes),
        matrix=_tally(map(_sass_matrix, opcodes)),
        waits=sum(opcode.startswith("WARPGROUP.DEPBAR") for opcode in opcodes) if names["HGMMA"] else None,
        loads=_tally(map(_sass_load, opcodes)),
        wrong=len(unwritten(text)) + len(misdescribed(text)),
    )


INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
"""This pattern finds an instruction, its name and its operands."""
UNIFORM = re.compile(r"U(?!BL|TMA|SETP|ISETP|PLOP|TCATOM)|S2UR|R2UR|LDCU|VOTEU|CS2UR|REDUX")
"""Instructions that write a uniform register, which is the first operand."""
IN_PAIRS = re.compile(r"(ULDC|LDCU|UMOV|S2UR|UIADD3)\.64|UIMAD\.WIDE")
"""Instructions that write two consecutive uniform registers."""


def unwritten(text: str) -> list[str]:
    """Instructions that read a uniform register (UR) which no instruction above them writes.

    A loop only jumps back, so in correct code the instruction that writes a register stands above all that read it.
    ptxas 12.8, which Triton 3.6 brings, makes wrong code of this kind from addresses in shared memory where a kernel
    has tiles of two widths (kernels/gated_linear_attention/README.md).
    """
    written: set[int] = set()
    found = []
    for line in text.splitlines():
        if "Function :" in line:
            written.clear()
        if not (matched := INSTRUCTION.match(line)):
            continue
        opcode, operands = matched.groups()
        target = re.match(r"(?:UP\w+,\s*)?UR(\d+)", operands) if UNIFORM.match(opcode) else None
        sources = operands[target.end() :] if target else operands
        if opcode.startswith("HGMMA"):
            # a descriptor has two registers for each operand in shared memory; with A in registers its two are unused
            first = 2 if re.match(r"R\d+,\s*R\d+", operands) else 0
            read = {int(d) + i for d in re.findall(r"gdesc\[UR(\d+)\]", operands) for i in range(first, 4)}
        else:
            read = set(map(int, re.findall(r"\bUR(\d+)\b", sources)))
            if opcode == "UPRMT" and target:
                # writes half of the register and keeps the other half, which is not used later
                read.discard(int(target[1]))
        if not read <= written:
            found.append(f"{opcode} {operands}")
        if target:
            written |= {int(target[1]), int(target[1]) + 1} if IN_PAIRS.match(opcode) else {int(target[1])}
            if ".128" in opcode:
                written |= {int(target[1]) + i for i in range(4)}
    return found


CONSTANT, COMPUTED, ANY = "constant", "computed", "any"
"""A register holds a constant, or a result of other inputs than constants, or something that is not followed."""
COMPUTES = re.compile(r"ULDC|LDCU|S2UR|UIMAD|ULEA|USHF|USGXT|UIADD3")
"""These instructions compute their result, unless they only add constants."""


def misdescribed(text: str) -> list[str]:
    """Matrix products (HGMMA) whose descriptor of an operand in shared memory has an upper word that is computed.

    A descriptor has two words in uniform registers: the address, and above it a constant that says how the tile lies in
    memory. ptxas 12.8, which Triton 3.6 brings, makes wrong code of this kind, too: it adds the constant to a register
    that has been given to something else (kernels/delta_rule/LOG.md).
    Constants are followed through copies, also by way of vector registers, sums and "or". What other instructions make
    of them counts as right, and so does a wrong constant; jumps and conditions are left out.
    """
    uniform: dict[int, str] = {}
    vector: dict[int, str] = {}
    found = []

    def held(operand: str, above: int = 0) -> str:
        """Says what an operand holds, or the register that is `above` it by so many."""
        matched = re.fullmatch(r"-?(U?)R(\d+)", operand.removesuffix(".reuse"))
        return (uniform if matched[1] else vector).get(int(matched[2]) + above, ANY) if matched else CONSTANT

    def combined(kinds: Iterable[str]) -> str:
        """Says what a sum or an "or" of such operands holds."""
        present = set(kinds)
        return next(kind for kind in (ANY, COMPUTED, CONSTANT) if kind in present)

    for line in text.splitlines():
        if "Function :" in line:
            uniform.clear()
            vector.clear()
        if not (matched := INSTRUCTION.match(line)):
            continue
        opcode, arguments = matched.groups()
        if opcode.startswith("HGMMA"):
            # with A in registers, only the last two registers are read, which describe B
            words = (3,) if re.match(r"R\d+,\s*R\d+", arguments) else (1, 3)
            descriptors = map(int, re.findall(r"gdesc\[UR(\d+)\]", arguments))
            if any(uniform.get(first + word) == COMPUTED for first in descriptors for word in words):
                found.append(f"{opcode} {arguments}")
            continue
        operands = [x for x in map(str.strip, arguments.split(",")) if not re.fullmatch(r"!?U?P[\dT]", x)]
        target = re.fullmatch(r"(U?)R(\d+)", operands[0]) if operands else None
        if target is None:
            continue
        known, first, sources = uniform if target[1] else vector, int(target[2]), operands[1:]
        kind = COMPUTED if target[1] and COMPUTES.match(opcode) else ANY
        if opcode in ("UMOV", "R2UR", "MOV", "IMAD.U32", "IMAD.MOV.U32"):
            kind = held(sources[-1])
        elif opcode in ("UIADD3", "UIADD3.X") or (opcode == "ULOP3.LUT" and sources[3:4] == ["0xfc"]):
            kind = combined(map(held, sources[:3]))
        elif opcode == "UIADD3.64":
            known[first + 1] = combined(held(x, above=1) for x in sources)
        elif re.search(r"\.(64|WIDE|128)", opcode):
            known.update(dict.fromkeys(range(first + 1, first + (4 if ".128" in opcode else 2)), kind))
        known[first] = kind
    return found


def _sass_matrix(opcode: str) -> str | None:
    """The kind of a matrix instruction: HGMMA.64x64x16.F32.BF16 -> HGMMA.F32.BF16. None for others."""
    name, *parts = opcode.split(".")
    return ".".join([name, *(part for part in parts if not part[0].isdigit())]) if name.endswith("MMA") else None


def _sass_load(opcode: str) -> str | None:
    """Bytes per thread of a load: LDG.E.128 -> 16. None for others.

    Parts such as LTC128B are hints for the cache, and a load without a width has four bytes.
    """
    name, *parts = opcode.split(".")
    if name in ("UTMALDG", "UBLKCP"):
        return str(BULK)
    if name not in ("LDG", "LDGSTS"):
        return None
    width = next((part for part in parts if re.fullmatch(r"[US]?(8|16|64|128)", part)), "32")
    return str(int(width.lstrip("US")) // 8)


def of_amdgcn(text: str, shared: int) -> Figures:
    """The figures of an AMD kernel from its assembly text."""
    meta = {name: int(value) for name, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    opcodes = re.findall(r"^\t((?:v|s|ds|global|buffer|flat|scratch|image)_\w+)", text, re.MULTILINE)
    opcodes = [opcode for opcode in opcodes if opcode not in ("s_nop", "s_code_end")]
    return Figures(
        registers=meta["vgpr_count"],
        scalars=meta["sgpr_count"],
        spills=meta["vgpr_spill_count"] + meta["sgpr_spill_count"],
        stack=meta["private_segment_fixed_size"],
        shared=shared,
        instructions=len(opcodes),
        matrix=_tally(map(_amd_matrix, opcodes)),
        loads=_tally(map(_amd_load, opcodes)),
    )


def _amd_matrix(opcode: str) -> str | None:
    """The kind of a matrix instruction: v_mfma_f32_32x32x8_bf16 -> mfma_f32_bf16. None for others."""
    found = re.match(r"v_((?:s?mfma|s?wmma)\w*)", opcode)
    return re.sub(r"_\d+x\d+x\d+", "", found[1]) if found else None


def _amd_load(opcode: str) -> str | None:
    """Bytes per thread of a load: global_load_dwordx4 -> 16. None for others."""
    found = re.match(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)", opcode)
    if not found:
        return None
    if words := re.match(r"dwordx(\d)", found[1]):
        return str(4 * int(words[1]))
    if bits := re.match(r"[bui](32|64|96|128)", found[1]):
        return str(int(bits[1]) // 8)
    if found[1].startswith("dword"):
        return "4"
    return "2" if "short" in found[1] or re.search(r"[bui]16", found[1]) else "1"


def _tally(kinds: Iterable[str | None]) -> dict[str, int]:
    """Number of occurrences of each kind; None is not counted."""
    return dict(sorted(Counter(kind for kind in kinds if kind).items()))
