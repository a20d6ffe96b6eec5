"""Kernels on the GPU of this process: checked against the reference, then timed beside peers."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptxflow.compiler.launch import Launch
from ptxflow.compiler.runtime import Driver, LaunchError, LoadedKernel
from ptxflow.eval.checking import Bench, Case, Verdict, check
from ptxflow.eval.definition import Definition, DefinitionError, parse
from ptxflow.eval.inputs import make_inputs
from ptxflow.eval.peers import PEERS
from ptxflow.eval.solution import unpack
from ptxflow.eval.timing import (
    FLUSH,
    Call,
    ClockReader,
    L2Flush,
    Timing,
    settle,
    time_interleaved,
)
from ptxflow.eval.tolerance import ELEMENTWISE, tolerance

Json = dict[str, Any]
OURS = "ours"
RESETTLE_AFTER = 0.5  # idle seconds after which clocks are settled afresh
WARM_ROUNDS = 2  # samples of each call that are thrown away
HOPELESS = 4.0  # a kernel that takes this many times its peer's time ...
FEW_ROUNDS = 3  # ... gets no more rounds than this


def case_of(definition: Definition, axes: Mapping[str, int], device: torch.device) -> Case:
    """What a kernel for the definition at these axes is checked against."""
    bound = definition.bind(axes)
    run = definition.reference()
    names = list(definition.outputs)

    def reference(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        out = run(*(tensors[name] for name in definition.inputs))
        return dict(zip(names, out if isinstance(out, tuple | list) else (out,), strict=True))

    shapes = definition.shapes(definition.outputs, bound)
    tolerances = {name: tolerance(definition, name) for name in names}
    for name, t in tolerances.items():
        if t.kind != ELEMENTWISE:
            raise DefinitionError(f"{definition.name}: {name} cannot be compared by {t.kind} yet")
    return Case(
        inputs=lambda seed: make_inputs(definition, bound, seed, device),
        reference=reference,
        outputs={
            n: (shapes[n] or (), getattr(torch, t.dtype)) for n, t in definition.outputs.items()
        },
        tolerance=tolerances,
    )


@dataclass(frozen=True)
class Calls:
    """A kernel over a bench's tensors. `checked` fills the outputs; `timed` may return them."""

    checked: Callable[[], None]
    timed: Callable[[], Any]


class Session:
    """Owns the CUDA context; keeps inputs, references and clocks over the jobs of a problem."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32
        self.uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self._driver = Driver()
        self._flush = L2Flush()
        self._clock = ClockReader(self.uuid)
        self._held: tuple[Any, Definition, Bench] | None = None
        self._peers: dict[str, Call] = {}
        self._loaded: list[LoadedKernel] = []
        self._busy_until = -math.inf  # long ago: the first timing settles
        torch.cuda.synchronize()

    def about(self) -> Json:
        """What the driver's description of the GPU lacks: its identity, and the peers' versions."""
        index = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        versions = {"torch": torch.__version__, "cublas": cublas_version()}
        return {"uuid": self.uuid, "index": index, **{n: v for n, v in versions.items() if v}}

    def measure(self, job: Json, stage: Callable[[str], None]) -> Json:
        """The outcome of one job, as `eval.worker.job` and `eval.worker.refine_job` make them.

        `last` marks that this process must not run another kernel: its context is corrupt.
        """
        stage("inputs")
        definition, bench = self._bench(job)
        stage("load")
        try:
            self._unload()
            if "kernels" in job:
                return self._refine(job, definition, bench, stage)
            with tempfile.TemporaryDirectory(prefix="ptxflow-solution-") as folder:
                if "solution" in job:
                    calls = _solution_calls(job["solution"], definition, bench, Path(folder))
                else:
                    calls = self._kernel_calls(job, definition.bind(job["axes"]), bench)
                return self._run(job, bench, calls, stage)
        except LaunchError as error:
            return {"status": "fault", "detail": str(error), "last": True}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "CUDA" not in str(error):
                raise
            return {"status": "fault", "detail": self._cuda_error(error), "last": True}

    def idle(self) -> bool:
        """Keep the clocks up between jobs by a call of each peer; False where there is none."""
        for call in self._peers.values():
            self._flush()
            call()
        torch.cuda.synchronize()
        self._busy_until = time.monotonic()
        return bool(self._peers)

    def _kernel_calls(self, kernel: Json, bound: dict[str, int], bench: Bench) -> Calls:
        """A compiled kernel's calls; it stays loaded until the next job."""
        image = Path(kernel["image"]).read_bytes()
        loaded = LoadedKernel(Launch.from_json(kernel["launch"]), image, self._driver)
        self._loaded.append(loaded)
        addresses = {name: t.data_ptr() for name, t in bench.tensors.items()}
        launch = loaded.bind(addresses, bound)
        stream = torch.cuda.current_stream().cuda_stream

        def call() -> None:
            launch(stream)

        return Calls(call, call)

    def _unload(self) -> None:
        while self._loaded:
            self._loaded.pop().unload()

    def _bench(self, job: Json) -> tuple[Definition, Bench]:
        key = (job["definition"], job["axes"], job["seeds"])
        if self._held is None or self._held[0] != key:
            self._held, self._peers = None, {}
            torch.cuda.empty_cache()
            definition = parse(job["definition"])
            case = case_of(definition, job["axes"], self.device)
            bench = Bench(case, self.device, job["seeds"])
            makers = PEERS.get(definition.op_type, {})
            self._peers = {name: make(bench.tensors) for name, make in makers.items()}
            self._held = key, definition, bench
            self._busy_until = -math.inf  # another load: settle anew
            torch.cuda.synchronize()
        return self._held[1], self._held[2]

    def _run(self, job: Json, bench: Bench, calls: Calls, stage: Callable[[str], None]) -> Json:
        stage("check")
        verdict = check(calls.checked, bench)
        torch.cuda.synchronize()
        if not verdict.correct:
            return {"status": "wrong", "detail": verdict.reason, "check": verdict.to_json()}
        stage("time")
        samples, timing = self._time(job, {OURS: calls.timed})
        latency = Timing.of(samples.pop(OURS)).to_json()
        peers = {name: Timing.of(values).median for name, values in samples.items()}
        timed = {"latency_us": latency, "peers": peers, "timing": timing}
        return timed | self._after_timing(bench, calls.checked, verdict)

    def _refine(
        self, job: Json, definition: Definition, bench: Bench, stage: Callable[[str], None]
    ) -> Json:
        """Time several kernels in the same rounds; `outcomes` has one mapping for each."""
        bound = definition.bind(job["axes"])
        calls = {str(i): self._kernel_calls(k, bound, bench) for i, k in enumerate(job["kernels"])}
        stage("time")
        samples, timing = self._time(job, {name: c.timed for name, c in calls.items()})
        peers = {name: Timing.of(samples[name]).median for name in self._peers}
        outcomes = []
        for name, call in calls.items():
            verdict = check(call.checked, bench)
            outcomes.append({
                "status": "ok" if verdict.correct else "wrong",
                "detail": "" if verdict.correct else f"after timing, {verdict.reason}",
                "check": verdict.to_json(),
                "latency_us": Timing.of(samples[name]).to_json(),
                "peers": peers,
                "timing": timing,
            })  # fmt: skip
        torch.cuda.synchronize()
        return {"status": "ok", "outcomes": outcomes}

    def _time(self, job: Json, ours: dict[str, Call]) -> tuple[dict[str, list[float]], Json]:
        """Microseconds of our calls and of the peers, in the same rounds, and how they were timed.

        A lone kernel far slower than its peers gets few rounds: nobody will choose it.
        """
        calls = ours | self._peers
        if time.monotonic() - self._busy_until > RESETTLE_AFTER:
            settle(self._peers or calls, job["settle"])
        warm = time_interleaved(calls, WARM_ROUNDS, self._flush)
        rounds = job["rounds"]
        if len(ours) == 1 and self._peers:
            slowest = max(warm[name][-1] for name in self._peers)
            if warm[next(iter(ours))][-1] > HOPELESS * slowest:
                rounds = min(rounds, FEW_ROUNDS)
        clocks: list[int | None] = []
        samples = time_interleaved(calls, rounds, self._flush, lambda: clocks.append(self._clock()))
        self._busy_until = time.monotonic()
        seen = sorted({c for c in clocks if c is not None})
        return samples, {"flush": FLUSH, "rounds": rounds, "sm_clock_mhz": seen}

    def _after_timing(self, bench: Bench, call: Callable[[], None], before: Verdict) -> Json:
        """Still right after all those runs? A rare race shows here."""
        after = check(call, bench, bench.seeds[-1:])
        torch.cuda.synchronize()
        if after.correct:
            return {"status": "ok", "detail": "", "check": before.to_json()}
        return {"status": "wrong", "detail": f"after timing, {after.reason}",
                "check": after.to_json()}  # fmt: skip

    def _cuda_error(self, error: RuntimeError) -> str:
        try:
            self._driver.synchronize()
        except LaunchError as sticky:
            return sticky.error
        return str(error).splitlines()[0]


def cublas_version() -> str:
    """`13.1.0` of the cuBLAS that torch has loaded; empty where it cannot be asked."""
    major = (torch.version.cuda or "").partition(".")[0]
    parts = []
    try:
        library = ctypes.CDLL(f"libcublas.so.{major}")
        for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            value = ctypes.c_int()
            if library.cublasGetProperty(ctypes.c_int(part), ctypes.byref(value)):
                return ""
            parts.append(str(value.value))
    except (OSError, AttributeError):
        return ""
    return ".".join(parts)


def _solution_calls(
    data: Mapping[str, Any], definition: Definition, bench: Bench, folder: Path
) -> Calls:
    """A Solution, unpacked and imported, by either of the schema's two calling styles."""
    entry = unpack(data, folder)
    spec = importlib.util.spec_from_file_location("ptxflow_solution", entry)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = getattr(module, data["spec"]["entry_point"].partition("::")[2])
    inputs = [bench.tensors[name] for name in definition.inputs]
    outputs = [bench.tensors[name] for name in definition.outputs]
    if data["spec"].get("destination_passing_style", True):
        run = functools.partial(run, *inputs, *outputs)
        return Calls(run, run)
    run = functools.partial(run, *inputs)

    def checked() -> None:
        result = run()
        made = result if isinstance(result, tuple | list) else (result,)
        for out, value in zip(outputs, made, strict=True):
            out.copy_(value)

    return Calls(checked, run)
