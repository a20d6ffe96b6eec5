"""Compiles many strategies at once: one process per core, results in the order of the requests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from ptxflow.compiler.launch import Launch
from ptxflow.compiler.strategy import Problem, Strategy


@dataclass(frozen=True)
class Request:
    """What to compile; `device` is the device table's name."""

    problem: Problem
    strategy: Strategy
    device: str


@dataclass(frozen=True)
class Built:
    """A compiled kernel, as plain data."""

    request: Request
    launch: Launch
    ptx: str
    cubin: bytes
    usage: dict[str, Any]  # what ptxas reports
    sass: dict[str, Any]  # counts by technique, missing, forbidden
    checks: tuple[str, ...]  # what was proven


@dataclass(frozen=True)
class Refused:
    """A strategy that did not compile, and the one line that says why."""

    request: Request
    error: str  # class of the refusal
    message: str


Outcome = Built | Refused


def build(request: Request) -> Outcome:
    """Compile one strategy in this process; a refusal of the compiler is an outcome."""
    from ptxflow.compiler.compile import compile_kernel
    from ptxflow.compiler.device import device
    from ptxflow.compiler.errors import CompileError
    from ptxflow.compiler.ptxas import PtxasError
    from ptxflow.compiler.sass import SassError

    try:
        kernel = compile_kernel(request.problem, request.strategy, device(request.device))
    except (CompileError, PtxasError, SassError) as error:
        return Refused(request, type(error).__name__, str(error))
    return Built(
        request=request,
        launch=kernel.launch,
        ptx=kernel.ptx,
        cubin=kernel.cubin,
        usage=_plain(kernel.usage),
        sass=_plain(kernel.sass),
        checks=tuple(str(c) for c in kernel.checks),
    )


def build_all(requests: Sequence[Request], jobs: int | None = None) -> Iterator[Outcome]:
    """The outcome of every request, in order, as they become ready.

    A compiler process that dies (out of memory, say) refuses what was in flight; it does not end
    the run. Anything else than a refusal is a bug and is raised.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(requests))
    if jobs <= 1:
        yield from map(build, requests)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = [pool.submit(build, r) for r in requests]
        try:
            for request, future in zip(requests, futures, strict=True):
                try:
                    yield future.result()
                except BrokenProcessPool:
                    yield Refused(request, "BrokenProcessPool", "a compiler process died")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _plain(report: Any) -> dict[str, Any]:
    return asdict(report) if is_dataclass(report) else dict(report)  # type: ignore[arg-type]
