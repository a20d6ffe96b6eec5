"""One kernel on the GPU of this process: checked against the reference, then timed beside peers."""

from __future__ import annotations

import functools
import importlib.util
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
from ptxflow.eval.timing import FLUSH, ClockReader, L2Flush, settle, time_interleaved
from ptxflow.eval.tolerance import ELEMENTWISE, tolerance

Json = dict[str, Any]
RESETTLE_AFTER = 0.5  # idle seconds after which clocks are settled afresh


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
    """Owns the CUDA context; keeps inputs and references from one job of a problem to the next."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32
        self._driver = Driver()
        self._flush = L2Flush()
        self._clock = ClockReader(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        self._held: tuple[Any, Definition, Bench] | None = None
        self._loaded: LoadedKernel | None = None
        self._busy_until = 0.0
        torch.cuda.synchronize()

    def measure(self, job: Json, stage: Callable[[str], None]) -> Json:
        """The outcome of one job, as `eval.worker.job` makes them.

        `last` marks that this process must not run another kernel: its context is corrupt.
        """
        stage("inputs")
        definition, bench = self._bench(job)
        stage("load")
        try:
            with tempfile.TemporaryDirectory(prefix="ptxflow-solution-") as folder:
                if "solution" in job:
                    calls = _solution_calls(job["solution"], definition, bench, Path(folder))
                else:
                    calls = self._kernel_calls(job, definition, bench)
                return self._run(job, definition, bench, calls, stage)
        except LaunchError as error:
            return {"status": "fault", "detail": str(error), "last": True}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "CUDA" not in str(error):
                raise
            return {"status": "fault", "detail": self._cuda_error(error), "last": True}

    def _kernel_calls(self, job: Json, definition: Definition, bench: Bench) -> Calls:
        """The job's compiled kernel, loaded in place of the last one."""
        if self._loaded is not None:
            self._loaded.unload()
            self._loaded = None
        image = Path(job["image"]).read_bytes()
        self._loaded = LoadedKernel(Launch.from_json(job["launch"]), image, self._driver)
        addresses = {name: t.data_ptr() for name, t in bench.tensors.items()}
        bound = self._loaded.bind(addresses, definition.bind(job["axes"]))
        stream = torch.cuda.current_stream().cuda_stream

        def call() -> None:
            bound(stream)

        return Calls(call, call)

    def _bench(self, job: Json) -> tuple[Definition, Bench]:
        key = (job["definition"], job["axes"], job["seeds"])
        if self._held is None or self._held[0] != key:
            self._held = None
            torch.cuda.empty_cache()
            definition = parse(job["definition"])
            case = case_of(definition, job["axes"], self.device)
            self._held = key, definition, Bench(case, self.device, job["seeds"])
            torch.cuda.synchronize()
        return self._held[1], self._held[2]

    def _run(
        self,
        job: Json,
        definition: Definition,
        bench: Bench,
        calls: Calls,
        stage: Callable[[str], None],
    ) -> Json:
        stage("check")
        verdict = check(calls.checked, bench)
        torch.cuda.synchronize()
        if not verdict.correct:
            return {"status": "wrong", "detail": verdict.reason, "check": verdict.to_json()}
        stage("time")
        timing = self._time(job, definition, bench, calls.timed)
        return timing | self._after_timing(bench, calls.checked, verdict)

    def _time(
        self, job: Json, definition: Definition, bench: Bench, call: Callable[[], None]
    ) -> Json:
        peers = PEERS.get(definition.op_type, {})
        calls = {"ours": call} | {name: make(bench.tensors) for name, make in peers.items()}
        idle = time.monotonic() - self._busy_until
        settle(calls, job["settle"] if idle > RESETTLE_AFTER else job["settle"] / 5)
        clocks = [self._clock()]
        timings = time_interleaved(calls, job["rounds"], self._flush)
        clocks.append(self._clock())
        self._busy_until = time.monotonic()
        return {
            "latency_us": timings.pop("ours").to_json(),
            "peers": {name: t.median for name, t in timings.items()},
            "timing": {"flush": FLUSH, "rounds": job["rounds"], "sm_clock_mhz": clocks},
        }

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
