"""Kernels compiled ahead of time, for architectures that need not be present.

`pairs` lists few jobs in which all pairs of choices occur, the architecture being one of them;
`compile_` gives the machine code of a job, `cost` what it costs, `complaint` what is wrong with
that. Tests and the tables in the docs are made from these.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stquant.kernels.triton import steps, transfers
from stquant.kernels.triton.codec import PLAIN
from stquant.kernels.triton.launch import CHUNK, RAGGED_CHUNK
from stquant.kernels.triton.serving import MAX_RAGGED_BLOCK
from stquant.kernels.triton.tables import THREADS, options
from stquant.kernels.triton.tiles import FLOAT32

ARCHITECTURES: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

SIGNED = ((1, 0, 0), (2, 0, 1), (2, 2, 1), (2, 3, 1), (2, 2, 0), (3, 4, 0), (3, 5, 0), (3, 6, 1), (3, 8, 0))
"""Family, bits and prepay of a momentum."""
SQUARES = ((1, 0, 0), (4, 0, 0), (4, 1, 1), (4, 2, 1), (4, 3, 1), (4, 4, 1), (4, 5, 0), (4, 6, 0), (4, 8, 0))
"""Family, bits and whether rounding is stochastic of an average of squares."""
SECONDS = (*SQUARES, "sgd", "lion")
"""The same, and the rules without one."""
WEIGHTS = (
    *((0, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0), (2, 2, 0, 0), (2, 2, 0, 1), (2, 0, 0, 1)),
    *((1, 1, 0, 0), (1, 1, 0, 1), (1, 1, 3, 0), (1, 1, 6, 1), (1, 1, 8, 1), (1, 0, 16, 0)),
)
"""Dtypes of parameter and gradient (fp32, bf16, fp16), bits of the residual, stochastic rounding."""
BLOCKS = (
    *((32, 1, 1), (64, 1, 1), (128, 1, 1), (256, 1, 1), (512, 1, 1), (1024, 1, 1), (32, 1, 2), (128, 1, 2)),
    *(
        (32, 0, 1),
        (64, 0, 1),
        (128, 0, 1),
        (256, 0, 1),
        (MAX_RAGGED_BLOCK, 0, 1),
        (128, 0, 2),
        (MAX_RAGGED_BLOCK, 0, 2),
    ),
)
"""Block, whether rows are made of whole blocks, and whether they follow each other (1) or lie APART (2)."""

Kinds = Sequence[Sequence[Any]]
"""Lists to choose from: a momentum, a second state or a rule, weights, a block, an architecture."""
MANY: Kinds = (SIGNED, SECONDS, WEIGHTS, BLOCKS, tuple(ARCHITECTURES))
FEW: Kinds = (
    ((1, 0, 0), (2, 2, 1), (3, 4, 0), (3, 8, 0)),
    ((1, 0, 0), (4, 1, 1), (4, 4, 1), (4, 8, 0), "sgd", "lion"),
    ((0, 0, 0, 0), (1, 1, 8, 1), (1, 0, 16, 0), (2, 2, 0, 1)),
    ((128, 1, 1), (128, 0, 1), (1024, 1, 1), (32, 1, 1), (128, 0, 2)),
    tuple(ARCHITECTURES),
)
"""What the tests compile pairs of: a minute's worth."""

Job = tuple[str, str, dict[str, int]]
"""Architecture, kernel, and its constants."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the machine code of a kernel costs.

    Attributes:
        registers: Vector registers of a thread.
        loads: Loads from memory, and how many of them are 128 bits wide; of a record, none is counted so.
        stores: Stores to memory, and how many of them are 128 bits wide.
        spills: Loads and stores of registers spilled to memory.
        parked: Scalar registers that ROCm's compiler keeps in lanes of vector registers for lack of
            scalar ones; nothing of that goes to memory.
        instructions: Instructions of the kernel.
    """

    registers: int
    loads: tuple[int, int]
    stores: tuple[int, int]
    spills: int
    parked: int
    instructions: int


def every(architectures: Sequence[str]) -> list[Job]:
    """Every combination, of AdamW with all options, shuffled: each part of the list is a fair sample."""
    rows: list[tuple[Any, ...]] = list(
        itertools.product(architectures, SIGNED, SECONDS, WEIGHTS, BLOCKS, (0, 1), (0, 1))
    )
    random.Random(0).shuffle(rows)
    jobs = {}
    for architecture, *choices in rows:
        name, constants = kernel(*choices)
        # SGD and Lion have fewer options.
        jobs[(architecture, name, *constants.values())] = (architecture, name, constants)
    return list(jobs.values())


def pairs(kinds: Kinds, seed: int = 0) -> list[Job]:
    """Few jobs in which every two choices of different lists occur together."""
    missing = {
        pair
        for one, two in itertools.combinations(range(len(kinds)), 2)
        for pair in itertools.product(
            ((one, i) for i in range(len(kinds[one]))), ((two, i) for i in range(len(kinds[two])))
        )
    }
    draw = random.Random(seed)
    jobs: list[Job] = []
    while missing:
        wanted = dict(min(missing))
        rows = [[wanted.get(place, draw.randrange(len(kind))) for place, kind in enumerate(kinds)] for _ in range(200)]
        best = max(rows, key=lambda row: len(missing.intersection(itertools.combinations(enumerate(row), 2))))
        missing.difference_update(itertools.combinations(enumerate(best), 2))
        first, second, weight, block, architecture = (kind[i] for kind, i in zip(kinds, best, strict=True))
        jobs.append((architecture, *kernel(first, second, weight, block, len(jobs) % 2)))
    return jobs


def kernel(
    first: Sequence[int],
    second: Sequence[int] | str,
    weight: Sequence[int],
    block: Sequence[int],
    maximize: int = 0,
    decayed: int = 0,
) -> tuple[str, dict[str, int]]:
    """The kernel of choices from the lists above, and its constants."""
    if not isinstance(second, str):
        return "adam", adam(first, second, weight, block, maximize, decayed)
    constants = adam(first, (0, 0, 0), weight, block, maximize, 1)
    taken = {"sgd": ("DECAYED", "PREPAY", "NESTEROV"), "lion": ()}[second]
    constants["NESTEROV"] = maximize
    left_out = {"DECAYED", "PREPAY", "NESTEROV", "SECOND", "SECOND_BITS", "NOISY", "MAXIMUM"} - {*taken}
    return second, {name: value for name, value in constants.items() if name not in left_out}


def adam(
    first: Sequence[int],
    second: Sequence[int],
    weight: Sequence[int],
    block: Sequence[int],
    maximize: int = 0,
    decayed: int = 0,
) -> dict[str, int]:
    """Constants of a variant of the AdamW kernel, from entries of the lists above."""
    names = ("PARAM", "GRAD", "RESIDUAL_BITS", "STOCHASTIC", "MAXIMIZE", "DECAYED", "FIRST", "FIRST_BITS", "PREPAY")
    size, whole, noise = block
    values = (*weight[:3], weight[3] * noise, maximize, decayed, *first, *second[:2], second[2] * noise, 0)
    geometry = {"WHOLE": whole, "BLOCKS": _blocks(size, whole), "BLOCK": size}
    return dict(zip((*names, "SECOND", "SECOND_BITS", "NOISY", "MAXIMUM"), values, strict=True)) | geometry


def others(architectures: Sequence[str]) -> list[Job]:
    """What the lists above do not make, once with whole and once with short blocks; the architectures take turns."""
    turns, found = itertools.cycle(architectures), []
    for whole in (0, 1):
        geometry = {"WHOLE": whole, "BLOCKS": _blocks(128, whole), "BLOCK": 128}
        constants = {"DTYPE": whole, "FAMILY": 4, "BITS": 3 + whole, "TO_FAMILY": 4 if whole else 3, "TO_BITS": 4}
        found += [(name, constants | geometry) for name in ("decode", "encode", "recode", "stats")]
        found.append(("adam", adam((1, 0, 0), (1, 0, 0), (0, 0, 0, 0), (128, whole, 1)) | {"MAXIMUM": 1}))
        found.append(kernel((0, 0, 0), "sgd", (1, 1, 8, 1), (128, whole, 1)))
    return [(next(turns), *job) for job in found]


def _blocks(block: int, whole: int) -> int:
    return max(1, (CHUNK if whole else RAGGED_CHUNK) // block)


def compile_(architecture: str, name: str, constants: Mapping[str, int]) -> Any:
    """Compile a kernel for an architecture; the result's `asm` holds its machine code.

    Raises:
        RuntimeError: This process has loaded the kernels into triton's interpreter.
    """
    function = getattr(steps if hasattr(steps, name) else transfers, name)
    if not isinstance(function, triton.JITFunction):
        raise RuntimeError("the kernels are loaded into the interpreter; unset TRITON_INTERPRET to compile them")
    signature = {"items": "*i64", "chunks": "*i32", **dict.fromkeys(constants, "constexpr")}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=dict(constants), attrs={(0,): aligned, (1,): aligned})
    target = ARCHITECTURES[architecture]
    return triton.compile(source, target=target, options=options(target.warp_size))


def cost(compiled: Any) -> Cost:
    """Read the cost of a compiled kernel from its machine code."""
    return _cuda_cost(compiled) if "cubin" in compiled.asm else _hip_cost(compiled.asm["amdgcn"])


def complaint(cost: Cost, constants: Mapping[str, int]) -> str | None:
    """Say what is wrong with a kernel: spills, or narrow access in a step of whole blocks."""
    if cost.spills:
        return f"{cost.spills} spills"
    if constants["WHOLE"] and "GRAD" in constants:
        loads, stores = _wide(constants)
        if cost.loads[1] < loads or cost.stores[1] < stores:
            return f"128-bit loads and stores: {cost.loads[1]} of {loads} and {cost.stores[1]} of {stores}"
    return None


def _wide(constants: Mapping[str, int]) -> tuple[int, int]:
    """128-bit loads and stores in which a thread has its parameters, gradients and plain states."""
    elements = constants["BLOCKS"] * constants["BLOCK"] // THREADS
    fp32, half = elements // 4, elements // 8
    param, grad = (fp32 if constants[name] == FLOAT32.value else half for name in ("PARAM", "GRAD"))
    plain = sum(constants.get(state) == PLAIN.value for state in ("FIRST", "SECOND")) + constants.get("MAXIMUM", 0)
    return param + grad + plain * fp32, param + plain * fp32


def _cuda_cost(compiled: Any) -> Cost:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = _tool("nvdisasm", "-hex", file.name)
        usage = _tool("cuobjdump", "-res-usage", file.name)
    mnemonics = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", code, re.MULTILINE)
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None, usage
    return Cost(
        int(found[1]),
        _count(mnemonics, "LDG", "128"),
        _count(mnemonics, "STG", "128"),
        sum(name.startswith(("LDL", "STL")) for name in mnemonics),
        0,
        len(mnemonics),
    )


def _hip_cost(code: str) -> Cost:
    instructions = re.findall(r"^\t([a-z]\w+.*)", code, re.MULTILINE)
    mnemonics = [line.split()[0] for line in instructions]
    # The address of a record, unlike that of an element, is in scalar registers.
    of_records = sum(bool(re.match(r"global_load_dwordx4 .*\bs\[", line)) for line in instructions)
    loads, wide_loads = _count(mnemonics, ("global_load", "buffer_load"), "x4")
    spilled, parked = (int(re.findall(rf"\.{kind}gpr_spill_count:\s*(\d+)", code)[0]) for kind in "vs")
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    assert registers is not None
    return Cost(
        int(registers[1]),
        (loads, wide_loads - of_records),
        _count(mnemonics, ("global_store", "buffer_store"), "x4"),
        spilled + sum(name.startswith("scratch_") for name in mnemonics),
        parked,
        len(mnemonics),
    )


def _count(mnemonics: Sequence[str], starts: str | tuple[str, ...], wide: str) -> tuple[int, int]:
    chosen = [name for name in mnemonics if name.startswith(starts)]
    return len(chosen), sum(wide in name for name in chosen)


def _tool(name: str, *arguments: str) -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    path = str(bundled) if bundled.exists() else shutil.which(name)
    assert path is not None, f"{name} is not part of this triton and not on the path"
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
