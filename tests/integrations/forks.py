"""Runs that die: functions in forks of one process, which imports the trainers once and trains nothing itself.

Every run has one thread, so that its bits do not depend on who asked for it.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing as mp
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 240.0
"""Seconds that the ranks of a function may take together; a hang is an error."""

KILLED = "was killed"

Outcome = tuple[Any, str | None]
"""A result, and what went wrong or None."""


class Forks:
    """Calls functions in processes of their own; several ranks share a group on gloo.

    A function is given as "module.name", module in this folder, so that only forks import trainers.
    """

    def __init__(self) -> None:
        self._pipe, theirs = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, function: str, *arguments: Any, ranks: int = 1) -> Any:
        """Return the result of rank 0, once all ranks are done."""
        result, failure = self._run(function, arguments, ranks)
        if failure is not None:
            raise AssertionError(f"{function}{arguments} {failure}")
        return result

    def kill(self, function: str, *arguments: Any, ranks: int = 1) -> None:
        """Run a function one rank of which kills itself, whereupon all are killed."""
        _, failure = self._run(function, arguments, ranks)
        if failure != KILLED:
            raise AssertionError(f"{function}{arguments} was to be killed: {failure}")

    def close(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def _run(self, function: str, arguments: tuple[Any, ...], ranks: int) -> Outcome:
        self._pipe.send((function, arguments, ranks))
        if not self._pipe.poll(TIMEOUT):
            self.close()
            raise TimeoutError(f"{function}{arguments} hangs")
        outcome: Outcome = self._pipe.recv()
        return outcome


def die() -> None:
    """End this process as a machine that fails does: nothing is flushed, nothing is said."""
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(pipe: Connection) -> None:
    os.setsid()
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments, ranks = pipe.recv()
        except EOFError:
            return
        module, _, name = function.rpartition(".")
        call = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        gc.freeze()  # or every fork's collector walks, and so copies, all that was imported
        with tempfile.TemporaryDirectory() as folder:
            pipe.send(_fork(call, arguments, ranks, Path(folder)))


def _fork(function: Callable[..., Any], arguments: tuple[Any, ...], ranks: int, folder: Path) -> Outcome:
    """Run a function on all ranks; when one fails, the others are killed and its failure is that of all."""
    running: dict[int, int] = {}
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _child(function, arguments, rank, ranks, folder)
        running[pid] = rank
    result, failure = None, None
    while running:
        pid, status = os.wait()
        rank = running.pop(pid)
        if failure is not None:
            continue
        found, failure = _outcome(status, folder / f"rank{rank}")
        if rank == 0:
            result = found
        if failure is not None:
            if _any_killed(running):
                failure = KILLED  # and so the others lost their connection
            for other in running:
                os.kill(other, signal.SIGKILL)
    return result, failure


def _any_killed(running: dict[int, int]) -> bool:
    """Whether a rank that nobody has waited for yet was killed; takes those that have ended out."""
    found = False
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            running.pop(pid)
            found = found or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL)
    return found


def _outcome(status: int, path: Path) -> Outcome:
    if os.WIFSIGNALED(status):
        return None, KILLED if os.WTERMSIG(status) == signal.SIGKILL else f"ended by signal {os.WTERMSIG(status)}"
    outcome: Outcome = pickle.loads(path.read_bytes())
    return outcome


def _child(function: Callable[..., Any], arguments: tuple[Any, ...], rank: int, ranks: int, folder: Path) -> None:
    """Run the function, leave its result in the folder, and end without the cleaning up of a whole interpreter."""
    import torch
    import torch.distributed as dist

    try:
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # asked for, not used: the group is there
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        outcome: Outcome = (function(*arguments), None)
    except BaseException:
        outcome = (None, f"failed on rank {rank}:\n{traceback.format_exc()}")
    (folder / f"rank{rank}").write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
