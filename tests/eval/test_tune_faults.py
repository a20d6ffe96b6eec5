"""Tuning sessions among things that go wrong: files that are damaged or another's, profilers that
fail, kernels that hang. One line each, and the state stays as it is."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ptxflow.eval.bench import measurer
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.bench.worker import Worker
from ptxflow.eval.tune import counters, knowledge, session
from ptxflow.eval.tune.benches import OnGpu
from ptxflow.eval.tune.gaps import Profile
from tests.scripted_gpu import CHILD, scripted_gpu

WORKLOAD = ["--definition", "gemm_n256_k7168", "--axes", "M=64"]
#: the scripted child, in which kernels 4..., 9... hang and 5... end the process
FAULTY = CHILD.replace(
    '    if key[:1] == b"f":',
    '    if key[:1] in b"2349":\n        import time; time.sleep(60)\n'
    '    if key[:1] == b"5":\n        os._exit(9)\n    if key[:1] == b"f":',
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A scripted GPU; kernels are names there, so that no champion is written."""
    scripted_gpu(monkeypatch, tmp_path)
    without_code(monkeypatch)
    return tmp_path


def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "deliver", lambda *_: None)
    monkeypatch.setattr(OnGpu, "alike", lambda *_: False)


def played(state: Path, *more: str) -> int:
    common = [*WORKLOAD, "--budget", "12", "--state", str(state)]
    return session.main([*common, *([] if "--profiler" in more else ["--profiler", "no"]), *more])


def held(state: Path) -> dict[str, Any]:
    found = json.loads((state / "session.json").read_text())
    return {n: found.get(n) for n in ("rounds", "champion", "measured", "noise")}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def spoiled(name: str, text: str | Callable[[str], str]) -> Callable[[Path], None]:
    def spoil(state: Path) -> None:
        path = state / name
        path.write_text(text if isinstance(text, str) else text(path.read_text()))

    return spoil


def other(name: str, value: object) -> Callable[[Path], None]:
    def change(text: str) -> str:
        found = json.loads(text)
        found["settings"][name] = value
        return json.dumps(found)

    return spoiled("session.json", change)


BAD_FILES = {
    "truncated session": (spoiled("session.json", lambda t: t[: len(t) // 2]), "no session"),
    "session of nothing": (spoiled("session.json", "[]"), "says no settings"),
    "empty session": (spoiled("session.json", ""), "no session"),
    "settings of nothing": (spoiled("session.json", '{"settings": 3}'), "says no settings"),
    "another version": (other("schema", 99), "schema is 99 there"),
    "another definition": (other("definition", "x"), "definition is 'x' there"),
    "another device": (other("device", "h100"), "device is 'h100' there"),
    "other decisions": (other("decisions", "0"), "decisions is '0' there"),
    "truncated knowledge": (spoiled("knowledge.jsonl", '{"state": "s", '), "no entry"),
    "torn record in the middle": (spoiled("records.jsonl", lambda t: t[9:]), "records.jsonl"),
    "rubbish among profiles": (spoiled("profiles.jsonl", "rubbish\n"), "no profile in"),
    "profile of nothing": (spoiled("profiles.jsonl", '{"key": "k"}\n'), "no profile in"),
    "rubbish as noise": (spoiled("noise", "rubbish"), "no noise"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A session that has ended on a scripted GPU."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        scripted_gpu(patch, folder)
        without_code(patch)
        assert played(folder / "s") == 0
    yield folder / "s"


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_line_and_stays(
    name: str, finished: Path, gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, why = BAD_FILES[name]
    state = gpu / "s"
    shutil.copytree(finished, state)
    spoil(state)
    before = files(state)
    capsys.readouterr()
    assert played(state) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tune:")]
    assert len(said) == 1 and why in said[0] and str(state) in said[0]
    assert files(state) == before


def test_a_session_goes_on_with_its_profiles(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ncu counted is not counted again, and a round sees the same."""
    taken: list[Profile] = []

    def profile(*_: object) -> Profile:
        taken.append(Profile(0.5, 0.25, 0.75, "gmma"))
        return taken[-1]

    monkeypatch.setattr(counters, "profile", profile)
    given = ["--starts", "4", "--budget", "6", "--profiler", "ncu"]
    assert played(gpu / "s", *given) == 0
    first, count = held(gpu / "s"), len(taken)
    assert played(gpu / "s", *given) == 0
    assert count and len(taken) == count and held(gpu / "s") == first


def test_what_was_cut_off_is_passed_over(finished: Path, gpu: Path) -> None:
    """Half a line at the end of records or profiles is a write that was killed."""
    state = gpu / "s"
    shutil.copytree(finished, state)
    for name in ("records.jsonl", "profiles.jsonl"):
        with (state / name).open("a") as file:
            file.write('{"key": "ab')
    assert played(state) == 0
    assert held(state) == held(finished)
    assert not (state / "profiles.jsonl").read_text()


@pytest.mark.parametrize("where", ["state", "knowledge"])
def test_what_cannot_be_written_is_one_line(
    where: str, gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (gpu / "file").write_text("in the way")
    paths = {"state": gpu / "s", "knowledge": gpu / "k.sqlite"} | {where: gpu / "file" / "below"}
    assert played(paths["state"], "--knowledge", str(paths["knowledge"])) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tune:")]
    assert len(said) == 1 and str(gpu / "file") in said[0]


NCU = {
    "refused": ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission' > $3; exit 1", "NVGPUCTRPERM"),
    "rubbish": ("echo rubbish > $3; echo rubbish", "ncu: "),
    "dies": ("exit 3", "ncu: exit code 3"),
    "silent": ("exec sleep 60", "did not start within"),
}


@pytest.mark.parametrize("name", [*NCU, "missing"])
def test_without_a_profile_the_loop_goes_on_by_floors(
    name: str, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ncu = gpu / "ncu"
    if name in NCU:
        ncu.write_text(f"#!/bin/sh\n{NCU[name][0]}\n")
        ncu.chmod(0o755)
    monkeypatch.setattr(counters, "START", 1.0)
    assert played(gpu / "s", "--starts", "4", "--budget", "6", "--profiler", str(ncu)) == 0
    state = json.loads((gpu / "s" / "session.json").read_text())
    assert NCU.get(name, ("", "No such file"))[1] in state["profiler"]
    assert {r["gaps"]["source"] for r in state["rounds"]} == {"floors"}


def test_a_branch_that_hangs_or_faults_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_gpu(monkeypatch, tmp_path, FAULTY)
    without_code(monkeypatch)

    @contextmanager
    def brief(*arguments: Any) -> Iterator[list[measurer.Measurer]]:
        with measurer.open_measurers(*arguments) as found:
            found[0].settings = dataclasses.replace(found[0].settings, timeout=0.5)
            yield found

    monkeypatch.setattr(session, "open_measurers", brief)
    assert played(tmp_path / "s", "--budget", "24") == 0
    records = read_records(tmp_path / "s" / "records.jsonl")
    assert {"ok", "hang", "fault"} <= {r.status for r in records}
    champion = json.loads((tmp_path / "s" / "session.json").read_text())["champion"]["key"]
    assert next(r.status for r in records if r.key == champion) == "ok"


def test_sessions_side_by_side_share_a_gpu_and_their_knowledge(gpu: Path) -> None:
    """Each ends as it does alone; the best of the policy's draws is timed beside the champion."""
    rows = [{"definition": "gemm_n256_k7168", "axes": {"M": m}} for m in (64, 1063)]
    listed = gpu / "workloads.json"
    listed.write_text(json.dumps(rows))
    common = ["--starts", "4", "--budget", "8", "--profiler", "no", "--rivals", "4"]
    base = gpu / "moves.sqlite"
    both = ["--workloads", str(listed), "--state", str(gpu / "both"), "--knowledge", str(base)]
    assert session.main([*both, *common]) == 0
    assert session.main([*WORKLOAD, *common, "--state", str(gpu / "one")]) == 0
    together = [held(p.parent) for p in sorted((gpu / "both").rglob("session.json"))]
    assert len(together) == 2 and held(gpu / "one") in together
    for one in together:
        assert one["champion"]["us"] <= one["champion"]["start_us"]
        assert one["champion"]["rival_us"]
    tried = sum(e.tried for e in knowledge.Knowledge(base).entries())
    assert session.main([*both, *common]) == 0  # nothing is measured, and nothing learned, again
    assert sum(e.tried for e in knowledge.Knowledge(base).entries()) == tried > 0
    listed.write_text('[{"axes": {}}]')
    assert session.main([*both, *common]) == 2


def test_the_last_rounds_judge_champion_start_and_draws_alike(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one job, which thinks otherwise of kernels than the rounds that chose them: as many draws
    as kernels of the session, the champion the fastest of its own there, and so no slower than
    the start."""
    jobs: list[dict[str, float]] = []
    ended: list[session.Tuning] = []
    run, finals = Worker.run, session.Tuning.finals

    def otherwise(worker: Worker, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        found = run(worker, job, timeout)
        if "kernels" in job:
            keys = [Path(k["image"]).name.partition(".")[0] for k in job["kernels"]]
            jobs.append({key: 5 + int(key[-3:], 16) / 256 for key in keys})
            for key, outcome in zip(keys, found["outcomes"], strict=True):
                outcome["latency_us"]["median"] = jobs[-1][key]
        return found

    def seen(tuning: session.Tuning) -> dict[str, Any]:
        ended.append(tuning)
        return finals(tuning)

    monkeypatch.setattr(Worker, "run", otherwise)
    monkeypatch.setattr(session.Tuning, "finals", seen)
    assert played(gpu / "s", "--rivals", "12", "--knowledge", "no") == 0
    (tuning,), times, final = ended, jobs[-1], held(gpu / "s")["champion"]
    right = [s for s, t in tuning.rivals.items() if t.right]
    own = list(dict.fromkeys([*tuning.session.frontier[:7], tuning.first]))
    draws = sorted(right, key=lambda s: tuning.rivals[s].us)[: len(own)]
    assert len(draws) == len(own) and set(times) == {s.key for s in [*own, *draws]}
    best = min(own, key=lambda s: times[s.key])
    told = {
        "us": times[best.key],
        "start_us": times[tuning.first.key],
        "screened_us": times[own[0].key],
        "rival_us": min(times[s.key] for s in draws),
    }
    assert final["key"] == best.key and {n: final[n] for n in told} == pytest.approx(told)
    assert best not in (own[0], tuning.first)
