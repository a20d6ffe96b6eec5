"""`kill -9` at random moments, and the same command again until it ends: it ends as one does that
was left alone, and no record is lost or made twice. `pytest -m slow tests/eval/test_killed.py`
kills 200 and prints a row of each kind of work."""

import faulthandler
import json
import multiprocessing
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

import train
from ptxflow import sample
from ptxflow.compiler.backend import cache
from ptxflow.compiler.library.manifest import read_manifest
from ptxflow.env.measurements import SCREEN
from ptxflow.eval.bench import campaign
from ptxflow.eval.bench.records import read_records
from ptxflow.eval.sample import library
from ptxflow.eval.study import training_plots
from tests.builders import space_at, untrained
from tests.eval import test_library, test_tune_faults
from tests.gfn import test_train_script
from tests.scripted_gpu import scripted_gpu

LONGEST = 240  # seconds that one run may take


@dataclass(frozen=True)
class Work:
    """A command in a folder, what it leaves there, and the records that it appends to."""

    run: Callable[[Path], int]
    end: Callable[[Path], object]
    records: str = ""


def measured(folder: Path) -> int:
    given = [
        "--definition",
        "gemm_n256_k7168",
        "--axes",
        "M=64",
        "--samples",
        "24",
        "--refine",
        "4",
    ]
    return campaign.main([*given, "--out", str(folder / "r.jsonl")]) // 2  # 1: not all are right


def trained(folder: Path) -> int:
    if (folder / "t" / "checkpoint.safetensors").exists():
        return train.main(["--resume", str(folder / "t")])
    more = ["--steps", "12", "--out", str(folder / "t")]
    return train.main([*test_train_script.RUN, *more])


def kept(folder: Path) -> int:
    store = cache.Store(folder / "c")
    for i in range(400):
        name = cache.key(str(i))
        assert store.get(name) in (None, 99 * name.encode())
        store.put(name, 99 * name.encode())
    return 0


def served(folder: Path) -> object:
    assert [p.name for p in folder.iterdir()] == ["a"]  # no state is left
    return read_manifest(folder / "a").dispatch


def steps(folder: Path) -> object:
    found = json.loads((folder / "t" / "result.json").read_text())
    return found["workloads"], test_train_script.rows(folder / "t", "step")


def statuses(folder: Path) -> object:
    found = read_records(folder / "r.jsonl")
    return sorted((r.key, r.status) for r in found if r.timing_pass == SCREEN)


@pytest.fixture
def works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Work]:
    space = space_at(test_library.NAME, {test_library.AXIS: 17})
    policy = untrained(tmp_path / "policy", space)
    for name in ("compile_all", "text_of", "LOOKS", "CELLS", "BETWEEN", "HELD_OUT"):
        small = {"LOOKS": 8, "CELLS": 24, "BETWEEN": 12, "HELD_OUT": 3}
        other = {"compile_all": test_library.fake_compile, "text_of": test_library.text_of}
        monkeypatch.setattr(library, name, (small | other)[name])
    monkeypatch.setattr(training_plots, "training_plots", lambda runs, folder: [])
    scripted_gpu(monkeypatch, tmp_path)
    test_tune_faults.without_code(monkeypatch)
    return {
        "tuning": Work(lambda f: test_tune_faults.played(f / "s"),
                       lambda f: test_tune_faults.held(f / "s"), "s/records.jsonl"),
        "campaign": Work(measured, statuses, "r.jsonl"),
        "training": Work(trained, steps),
        "library": Work(lambda f: sample.main(test_library.argv(policy, f / "a")), served),
        "cache": Work(kept, lambda f: cache.Store(f / "c").clear(0.0, damaged=True)),
    }  # fmt: skip


def ended(work: Work, folder: Path, seconds: float | None = None) -> bool:
    """Whether the command ends by itself, which it does well; killed after so many seconds."""

    def run() -> None:
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.alarm(LONGEST)
        tqdm.set_lock(threading.RLock())  # its own would stay locked where a child is killed
        sys.exit(work.run(folder))

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode in (0, -9)
    return child.exitcode == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 3) for name in ("tuning", "campaign", "cache")),
        *(pytest.param(name, 40, marks=pytest.mark.slow)
          for name in ("tuning", "campaign", "cache", "training", "library")),
    ],
)  # fmt: skip
def test_what_is_killed_ends_as_what_is_not(
    name: str, count: int, works: dict[str, Work], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    work, rng, kills, number, records = works[name], random.Random(name), 0, 0, 0
    (whole := tmp_path / "whole").mkdir()
    began = time.monotonic()
    assert ended(work, whole)
    length = time.monotonic() - began
    while kills < count:
        number += 1
        (folder := tmp_path / str(number)).mkdir()
        known: list[Any] = []
        while not ended(work, folder, rng.uniform(0, length) if kills < count else None):
            kills += 1
            before, known = known, read_records(folder / work.records) if work.records else []
            assert known[: len(before)] == before  # none is lost
        assert work.end(folder) == work.end(whole)
        if work.records:
            found = Counter(r.identity for r in read_records(folder / work.records))
            assert all(n == 1 for of, n in found.items() if of[4] == SCREEN)
            records += len(found)
    with capsys.disabled():
        print(
            f"\n| {name} | {kills} | {number} | {length:.1f} | {records} | {number} as left alone |"
        )
