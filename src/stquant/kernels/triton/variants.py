"""Kernels compiled ahead of time, for architectures that need not be present.

`covering` lists few variants in which all compile-time choices, or all pairs of them, occur;
`compile_` gives the machine code of one, `cost` what it costs. Tests and the table in the docs are
made from these.
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
from stquant.kernels.triton.launch import CHUNK, MAX_RAGGED_BLOCK, RAGGED_CHUNK, options

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
WEIGHTS = ((0, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (1, 1, 0, 1), (1, 1, 8, 1), (1, 0, 16, 0), (2, 2, 0, 1))
"""Dtypes of parameter and gradient (fp32, bf16, fp16), bits of the residual, stochastic rounding."""
BLOCKS = ((128, 1), (128, 0), (32, 1), (MAX_RAGGED_BLOCK, 0), (1024, 1))
"""Block, and whether rows are made of whole blocks."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the machine code of a kernel costs.

    Attributes:
        registers: Vector registers of a thread.
        loads: Loads from memory, and how many of them are 128 bits wide.
        stores: The same for stores.
        spills: Loads and stores of spilled registers.
        instructions: Instructions of the kernel.
    """

    registers: int
    loads: tuple[int, int]
    stores: tuple[int, int]
    spills: int
    instructions: int


def every() -> list[dict[str, int]]:
    """Every variant of the AdamW kernel."""
    return [adam(*choice) for choice in itertools.product(SIGNED, SQUARES, WEIGHTS, BLOCKS, (0, 1), (0, 1))]


def covering(strength: int, seed: int = 0) -> list[dict[str, int]]:
    """Variants in which every `strength` choices of different kinds occur together at least once."""
    kinds: Sequence[Sequence[Any]] = (SIGNED, SQUARES, WEIGHTS, BLOCKS)
    missing = {
        tuple(zip(places, values, strict=True))
        for places in itertools.combinations(range(len(kinds)), strength)
        for values in itertools.product(*(range(len(kinds[place])) for place in places))
    }
    draw = random.Random(seed)
    chosen: list[dict[str, int]] = []
    while missing:
        candidates = [tuple(draw.randrange(len(kind)) for kind in kinds) for _ in range(50)]
        best = max(candidates, key=lambda row: len(missing & _parts(row, strength)))
        missing -= _parts(best, strength)
        first, second, weight, block = (kind[i] for kind, i in zip(kinds, best, strict=True))
        chosen.append(adam(first, second, weight, block, len(chosen) % 2, 0))
    return chosen


def _parts(row: tuple[int, ...], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(row), strength))


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
    values = (*weight, maximize, decayed, *first, *second, 0, block[1], _blocks(*block), block[0])
    return dict(
        zip((*names, "SECOND", "SECOND_BITS", "NOISY", "MAXIMUM", "WHOLE", "BLOCKS", "BLOCK"), values, strict=True)
    )


def others() -> list[tuple[str, dict[str, int]]]:
    """A few variants of each of the other kernels."""
    found = []
    for (family, bits, prepay), whole in zip(SIGNED[::3], (1, 0, 1), strict=True):
        head = {"PARAM": 1, "GRAD": 1, "RESIDUAL_BITS": 4, "STOCHASTIC": 1, "MAXIMIZE": 0}
        first = {"FIRST": family, "FIRST_BITS": bits}
        tail = {"WHOLE": whole, "BLOCKS": _blocks(128, whole), "BLOCK": 128}
        found.append(("sgd", {**head, "DECAYED": 1, **first, "PREPAY": prepay, "NESTEROV": 1, **tail}))
        found.append(("lion", {**head, **first, **tail}))
        for kernel in ("decode", "encode", "recode", "stats"):
            target = {"TO_FAMILY": 4 if whole else 3, "TO_BITS": 4}
            found.append((kernel, {"DTYPE": whole, "FAMILY": 4, "BITS": 3 + whole, **target, **tail}))
    return found


def _blocks(block: int, whole: int) -> int:
    return max(1, (CHUNK if whole else RAGGED_CHUNK) // block)


def compile_(architecture: str, constants: Mapping[str, int], kernel: str = "adam") -> Any:
    """Compile a variant for an architecture; the result's `asm` holds its machine code.

    Raises:
        RuntimeError: This process has loaded the kernels into triton's interpreter.
    """
    function = getattr(steps if hasattr(steps, kernel) else transfers, kernel)
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
        len(mnemonics),
    )


def _hip_cost(code: str) -> Cost:
    mnemonics = re.findall(r"^\t([a-z]\w+)", code, re.MULTILINE)
    spilled = sum(map(int, re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", code)))
    registers = re.search(r"\.vgpr_count:\s*(\d+)", code)
    assert registers is not None
    return Cost(
        int(registers[1]),
        _count(mnemonics, ("global_load", "buffer_load"), "x4"),
        _count(mnemonics, ("global_store", "buffer_store"), "x4"),
        spilled + sum(name.startswith("scratch_") for name in mnemonics),
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
