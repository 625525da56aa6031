"""More real text that needs no download: words of source code, C++ headers, docstrings."""

from __future__ import annotations

import ast
import collections
import functools
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from stquant.jobs.data import standard_library_text

VOCABULARY = 8192
"""Words that have a row of their own; the first row stands for all others."""

TOPICS = ("asyncio", "collections", "concurrent", "email", "http", "importlib", "tkinter", "unittest", "xml", "json")
"""Packages of the standard library that docstrings are told apart by."""

HELD_OUT = 5
"""One docstring in so many is held out."""


class Docstrings(NamedTuple):
    """Docstrings of the standard library and the package that each is from."""

    train: list[tuple[str, int]]
    validation: list[tuple[str, int]]


@functools.cache
def words() -> tuple[Tensor, Tensor]:
    """Return the standard library's text as indices of words, int64 `[n]`, to train on and held out."""
    parts = [bytes(part.numpy()).decode("utf-8", "replace") for part in standard_library_text()]
    split = [re.findall(r"\w+|[^\w\s]", part) for part in parts]
    frequent = collections.Counter(split[0]).most_common(VOCABULARY - 1)
    index = {word: place for place, (word, _) in enumerate(frequent, start=1)}
    return tuple(torch.tensor([index.get(word, 0) for word in part]) for part in split)  # type: ignore[return-value]


@functools.cache
def headers() -> tuple[Tensor, Tensor]:
    """Return the bytes of torch's C++ headers, uint8 `[n]`, to train on and held out."""
    paths = sorted((Path(torch.__file__).parent / "include" / "ATen").rglob("*.h"))
    parts = [b"".join(path.read_bytes() for path in paths[start::16][:200]) for start in (1, 0)]
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)  # type: ignore[return-value]


@functools.cache
def docstrings() -> Docstrings:
    """Return docstrings of at least 40 characters with the index of their package."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for topic, name in enumerate(TOPICS):
        for path in sorted((root / name).rglob("*.py")):
            if {"test", "tests"} & set(path.parts):
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    text = ast.get_docstring(node) or ""
                    found += [(text, topic)] if len(text) >= 40 else []
    held_out = found[::HELD_OUT]
    return Docstrings([pair for place, pair in enumerate(found) if place % HELD_OUT], held_out)
