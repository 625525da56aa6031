"""Several runs at once, one thread each, with their progress told to a callback."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import torch

from stquant.jobs.contenders import contender
from stquant.jobs.training import Run
from stquant.jobs.workloads import WORKLOADS


@dataclass(frozen=True, slots=True)
class Job:
    """One run, by names.

    Attributes:
        model: Name of the workload.
        optimizer: What `contender` takes.
        seed: Seed of the run.
        steps: Steps, or None for the workload's own number.
        dtype: Name of the parameters' dtype.
        master_bits: Bits of the residual of bf16 parameters.
    """

    model: str
    optimizer: str
    seed: int = 0
    steps: int | None = None
    dtype: str = "float32"
    master_bits: int | str | None = "auto"

    def run(self) -> Run:
        """Return the run, not yet started."""
        chosen = contender(self.optimizer, self.seed, self.master_bits)
        return Run(WORKLOADS[self.model], chosen, self.seed, self.steps, getattr(torch, self.dtype))


Progress = Callable[[Job, int, int, float], None]
"""Told the job, steps done, steps in all, and the last training loss."""

_REPORT_EVERY = 10
_queue: Queue[Any] | None = None


def run_all(jobs: Sequence[Job], progress: Progress, workers: int | None = None) -> list[dict[str, Any]]:
    """Run all jobs in as many processes as there are cores and return their results in order."""
    context = get_context("spawn")
    queue: Queue[Any] = context.Queue()
    workers = min(len(jobs), workers or os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, _start_worker, (queue,)) as pool:
        futures = [pool.submit(_run, job) for job in jobs]
        for index, future in enumerate(futures):
            future.add_done_callback(_announce(queue, index))
        finished = 0
        while finished < len(jobs):
            message = queue.get()
            if not isinstance(message, int):
                progress(*message)
                continue
            # A worker's messages may still be on their way when it is done: the last one is told from here.
            finished += 1
            if futures[message].exception() is None:
                result, loss = futures[message].result()
                progress(jobs[message], result["steps"], result["steps"], loss)
        return [future.result()[0] for future in futures]


def _announce(queue: Queue[Any], index: int) -> Callable[[Future[Any]], None]:
    """Return a callback that puts the index of a job that is done."""
    return lambda _: queue.put(index)


def _start_worker(queue: Queue[Any]) -> None:
    global _queue
    _queue = queue
    torch.set_num_threads(1)


def _run(job: Job) -> tuple[dict[str, Any], float]:
    run, loss = job.run(), math.nan
    for loss in run.train():
        if _queue is not None and run.done % _REPORT_EVERY == 0 and run.done < run.steps:
            _queue.put((job, run.done, run.steps, loss))
    return run.result(), loss
