"""GPUs and compilers of a cluster, against a scheduler that is scripted; the fault campaign whole,
on real Dask workers and simulated GPUs, is slow."""

import argparse
import json
import lzma
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from distributed.client import ClosedClientError

from ptxflow.command import BadInput
from ptxflow.compiler.backend import cache
from ptxflow.compiler.backend.ptxas import PtxasError
from ptxflow.compiler.device import H200
from ptxflow.compiler.errors import CompileError, HazardError
from ptxflow.eval.bench import campaign, cluster, faults, local_cluster
from ptxflow.eval.bench.cluster import Cluster
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.bench.worker import Lost, Worker, WorkerError
from tests.builders import compiled, gemm_space

SPACE = gemm_space(64, 128, 128)
TASKS = [(SPACE.problem, SPACE.strategy(int(c)), H200) for c in SPACE.codes[:3]]
H200_GPU = {"name": "NVIDIA H200", "driver": "580", "capability": [9, 0]}


class Executor:
    """Runs at once what a worker would; a worker that is not there never answers."""

    def __init__(self, client: "Scheduler", options: dict[str, Any]):
        self.client, self.options = client, options

    def submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        made: Future[Any] = Future()
        (address,) = self.options.get("workers", ["compiler"])
        if address not in self.client.workers:
            return made
        if address in self.client.dying:
            del self.client.workers[address]
            return made
        try:
            made.set_result(self.client.answer(address, work, *given))
        except Exception as error:
            made.set_exception(error)
        return made

    def shutdown(self, wait: bool) -> None:
        pass


class Scheduler:
    """In place of `distributed.Client`: workers by address, with what they offer and say."""

    def __init__(self, gpus: dict[str, dict[str, Any]]):
        self.said = {a: {"gpu": H200_GPU, "code": cache.sources(), "ptxas": "13"} | s
                     for a, s in gpus.items()}  # fmt: skip
        self.workers: dict[str, Any] = {a: {"resources": cluster.GPU} for a in gpus}
        self.workers["compiler"] = {"resources": cluster.COMPILE}
        self.dying: set[str] = set()
        self.calls: list[tuple[str, str]] = []

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        return {"workers": dict(self.workers)}

    def get_executor(self, **options: Any) -> Executor:
        return Executor(self, options)

    def answer(self, address: str, work: Callable[..., Any], *given: Any) -> Any:
        self.calls.append((address, work.__name__))
        if work is cluster.about:
            return json.dumps(self.said[address])
        if work is cluster.run:
            outcome = self.said[address].get("outcome", {"status": "ok", "by": address})
            return json.dumps([outcome] * len(json.loads(given[1])))
        return work(*given)


def connected(scheduler: Scheduler, **options: Any) -> tuple[Cluster, list[str]]:
    """A cluster that needs no Dask, and what it says."""
    said: list[str] = []
    return Cluster("tcp://here:1", say=said.append, client=scheduler, **options), said


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "POLL", 0.001)
    monkeypatch.setattr(cluster, "REBIND", 0.02)


def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "k.cubin").write_bytes(b"kernel")
    return {"image": str(tmp_path / "k.cubin"), "launch": {}}


def test_tasks_cross_as_text() -> None:
    assert cluster.read_tasks(cluster.task_text(TASKS)) == TASKS


def test_kernels_and_refusals_cross_as_text() -> None:
    kernel = compiled(*TASKS[0], image=bytes(range(256)), techniques={"HGMMA": 2})
    told = cluster.read_outcomes(
        cluster.outcome_text([kernel, HazardError("a race"), PtxasError("line 3")]), TASKS
    )
    assert told[0] == kernel
    assert [type(t) for t in told[1:]] == [HazardError, PtxasError]
    assert [str(t) for t in told[1:]] == ["a race", "line 3"]


def test_a_refusal_of_a_class_unknown_here_stays_one() -> None:
    text = json.dumps([{"refusal": "SystemExit", "text": "boo"}])
    (told,) = cluster.read_outcomes(text, TASKS[:1])
    assert type(told) is CompileError


def test_a_worker_compiles_what_comes_as_text() -> None:
    (told,) = cluster.read_outcomes(cluster.compile_text(cluster.task_text(TASKS[:1])), TASKS[:1])
    assert told.cubin.startswith(b"\x7fELF") and told.strategy == TASKS[0][1]  # type: ignore[union-attr]


def test_gpus_of_another_kind_are_told_apart() -> None:
    other = {"gpu": H200_GPU | {"driver": "570"}}
    b200 = {"gpu": {"name": "NVIDIA B200", "driver": "580", "capability": [10, 0]}}
    scheduler = Scheduler({"a": {}, "b": other, "c": {}, "d": b200, "e": {"error": "no torch"}})
    made, said = connected(scheduler)
    assert [w.address for w in made.gpus(H200)] == ["a", "c"]
    assert any("driver 570" in line for line in said)
    assert any("e is not used: no torch" in line for line in said)


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ({}, "no GPU of the cluster"),
        ({"a": {"gpu": {"name": "B200", "capability": [10, 0]}}}, "no GPU of the cluster"),
        ({"a": {"code": "0123456789ab"}}, "another version of the compiler"),
    ],
)
def test_a_cluster_that_is_no_use_is_refused(gpus: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        connected(Scheduler(gpus))[0].gpus(H200)


def replaced(**said: str) -> cluster.RemoteWorker:
    """A worker whose host was lost; another is there, which says this of itself."""
    scheduler = Scheduler({"a": {}})
    (worker,) = connected(scheduler)[0].gpus(H200)
    del scheduler.workers["a"]
    scheduler.workers["b"] = {"resources": cluster.GPU}
    scheduler.said["b"] = scheduler.said["a"] | said
    return worker


def test_what_a_lost_worker_held_is_measured_by_another(tmp_path: Path) -> None:
    worker = replaced()
    assert worker.run(job(tmp_path), 1.0) == {"status": "ok", "by": "b"}
    assert worker.starts == 2


def test_another_kind_does_not_take_over(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="no other came"):
        replaced(ptxas="12").run(job(tmp_path), 1.0)


def test_a_gpu_that_another_slot_holds_is_not_taken(tmp_path: Path) -> None:
    scheduler = Scheduler({"a": {}, "b": {}})
    first, second = connected(scheduler)[0].gpus(H200)
    del scheduler.workers["a"]
    with pytest.raises(WorkerError, match="no other came"):
        first.run(job(tmp_path), 1.0)
    assert second.run(job(tmp_path), 1.0)["by"] == "b"


def test_a_kernel_that_loses_three_hosts_is_at_fault(tmp_path: Path) -> None:
    scheduler = Scheduler({name: {} for name in "abcd"})
    made, _ = connected(scheduler)
    workers = made.gpus(H200)
    for extra in workers[1:]:
        made._bound.pop(extra.address)
    calls = scheduler.answer

    def deadly(address: str, work: Callable[..., Any], *given: Any) -> Any:
        if work is cluster.run:
            del scheduler.workers[address]
            raise cluster.CancelledError
        return calls(address, work, *given)

    scheduler.answer = deadly  # type: ignore[method-assign]
    outcome = workers[0].run(job(tmp_path), 1.0)
    assert outcome["status"] == "fault" and len(scheduler.workers) == 2


def test_a_scheduler_that_is_gone_is_not_the_kernels_fault(tmp_path: Path) -> None:
    scheduler = Scheduler({"a": {}})
    (worker,) = connected(scheduler)[0].gpus(H200)

    def gone(n_workers: int) -> dict[str, Any]:
        raise OSError("closed")

    scheduler.workers.clear()
    scheduler.scheduler_info = gone  # type: ignore[method-assign]
    with pytest.raises(Lost, match="the scheduler at tcp://here:1 is gone"):
        worker.run(job(tmp_path), 1.0)


def test_a_client_that_was_closed_is_a_scheduler_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = connected(Scheduler({"a": {}}))[0]
    (worker,), compiler = made.gpus(H200), made.compiler()

    def closed(*_: Any) -> None:
        raise ClosedClientError("Client is closed")

    monkeypatch.setattr(Executor, "submit", closed)
    monkeypatch.setattr(cluster, "REBIND", 0.0)
    with pytest.raises(Lost):
        worker.run(job(tmp_path), 1.0)
    with pytest.raises(BrokenProcessPool, match="the scheduler at tcp://here:1 is gone"):
        compiler.submit(TASKS[:1]).result(timeout=1.0)
    compiler.close()


def test_hosts_start_children_by_their_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CHILDREN", {})
    monkeypatch.setattr("distributed.Client", lambda *_, **__: None)
    child = Cluster("tcp://here:1").child
    assert json.loads(child) == []  # nothing of this host
    assert cluster._child(child).command == Worker().command


def test_a_machinery_that_fails_there_fails_here(tmp_path: Path) -> None:
    made, _ = connected(Scheduler({"a": {"outcome": {"error": "the worker died"}}}))
    (worker,) = made.gpus(H200)
    with pytest.raises(WorkerError, match="the worker died"):
        worker.run(job(tmp_path), 1.0)


def test_the_child_is_given_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Child(Worker):
        def run(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
            paths = [k["image"] for k in job.get("kernels", [job])]
            return {"status": "ok", "read": [Path(p).read_text() for p in paths]}

    monkeypatch.setattr(cluster, "_child", lambda command: Child())
    jobs = [{"image": "elsewhere"}, {"kernels": [{"image": "p"}, {"image": "q"}]}]
    told = json.loads(cluster.run("[]", json.dumps(jobs), [b"x", b"y", b"z"], 1.0))
    assert [t["read"] for t in told] == [["x"], ["y", "z"]]


def test_a_batch_that_a_host_was_lost_over_is_done_one_by_one(tmp_path: Path) -> None:
    scheduler = Scheduler({"a": {}, "b": {}})
    first, second = connected(scheduler)[0].gpus(H200)
    scheduler.dying = {"a"}
    scheduler.workers["c"], scheduler.said["c"] = scheduler.workers["b"], scheduler.said["b"]
    told = first.run_all([job(tmp_path)] * 3, 1.0)
    assert told == [{"status": "ok", "by": "c"}] * 3 and second.address == "b"
    assert [w for a, w in scheduler.calls if a == "c"] == ["about", *["run"] * 3]


def test_compilers_answer_or_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler({})
    made, _ = connected(
        scheduler, compile_in=lambda text: cluster.outcome_text([HazardError(text)])
    )
    compiler = made.compiler()
    (told,) = compiler.submit(TASKS[:1]).result(timeout=5)
    assert isinstance(told, HazardError) and compiler.workers == 1
    del scheduler.workers["compiler"]
    with pytest.raises(BrokenProcessPool, match="no worker"):
        compiler.submit(TASKS[:1]).result(timeout=5)
    compiler.close()
    with pytest.raises(BadInput, match="COMPILE"):
        made.compiler()


def test_an_address_that_nobody_listens_at_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(campaign.CLUSTER, "")  # what the command sets goes with the test
    argv = ["--cluster", "nothing://here", "--definition", "gemm_n128_k2048", "--axes", "M=1"]
    assert campaign.main([*argv, "--out", str(tmp_path / "r.jsonl")]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "nothing://here" in said[0]


# The fault campaign ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first lines of the recorded times."""
    path = tmp_path_factory.mktemp("times") / "t.jsonl"
    with lzma.open(faults.TIMES) as file:
        path.write_bytes(b"".join(islice(file, 40)))
    return path


def test_a_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        local_cluster, "local", lambda gpus, compilers: made.append((gpus, compilers))
    )
    local_cluster.of_this_machine("2", ["3", "GPU-a", "5"], 7)
    local_cluster.of_this_machine("1", ["0"], None)
    devices = [[gpu["CUDA_VISIBLE_DEVICES"] for gpu in gpus] for gpus, _ in made]
    assert devices == [["3", "GPU-a"], ["0"]] and made[0][1] == 7 and made[1][1] >= 1
    for count in ("", "0", "2", "-1", "x"):
        with pytest.raises(BadInput, match="from 1 to 1, the visible GPUs"):
            local_cluster.of_this_machine(count, ["0"], None)


def test_a_share_is_planted_and_stays() -> None:
    names = [f"kernel {i}" for i in range(4000)]
    planted = [faults.fate(n, 0.04, 1) for n in names]
    assert 120 < sum(map(bool, planted)) < 200 and set(planted) == {"", *faults.FATES}
    assert planted == [faults.fate(n, 0.04, 1) for n in names]
    assert planted != [faults.fate(n, 0.04, 2) for n in names]


def test_more_kernels_than_recorded_are_refused(times: Path) -> None:
    with pytest.raises(BadInput, match="not 1000000"):
        faults.plan([times], 1_000_000)


def test_one_gpu_finds_the_fates(times: Path, tmp_path: Path) -> None:
    workloads, us = faults.plan([times], 24)
    table = faults.images(us, 0.0, 1, 0.0)
    names = list(table)
    for name, fate in zip(names, ("wrong", "fault"), strict=False):
        table[name]["fate"] = fate
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table))
    run = faults.on_one_host(workloads, str(path), tmp_path / "r.jsonl", 5.0)
    assert run.statuses == {"ok": 22, "wrong": 1, "fault": 1} and not run.doubled
    fastest = min(names[2:16], key=us.__getitem__)
    assert fastest.endswith(next(iter(run.best.values())))


def test_what_ends_a_campaign_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, times: Path, tmp_path: Path
) -> None:
    breaks = faults.FULL, faults.CUT, faults.CLOCK
    monkeypatch.setattr(faults, "BREAKS", breaks)  # without Dask
    given = ["--times", str(times), "--kernels", "24", "--share", "0.1", "--out", str(tmp_path)]
    args = faults.arguments(given)
    alone, found = faults.broken(args)
    assert all(faults.holds(run, alone) for run in found.values()) and [*found] == [*breaks]
    assert 0 < found[faults.FULL].kills < 24 and 0 < found[faults.CUT].kills < 24
    for name in (faults.FULL, faults.CUT):  # it ended in the middle of a line, and is whole again
        assert len(read_records(tmp_path / f"{name.replace(' ', '-')}.jsonl")) == 24
    rows = faults.broken_table(alone, found).splitlines()
    assert len(rows) == 4 and all("0 lost, 0 doubled" in row for row in rows[1:])
    short = replace(alone, records=alone.records[:-1])
    assert "1 lost" in faults.broken_table(alone, {faults.CUT: short})


def test_a_lost_record_is_seen(times: Path) -> None:
    ok = [r for r in faults.read_records(times) if r.status == "ok"][:4]
    whole = faults.Run(tuple(ok), 2.0)
    assert faults.holds(whole, whole)
    assert not faults.holds(faults.Run(tuple(ok[:3]), 2.0), whole)
    assert not faults.holds(faults.Run((*ok, ok[0]), 2.0), whole)
    args = argparse.Namespace(seconds=0.5, workers=2, timeout=1.0)
    table = {str(i): {"fate": ""} for i in range(4)}
    lines = faults.table_of(faults.Run((*ok[1:], ok[1]), 2.0), whole, table, args).splitlines()
    told = {" ".join(line.split()) for line in lines}
    assert {"records lost 1", "records doubled 1", "efficiency 0.500"} <= told


@pytest.mark.slow
def test_dask_workers_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    argv = ["--workers", "3", "--kernels", "60", "--kills", "2", "--seconds", "0.3"]
    assert faults.main([*argv, "--timeout", "3", "--out", str(tmp_path)]) == 0
