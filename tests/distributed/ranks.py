"""Real processes on gloo, started once per number of ranks and given one function after the other."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0
"""Seconds that a function may take; a hang is an error."""


class Ranks:
    """A process group of `size` processes that run functions of modules, all of them at once."""

    def __init__(self, size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "stquant", "torch.distributed.checkpoint"])
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, os.path.join(self._folder.name, "store"), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(*arguments)` on every rank and return the results in the order of ranks."""
        self.start(function, *arguments)
        results, waiting = [None] * len(self._pipes), list(self._pipes)
        while waiting:
            ready = wait(waiting, TIMEOUT)
            if not ready:
                self.close()
                raise TimeoutError(f"{function.__name__} hangs on {len(waiting)} of {len(results)} ranks")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                results[rank], error = pipe.recv()
                waiting.remove(pipe)
                if error is not None:
                    self.close()
                    raise AssertionError(f"{function.__name__} on rank {rank}:\n{error}")
        return results

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, arguments))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((getattr(importlib.import_module(module), name)(*arguments), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
