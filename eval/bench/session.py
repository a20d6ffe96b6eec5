"""Kernels on the GPU of this process: checked against the reference, timed beside baselines."""

import ctypes
import functools
import importlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ptxflow.compiler.backend.runtime import Driver, LaunchError, LoadedKernel
from ptxflow.compiler.launch import Launch
from ptxflow.env.tasks.definition import Definition, DefinitionError, parse
from ptxflow.eval.bench.baselines.registry import Baselines
from ptxflow.eval.bench.checking import KINDS, Bench, Case, Verdict, check
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.own_work import Borrowed, own_work
from ptxflow.eval.bench.places import SEED, Places, bind
from ptxflow.eval.bench.records import unsteady
from ptxflow.eval.bench.references import dsa, load_reference, sampling, sampling_integers
from ptxflow.eval.bench.timing import (
    FEW_ROUNDS,
    FLUSH,
    FLUSH_US,
    WARM_ROUNDS,
    Call,
    ClockReader,
    L2Flush,
    Timing,
    finals,
    near,
    settle,
    time_interleaved,
)
from ptxflow.eval.bench.tolerance import SUPPORT, TOPK, tolerance
from ptxflow.eval.bench.trace_set import Trace, fixed_inputs

Json = dict[str, Any]
OURS = "ours"
RESETTLE_AFTER = 0.5  # idle seconds after which clocks are settled afresh
HOPELESS, LONG = 4.0, 200.0  # who takes this many times the fastest's time, and as many us, gets
#: a quarter of the rounds, and at least FEW_ROUNDS
MOST_ROUNDS = 400
TIMED_AGAIN = 2  # at most, where the host was disturbed
KEPT_BYTES = 16 << 30  # of the GPU, held for problems that may be asked for again
EDGE = 2.0**-12  # of a row's mass: float32 sums may put the end of a nucleus this much further


def case_of(
    definition: Definition,
    axes: Mapping[str, int],
    device: torch.device,
    fixed: Mapping[str, Any] | None = None,
) -> Case:
    """What a kernel for the definition at these axes is checked against; inputs that are `fixed`
    are those for every seed."""
    bound = definition.bind(axes)
    run = load_reference(definition)
    names = list(definition.outputs)

    tolerances = {name: tolerance(definition, name) for name in names}
    draws = [name for name, t in tolerances.items() if t.kind == SUPPORT]
    chooses = [name for name, t in tolerances.items() if t.kind == TOPK]

    def reference(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        if draws:
            return {name: drawable(inputs) for name in draws}
        if chooses:
            return {name: scored(inputs) for name in chooses}
        out = run(*(inputs[name] for name in definition.inputs))
        return dict(zip(names, out if isinstance(out, tuple | list) else (out,), strict=True))

    def inputs(seed: int) -> dict[str, Any]:
        own = {n: v.to(device) if torch.is_tensor(v) else v for n, v in (fixed or {}).items()}
        return make_inputs(definition, bound, seed, device) | own

    shapes = definition.shapes(definition.outputs, bound)
    for name, t in tolerances.items():
        if t.kind not in KINDS:
            raise DefinitionError(f"{definition.name}: {name} cannot be compared by {t.kind} yet")
    return Case(
        inputs=inputs,
        reference=reference,
        outputs={
            n: (shapes[n] or (), getattr(torch, t.dtype)) for n, t in definition.outputs.items()
        },
        tolerance=tolerances,
        drawn=(lambda inputs: {name: tokens(inputs) for name in draws}) if draws else None,
    )


def tokens(inputs: Mapping[str, Tensor]) -> Tensor:
    """[batch] int64: what our kernels draw with SEED and offset 0."""
    top_k, top_p = inputs.get("top_k"), inputs.get("top_p")
    return sampling_integers.sample(inputs["probs"], top_k, top_p, SEED)


def drawable(inputs: Mapping[str, Tensor]) -> Tensor:
    """[batch, vocabulary] bool: the tokens that a sample may be; as likely ones as these, too.

    Which of equal tokens a filter keeps is not defined, and libraries keep all of them.
    """
    p, probs = inputs.get("top_p"), inputs["probs"]
    wide = None if p is None else torch.where((p > 0) & (p < 1), p + EDGE, p)
    kept = sampling.filtered(probs, inputs.get("top_k"), wide) > 0
    least = torch.where(kept, probs, torch.inf).amin(-1, keepdim=True)
    return (probs > 0) & (probs >= least)


def scored(inputs: Mapping[str, Tensor]) -> Tensor:
    """[batch, tokens, 2] float64: each token's slot in the cache and its score; -1 for no token."""
    table, cache = inputs["block_table"], inputs["k_index_cache_fp8"]
    q, page_size = inputs["q_index_fp8"], inputs["k_index_cache_fp8"].shape[1]
    out = torch.full((*table.shape, page_size, 2), -1.0, dtype=torch.float64, device=q.device)
    out = out.flatten(1, 2)
    inside = torch.arange(page_size, device=q.device)
    for b, length in enumerate(inputs["seq_lens"].tolist()):
        pages = table[b, : -(-length // page_size)].long()
        keys = dsa.index_keys(cache, pages, q.shape[-1])[:length]
        out[b, :length, 0] = (pages[:, None] * page_size + inside).flatten()[:length].double()
        out[b, :length, 1] = dsa.index_scores(q[b], keys, inputs["weights"][b]).double()
    return out


@dataclass(frozen=True)
class Calls:
    """A kernel over a bench's tensors. `checked` fills the outputs; `timed` may return them."""

    checked: Callable[[], None]
    timed: Callable[[], Any]
    exact: bool = False  # it is given SEED, and must draw accordingly


class Session:
    """Owns the CUDA context; keeps the inputs, references and baselines of problems, and clocks."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32
        self.uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        self._driver = Driver()
        self._flush = L2Flush()
        self._clock = ClockReader(self.uuid)
        self._problems: dict[str, tuple[Definition, Bench, Baselines]] = {}  # the latest last
        self._suite: Baselines | None = None
        self._baselines: dict[str, Call] = {}
        self._loaded: list[LoadedKernel] = []
        self._outputs: dict[str, Tensor] | None = None  # of the problem
        self._busy_until = -math.inf  # long ago: the first timing settles
        torch.cuda.synchronize()

    def about(self) -> Json:
        """The GPU's UUID and index, and the versions of torch and cuBLAS."""
        index = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        versions = {"torch": torch.__version__, "cublas": cublas_version()}
        return {"uuid": self.uuid, "index": index, **{n: v for n, v in versions.items() if v}}

    def measure(self, job: Json, stage: Callable[[str], None]) -> Json:
        """The outcome of one job, as `eval.worker.job` and `eval.worker.refine_job` make them.

        `last` marks that this process must not run another kernel: its context is corrupt.
        """
        stage("inputs")
        definition, bench = self._bench(job, stage)
        stage("load")
        try:
            self._unload()
            if "kernels" in job:
                return self._refine(job, definition, bench, stage)
            with tempfile.TemporaryDirectory(prefix="ptxflow-solution-") as folder:
                if "solution" in job:
                    calls = _solution_calls(job["solution"], definition, bench, folder)
                else:
                    calls = self._kernel_calls(job, definition.bind(job["axes"]), bench)
                others = {
                    data["name"]: _solution_calls(data, definition, bench, folder, own=False)
                    for data in job.get("beside", ())
                }
                return self._run(job, bench, calls, stage, others)
        except Borrowed as error:
            return {"status": "wrong", "detail": str(error)}
        except LaunchError as error:
            return {"status": "fault", "detail": str(error), "last": True}
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "CUDA" not in str(error):
                raise
            return {"status": "fault", "detail": self._cuda_error(error), "last": True}

    def idle(self) -> bool:
        """Keep the clocks up between jobs by a call of each baseline; False where there is none."""
        for call in self._baselines.values():
            self._flush()
            call()
        torch.cuda.synchronize()
        self._busy_until = time.monotonic()
        return bool(self._baselines)

    def _kernel_calls(self, kernel: Json, bound: dict[str, int], bench: Bench) -> Calls:
        """A compiled kernel's calls; it stays loaded until the next job."""
        self._loaded.append(loaded := self._load(kernel))
        # timed where a library's outputs are, in torch's own blocks: a guarded tensor has pages of
        # its own, and a short kernel would wait for their translation
        # and all kernels into the same ones, so that where they lie tells none apart
        if self._outputs is None:
            self._outputs = {n: torch.empty_like(g.tensor) for n, g in bench.outputs.items()}
        checked = bind(loaded, bench, bench.tensors, bound)
        timed = bind(loaded, bench, bench.tensors | self._outputs, bound)
        return Calls(checked, timed, exact=True)

    def _load(self, kernel: Json) -> LoadedKernel:
        image = Path(kernel["image"]).read_bytes()
        return LoadedKernel(Launch.from_json(kernel["launch"]), image, self._driver)

    def _unload(self) -> None:
        while self._loaded:
            self._loaded.pop().unload()

    def _bench(self, job: Json, stage: Callable[[str], None]) -> tuple[Definition, Bench]:
        key = json.dumps([job["definition"], job["axes"], job["seeds"], job.get("workload")])
        if next(reversed(self._problems), None) != key:
            self._busy_until, self._outputs = -math.inf, None  # another load: settle anew
            held = self._problems.pop(key) if key in self._problems else self._prepared(job)
            self._problems[key] = held
        definition, bench, self._suite = self._problems[key]
        every, without = job.get("every_baseline", True), job.get("without", ())
        self._baselines = self._suite.calls(every, without, lambda name: stage(f"making {name}"))
        torch.cuda.synchronize()
        return definition, bench

    def _prepared(self, job: Json) -> tuple[Definition, Bench, Baselines]:
        """A problem that is not held, in the place of those that were asked for longest ago."""
        self._suite, self._baselines = None, {}
        while self._problems and torch.cuda.memory_allocated() > KEPT_BYTES:
            del self._problems[next(iter(self._problems))]
        torch.cuda.empty_cache()
        definition = parse(job["definition"])
        fixed = None
        if "workload" in job:  # a row of a set of FlashInfer Trace
            workload = Trace.from_json(job["workload"]).workload
            fixed = fixed_inputs(definition, workload, Path(job["root"]))
        case = case_of(definition, job["axes"], self.device, fixed)
        bench = Bench(case, self.device, job["seeds"])
        return definition, bench, Baselines(definition, job["axes"], bench)

    def _run(
        self, job: Json, bench: Bench, calls: Calls, stage: Callable[[str], None],
        others: Mapping[str, Calls],
    ) -> Json:  # fmt: skip
        """Of a kernel; `others` are Solutions that are timed beside it where they are right."""
        stage("check")
        verdict = check(calls.checked, bench, exact=calls.exact)
        torch.cuda.synchronize()
        if not verdict.correct:
            return {"status": "wrong", "detail": verdict.reason, "check": verdict.to_json()}
        if job.get("profile"):
            torch.cuda.profiler.start()
            calls.timed()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        if not job["rounds"]:
            return {"status": "ok", "detail": "", "check": verdict.to_json()}
        verdicts = {name: check(other.checked, bench) for name, other in others.items()}
        right = {name: others[name].timed for name, v in verdicts.items() if v.correct}
        stage("time")
        bench.fill(bench.seeds[0])  # every kernel and library on the same data
        samples, timing = self._time(job, {OURS: calls.timed} | right)
        wrong = {name: f"wrong: {v.reason}" for name, v in verdicts.items() if not v.correct}
        timing |= {"absent": timing.get("absent", {}) | wrong} if wrong else {}
        latency = asdict(Timing.of(samples.pop(OURS)))
        baselines = {name: Timing.of(values).median for name, values in samples.items()}
        timed = {"latency_us": latency, "peers": baselines, "timing": timing}
        return timed | self._after_timing(bench, calls, bench.seeds[-1:], verdict)

    def _refine(
        self, job: Json, definition: Definition, bench: Bench, stage: Callable[[str], None]
    ) -> Json:
        """Time several kernels in the same rounds; `outcomes` has one mapping for each."""
        bound = definition.bind(job["axes"])
        calls = {str(i): self._kernel_calls(k, bound, bench) for i, k in enumerate(job["kernels"])}
        stage("time")
        bench.fill(bench.seeds[0])
        timed = {name: c.timed for name, c in calls.items()}
        for _ in range(TIMED_AGAIN + 1):
            samples, timing = self._time(job, timed, job.get("seconds", 0.0))
            if not any(unsteady(asdict(Timing.of(us))) for us in samples.values()):
                break
        baselines = {name: Timing.of(samples[name]).median for name in self._baselines}
        first = {name: Timing.of(samples[name]) for name in calls}
        tied = near({name: samples[name] for name in calls})
        last = {}
        if seconds := job["ties"]:
            again = {n: functools.partial(self._load, job["kernels"][int(n)]) for n in tied}
            places = Places(again, bench, bound)
            last = finals(places, tied, self._flush, seconds)
            places.close()
        self._busy_until = time.monotonic()
        outcomes = []
        for name, call in calls.items():
            more = {"final_us": asdict(last[name])} if name in last else {}
            latency = asdict(first[name])
            outcome = {"latency_us": latency, "peers": baselines, "timing": timing | more}
            outcomes.append(outcome | self._after_timing(bench, call, bench.seeds))
        return {"status": "ok", "outcomes": outcomes}

    def _time(
        self, job: Json, ours: dict[str, Call], seconds: float = 0.0
    ) -> tuple[dict[str, list[float]], Json]:
        """Microseconds of our calls and the baselines, in the same rounds, and how they were timed.

        As many rounds as the job asks for, or as fit into `seconds`. Who is far slower than the
        fastest gets few: nobody will choose it.
        """
        assert self._suite is not None
        calls = ours | self._baselines
        if time.monotonic() - self._busy_until > RESETTLE_AFTER:
            settle(self._baselines or calls, job["settle"])
        warm = time_interleaved(calls, dict.fromkeys(calls, WARM_ROUNDS), self._flush)
        last = {name: samples[-1] for name, samples in warm.items()}
        clocks: list[int | None] = []
        fit = int(1e6 * seconds / sum(us + FLUSH_US for us in last.values()))
        rounds = max(job["rounds"], min(fit, MOST_ROUNDS))
        samples = time_interleaved(
            calls, shares(last, rounds), self._flush, lambda: clocks.append(self._clock())
        )
        self._busy_until = time.monotonic()
        seen = sorted({c for c in clocks if c is not None})
        about = {
            "flush": FLUSH,
            "rounds": max(map(len, samples.values())),
            "sm_clock_mhz": seen,
            "yardstick": self._suite.yardstick,
        }
        return samples, about | self._suite.about()

    def _after_timing(
        self, bench: Bench, calls: Calls, seeds: Sequence[int], before: Verdict | None = None
    ) -> Json:
        """Still right after all those runs? A rare race shows here."""
        after = check(calls.checked, bench, seeds, calls.exact)
        torch.cuda.synchronize()
        if after.correct:
            return {"status": "ok", "detail": "", "check": (before or after).to_json()}
        detail = f"after timing, {after.reason}"
        return {"status": "wrong", "detail": detail, "check": after.to_json()}

    def _cuda_error(self, error: RuntimeError) -> str:
        try:
            self._driver.synchronize()
        except LaunchError as sticky:
            return sticky.error
        return str(error).splitlines()[0]


def shares(times: Mapping[str, float], rounds: int) -> dict[str, int]:
    """How many of the rounds each call takes part in, from a time of each in microseconds."""
    long = max(HOPELESS * min(times.values()), LONG)
    few = min(rounds, max(FEW_ROUNDS, rounds // 4))
    return {name: few if us > long else rounds for name, us in times.items()}


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


def unpack(data: Mapping[str, Any], folder: Path) -> Path:
    """Write the sources into a folder; returns the path of the entry file."""
    for source in data["sources"]:
        place = folder / source["path"]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(source["content"], encoding="utf-8")
    return folder / str(data["spec"]["entry_point"]).partition("::")[0]


def _solution_calls(
    data: Mapping[str, Any], definition: Definition, bench: Bench, place: str, own: bool = True
) -> Calls:
    """A Solution, unpacked in a folder of `place` and imported, by either of the schema's calling
    styles. Unless it is of our `own`, torch may compute what it returns."""
    folder = Path(tempfile.mkdtemp(dir=place, prefix="solution_"))
    entry = unpack(data, folder).relative_to(place).with_suffix("")
    importlib.invalidate_caches()
    sys.path.insert(0, place)  # its files may import each other as a package's
    try:
        module = importlib.import_module(".".join(entry.parts))
    finally:
        sys.path.remove(place)
    run = getattr(module, data["spec"]["entry_point"].partition("::")[2])
    given = {**bench.tensors, **bench.scalars}
    inputs = [given[name] for name in definition.inputs]
    outputs = [bench.tensors[name] for name in definition.outputs]
    in_place = data["spec"].get("destination_passing_style", True)
    # timed, as a compiled kernel, into torch's own blocks
    fresh = [torch.empty_like(tensor) for tensor in outputs] if in_place else []

    def checked() -> None:
        torch.manual_seed(SEED)  # what draws must draw the same again
        with own_work() if own else nullcontext():
            result = run(*inputs, *(outputs if in_place else ()))
        made = result if isinstance(result, tuple | list) else (result,)
        for out, value in zip(outputs, made, strict=True) if not in_place else ():
            out.copy_(value)

    return Calls(checked, functools.partial(run, *inputs, *fresh))
