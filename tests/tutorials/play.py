"""Carries out a tutorial as a reader would, in the current folder: python -m tests.tutorials.play PAGE.

Python blocks share one namespace, those with a title become files, bash blocks run in a shell, and
a hidden `prepare` comment makes what a reader has already. A text block is what the block before
it prints; where the page says something else, the last line of the output says so, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r'^```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$|^<!-- prepare\n(?P<hidden>.*?)^-->$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: "python", "file", "bash" or "text".
        text: What stands in it.
        title: Name of the file.
        start: Place of the text in the page.
        line: Number of its first line.
    """

    kind: str
    text: str
    title: str
    start: int
    line: int


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for found in _BLOCK.finditer(page):
        name = "hidden" if found["hidden"] is not None else "text"
        kind = "python" if name == "hidden" else "file" if found["title"] else found["kind"]
        start = found.start(name)
        yield Block(kind, found[name], found["title"] or "", start, 1 + page.count("\n", 0, start))


def play(path: Path) -> list[str]:
    """Carry out a page in the current folder; return what each of its text blocks should be."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed, shown = "", []
    for block in blocks(path.read_text()):
        if block.kind == "text":
            shown.append(printed)
        elif block.kind == "file":
            Path(block.title).write_text(block.text)
        elif block.kind == "bash":
            printed = _shell(block.text)
        elif block.kind == "python":
            printed = _python(block, path, namespace)
        else:
            raise ValueError(f"{path}, line {block.line}: nobody knows how to run {block.kind!r}")
    return shown


def _python(block: Block, path: Path, namespace: dict[str, object]) -> str:
    out = io.StringIO()
    code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def _shell(text: str) -> str:
    """Run commands of the environment of this interpreter; their errors go to ours."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
    )
    if done.returncode:
        raise SystemExit(f"exit status {done.returncode} of:\n{text}{done.stdout}")
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


if __name__ == "__main__":
    sys.path.insert(0, "")
    print(json.dumps(play(Path(sys.argv[1]))))
