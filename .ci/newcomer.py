"""A newcomer's path: the README's commands and examples, from an empty environment.

Makes a virtual environment of its own, installs with the last of the README's alternatives, runs
its Python blocks on a small model, and then its `stquant` lines in order. Only what a reader brings
is added: torch, a model, a checkpoint of torch's AdamW. The example job runs where later lines read
what it writes, and takes two steps instead of minutes; `make` and `torchrun` have tests of their own.

Run: python3 .ci/newcomer.py [REQUIREMENT OF TORCH]
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "newcomer"
BIN = PLACE / "venv" / "bin"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

BROUGHT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64))
params, body, head = list(model.parameters()), list(model[0].parameters()), list(model[2].parameters())
"""
OPTIMIZER = """
import stquant

optimizer = stquant.AdamW(model.named_parameters(), lr=3e-4)
loss = model(torch.ones(8, 128)).square().mean()
"""
ADAMW = """
adamw = torch.optim.AdamW(params)
model(torch.ones(8, 128)).square().mean().backward()
adamw.step()
torch.save(adamw.state_dict(), "adamw.pt")
"""
TRAINER = "Trainer("
"""Begins the one Python block that needs more than torch; a tutorial runs it."""


def run(*command: str, cwd: Path = PLACE) -> None:
    """Run a command of the environment; stop if it fails, and show what it said."""
    print("$", shlex.join(command), flush=True)
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    began = time.monotonic()
    environment = {**os.environ, "PATH": path, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}newcomer: exit status {done.returncode} of {shlex.join(command)}")
    print(f"  {time.monotonic() - began:.0f} s", flush=True)


def run_line(line: str) -> None:
    """Run a line of a bash block, if it is one of the tool."""
    words = shlex.split(line, comments=True)
    if words[:2] == ["stquant", "train"]:
        if {"--out", "--log"} & set(words):
            run(*words, "--steps", "2")
    elif words[:1] == ["stquant"]:
        run(*words)


def main() -> None:
    """Carry out the README."""
    shutil.rmtree(PLACE, ignore_errors=True)
    venv.create(PLACE / "venv", with_pip=True)
    run("pip", "install", "--quiet", "--disable-pip-version-check", *(sys.argv[1:] or ["torch"]))
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    python = [text for kind, text in blocks if kind == "python" and not text.startswith(TRAINER)]
    lines = [line for kind, text in blocks if kind == "bash" for line in text.splitlines()]
    assert len(python) > 3, "the README has lost its examples"
    assert len(lines) > 10, "the README has lost its commands"
    install = [line for line in lines if line.startswith("pip install")][-1]
    run(*shlex.split(install, comments=True), "--quiet", "--disable-pip-version-check", cwd=ROOT)
    run("python", "-c", "import stquant._cpu")  # the compiled kernels came with it
    script = "\n".join(f"def example_{i}():\n{_indented(BROUGHT, OPTIMIZER, text)}" for i, text in enumerate(python))
    calls = "\n".join(f"example_{i}()" for i in range(len(python)))
    (PLACE / "examples.py").write_text(f"{BROUGHT}{ADAMW}\n{script}\n{calls}\n")
    run("python", "-W", "error::SyntaxWarning", "examples.py")
    for line in lines:
        run_line(line)
    print("newcomer: the README holds")


def _indented(*parts: str) -> str:
    return "".join(f"    {line}\n" for part in parts for line in part.splitlines())


if __name__ == "__main__":
    main()
