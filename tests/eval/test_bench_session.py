"""The worker's session with the GPU replaced: what each kind of kernel comes back as."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ptxflow.compiler.backend.runtime import LaunchError
from ptxflow.compiler.launch import Arguments, Launch, PointerParam
from ptxflow.env.tasks.definition import load
from ptxflow.env.tasks.workload import Workload
from ptxflow.eval.bench import session as measure
from ptxflow.eval.bench import timing
from ptxflow.eval.bench.trace_set import Trace, stored
from ptxflow.eval.bench.worker import LIBRARY, job, refine_job

DEFINITION = load("gemm_n128_k2048")
LAUNCH = Launch("k", ("1", "1", "1"), 32, (1, 1, 1), 0, (PointerParam("C"),))
Tensors = dict[str, torch.Tensor]
Job = Callable[..., Any]  # of what stands for the kernel


class FakeEvent:
    def record(self) -> None: ...

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 0.012  # milliseconds


class FakeKernel:
    """Stands for a loaded cubin: `body` computes on the bench's tensors instead."""

    body: Callable[[Tensors], None]
    tensors: Tensors
    loaded = unloaded = 0
    places: ClassVar[set[tuple[int | None, bool]]] = set()

    def __init__(self, launch: Launch, image: bytes, driver: Any):
        assert image == b"cubin" and launch == LAUNCH
        FakeKernel.loaded += 1

    def bind(
        self, addresses: dict[str, int | None], axes: dict[str, int], arguments: Arguments
    ) -> Callable[[int], None]:
        assert arguments == Arguments({}, measure.SEED)
        assert axes == {"M": 5, "N": 128, "K": 2048}
        ours = {n: t.data_ptr() for n, t in FakeKernel.tensors.items()}
        if addresses != ours:  # timed elsewhere
            FakeKernel.places.add((addresses["C"], addresses["A"] == ours["A"]))
        return lambda stream: FakeKernel.body(FakeKernel.tensors)

    def unload(self) -> None:
        FakeKernel.unloaded += 1


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> measure.Session:
    class Stream:
        cuda_stream = 0

    class Bench(measure.Bench):
        def __init__(self, *args: Any):
            super().__init__(*args)
            FakeKernel.tensors = self.tensors

    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"uuid": 0}))
    monkeypatch.setattr(timing, "_event", FakeEvent)
    monkeypatch.setattr(measure, "Driver", lambda: type("D", (), {"synchronize": None}))
    monkeypatch.setattr(measure, "L2Flush", lambda: lambda: None)
    monkeypatch.setattr(measure, "ClockReader", lambda uuid: lambda: 1700)
    monkeypatch.setattr(measure, "LoadedKernel", FakeKernel)
    monkeypatch.setattr(measure, "Bench", Bench)
    made = measure.Session()
    made.device = torch.device("cpu")
    return made


def measured(
    session: measure.Session, folder: Path, body: Callable[[Tensors], None], every: bool = True
) -> dict[str, Any]:
    FakeKernel.body = staticmethod(body)  # type: ignore[assignment]
    image = folder / "k.cubin"
    image.write_bytes(b"cubin")
    todo = job(
        DEFINITION.to_json(), {"M": 5}, LAUNCH.to_json(), image, seeds=(1, 2), rounds=4, settle=0,
        every_baseline=every,
    )  # fmt: skip
    stages: list[str] = []
    outcome = session.measure(todo, stages.append)
    made = [s for s in stages if s.startswith(LIBRARY)]  # of the first job, with its inputs
    assert stages[: 3 + len(made)] == ["inputs", *made, "load", "check"]
    return outcome


def refined(
    session: measure.Session, folder: Path, body: Any, stage: Any, count: int, **asked: Any
) -> list[dict[str, Any]]:
    """The outcomes of so many kernels that are timed in the same rounds."""
    FakeKernel.body = staticmethod(body)  # type: ignore[assignment]
    image = folder / "k.cubin"
    image.write_bytes(b"cubin")
    how: Any = {"seeds": (1,), "rounds": 4, "settle": 0, "seconds": 1.0, "ties": 0.0, **asked}
    todo = refine_job(DEFINITION.to_json(), {"M": 5}, [(LAUNCH.to_json(), image)] * count, **how)
    return list(session.measure(todo, stage)["outcomes"])


@pytest.fixture
def run(session: measure.Session, tmp_path: Path) -> Job:
    return partial(measured, session, tmp_path)


@pytest.fixture
def refine(session: measure.Session, tmp_path: Path) -> Job:
    return partial(refined, session, tmp_path)


def honest(t: Tensors) -> None:
    t["C"].copy_((t["A"].float() @ t["B"].float().T).half())


def wrong_after(right: int) -> Callable[[Tensors], None]:
    """Honest at so many calls."""
    calls = itertools.count(1)

    def body(t: Tensors) -> None:
        honest(t)
        t["C"][0, 0] += 9 * (next(calls) > right)

    return body


def test_a_right_kernel_is_timed_beside_its_baseline(run: Job) -> None:
    outcome = run(honest)
    assert outcome["status"] == "ok" and outcome["check"]["correct"]
    assert outcome["latency_us"] == {"median": 12.0, "q1": 12.0, "q3": 12.0, "samples": 4}
    assert outcome["peers"] == {"torch.mm": 12.0, "copy": 12.0}
    assert outcome["timing"]["sm_clock_mhz"] == [1700]
    assert outcome["timing"]["yardstick"] == "torch.mm"
    outcome = run(honest, every=False)
    assert outcome["peers"] == {"torch.mm": 12.0}
    before = FakeKernel.unloaded
    run(honest)
    assert FakeKernel.unloaded == before + 1  # one kernel is loaded at a time


def test_a_wrong_kernel_is_not_timed(run: Job) -> None:
    outcome = run(lambda t: None)
    assert outcome["status"] == "wrong" and "latency_us" not in outcome


def test_several_kernels_are_timed_in_the_same_rounds(run: Job, refine: Job) -> None:
    stages: list[str] = []
    at_last = wrong_after(3 * (2 + 400) + 2 * 4)  # warm-ups, rounds, 2 x 2 checks of two kernels
    outcomes = refine(at_last, stages.append, 3, seeds=(1, 2))
    made = [f"making {n}" for n in ("torch.mm", "copy", "cublasLt", "triton", "helion")]
    assert stages == ["inputs", *made, "load", "time"]
    assert [o["status"] for o in outcomes] == ["ok", "ok", "wrong"]
    assert outcomes[2]["detail"].startswith("after timing, seed 1: C:")
    assert all(o["peers"] for o in outcomes)
    samples = {o["latency_us"]["samples"] for o in outcomes}
    assert samples == {measure.MOST_ROUNDS}  # 4 were asked for, and more take no time here
    before = FakeKernel.unloaded
    run(honest)
    assert FakeKernel.unloaded == before + 3


@pytest.mark.parametrize(("bad", "who"), [(1, "0"), (9, "0"), (1, "torch.mm")])
def test_a_disturbed_host_is_timed_again(
    session: measure.Session, refine: Job, monkeypatch: pytest.MonkeyPatch, bad: int, who: str
) -> None:
    made: list[float] = []

    def time_them(*args: Any) -> Any:
        made.append(40.0 if len(made) < bad else 10.0)
        calm = dict.fromkeys(("0", *session._baselines), [10.0] * 4)
        return calm | {who: [10.0, 10.0, made[-1], made[-1]]}, {}

    monkeypatch.setattr(session, "_time", time_them)
    (outcome,) = refine(honest, print, 1)
    q3 = outcome["latency_us"]["q3"]
    assert (len(made), q3) == ((2, 10.0) if bad == 1 else (measure.TIMED_AGAIN + 1, 40.0))


def test_those_that_may_be_the_fastest_are_timed_against_each_other(
    session: measure.Session, refine: Job
) -> None:
    for ties, found in ((0.0, None), (60.0, {"us": 12.0, "error": 0.0})):
        FakeKernel.places.clear()
        loaded, unloaded = FakeKernel.loaded, FakeKernel.unloaded
        outcomes = refine(honest, print, 2, ties=ties, seconds=0.0)
        assert [o["timing"].get("final_us") for o in outcomes] == [found] * 2
        elsewhere = [there for there in FakeKernel.places if not there[1]]  # with their inputs
        assert len(elsewhere) == (timing.PLACES if ties else 0)
        session._unload()
        assert FakeKernel.loaded - loaded == FakeKernel.unloaded - unloaded >= len(elsewhere)


def test_the_middle_half_has_no_steps_of_the_clock() -> None:
    drawn = np.random.default_rng(1).normal(5.0, 0.4, (400, 400))
    assert np.mean([timing.middle(list(row)) for row in drawn]) == pytest.approx(5.0, abs=0.005)
    assert 4.9 < timing.middle([4.896] * 10 + [4.928] * 14) < 4.928  # of 32 ns


def test_close_kernels_are_timed_elsewhere_until_they_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, asked = np.random.default_rng(2), list[set[str]]()
    truth = {"best": 10.0, "close": 10.03, "far": 10.3}

    def place(names: Sequence[str]) -> dict[str, Any]:
        asked.append(set(names))
        return {n: truth[n] * rng.normal(1.0, 0.005) for n in names}

    def sampled(calls: Any, rounds: Any, flush: Any) -> dict[str, list[float]]:
        return {n: list(rng.normal(at, 0.03, rounds[n])) for n, at in calls.items()}

    monkeypatch.setattr(timing, "time_interleaved", sampled)
    found = timing.finals(place, truth, lambda: None, 60.0)
    assert min(found, key=lambda n: found[n].us) == "best"
    assert len(asked) > timing.PLACES and "far" not in asked[-1]  # who is slower for certain leaves
    apart = found["close"].us - found["best"].us
    assert apart == pytest.approx(0.03, abs=4 * found["close"].error)
    assert apart > timing.SURE * found["close"].error or found["close"].error <= 0.0071
    asked.clear()
    assert timing.finals(place, truth, lambda: None, 0.0) == {}
    assert timing.finals(place, {"best": 10.0}, lambda: None, 9.0) == {}
    assert not asked
    first = {n: list(rng.normal(us, 0.01, 40)) for n, us in (truth | {"far": 10.5}).items()}
    assert [*timing.near(first)] == ["best", "close"]


def test_a_hopeless_kernel_gets_few_rounds(run: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Event:
        def record(self) -> None:
            self.at = now

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at + 0.01  # milliseconds, as the baseline takes

    def slow(t: Tensors) -> None:
        nonlocal now
        now += 1
        honest(t)

    monkeypatch.setattr(timing, "_event", Event)
    assert run(slow)["latency_us"]["samples"] == measure.FEW_ROUNDS
    assert run(honest)["latency_us"]["samples"] == 4


def test_the_gpu_is_kept_busy_between_jobs_of_a_problem(session: measure.Session, run: Job) -> None:
    assert not session.idle()  # nothing to run yet
    run(honest)
    assert session.idle()


def test_problems_are_kept_until_their_place_is_needed(
    session: measure.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions of tuning take turns; inputs and references of gigabytes are drawn once."""

    def bench(rows: int, seed: int = 1) -> measure.Bench:
        asked = {"definition": DEFINITION.to_json(), "axes": {"M": rows}, "seeds": [seed]}
        return session._bench(asked, lambda stage: None)[1]

    first, second = bench(5), bench(6)
    assert first is not second and second.tensors["A"].shape == (6, 2048)
    assert bench(5) is first and bench(6) is second and bench(5, seed=2) is not first
    bench(5)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: measure.KEPT_BYTES + 1)
    assert bench(5) is first  # it needs no room
    bench(7)
    assert bench(5) is not first and len(session._problems) == 1


def test_a_race_that_shows_late_is_wrong(run: Job) -> None:
    outcome = run(wrong_after(10))  # the checks make 4 calls, warm-ups and rounds 7
    assert outcome["status"] == "wrong" and outcome["detail"].startswith("after timing, seed 2: C:")


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (LaunchError("cuLaunchKernelEx", "CUDA_ERROR_INVALID_VALUE"), "CUDA_ERROR_INVALID_VALUE"),
        (RuntimeError("CUDA error: an illegal memory access\nmore"), "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
)
def test_cuda_errors_are_faults_that_end_the_process(
    session: measure.Session, run: Job, error: Exception, detail: str
) -> None:
    def fail(t: Tensors) -> None:
        raise error

    def sticky() -> None:
        raise LaunchError("cuCtxSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")

    session._driver.synchronize = sticky  # type: ignore[method-assign]
    outcome = run(fail)
    assert outcome["status"] == "fault" and outcome["last"] and detail in outcome["detail"]


@pytest.mark.parametrize("destination_passing", [True, False])
@pytest.mark.parametrize(
    ("scale", "borrows", "status"), [(1, True, "ok"), (2, True, "wrong"), (1, False, "wrong")]
)
def test_solutions_of_both_calling_styles(
    session: measure.Session, destination_passing: bool, scale: int, borrows: bool, status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Torch stands in for the kernel, where that is allowed; elsewhere it is what is wrong."""
    if borrows:
        monkeypatch.setattr(measure, "own_work", nullcontext)
    product = f"((A.float() @ B.float().T) * {scale}).half()"
    source = (
        f"def run(A, B, C):\n    C.copy_({product})\n"
        if destination_passing
        else f"def run(A, B):\n    return {product}\n"
    )
    todo = {
        "definition": DEFINITION.to_json(), "axes": {"M": 5}, "seeds": [1], "rounds": 2,
        "settle": 0,
        "solution": {
            "sources": [{"path": "src/main.py", "content": source}],
            "spec": {
                "entry_point": "src/main.py::run", "destination_passing_style": destination_passing,
            },
        },
    }  # fmt: skip
    outcome = session.measure(todo, lambda stage: None)
    assert outcome["status"] == status
    assert borrows or "not its own work" in outcome["detail"]


def solution_of(name: str, product: str) -> dict[str, Any]:
    source = f"from .helper import T\n\ndef run(A, B, C):\n    C.copy_({product})\n"
    return {
        "name": name,
        "sources": [{"path": "main.py", "content": source},
                    {"path": "helper.py", "content": "T = 'T'\n"}],
        "spec": {"entry_point": "main.py::run"},
    }  # fmt: skip


def test_other_solutions_are_timed_beside_where_they_are_right(
    session: measure.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a workload whose file says what A is; torch may compute what others return."""
    row = Workload(DEFINITION.name, "row", {"M": 5}, {}, "flashinfer-trace")
    ones = torch.ones(5, 2048, dtype=torch.float16)
    trace = Trace(stored(DEFINITION, row, tmp_path, {"A": ones}))
    product = "(A.float() @ getattr(B.float(), T)).half()"
    mine = solution_of("mine", "A[:, :128] * 0 + getattr(B.float(), T).sum(0).half()")
    todo = {
        "definition": DEFINITION.to_json(), "axes": {"M": 5}, "seeds": [1, 2], "rounds": 2,
        "settle": 0, "solution": mine, "workload": trace.to_json(), "root": str(tmp_path),
        "beside": [solution_of("right", product), solution_of("twice", f"2 * {product}")],
    }  # fmt: skip
    monkeypatch.setattr(measure, "own_work", lambda: nullcontext())
    outcome = session.measure(todo, lambda stage: None)
    assert outcome["status"] == "ok", outcome
    assert outcome["peers"].keys() > {"right"} and "twice" not in outcome["peers"]
    assert outcome["timing"]["absent"]["twice"].startswith("wrong: seed 1: C: ")


def test_other_errors_are_ours_and_are_raised(run: Job) -> None:
    def bug(t: Tensors) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        run(bug)
