"""The tuning loop: moves, gaps, knowledge, attribution, counters, sessions that go on."""

import json
import math
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxflow.command import BadInput
from ptxflow.compiler.device import H200, Device
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels import FAMILIES
from ptxflow.env.measurements import REFINE, SCREEN
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.space import EmptySpace, enumerate_space
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import campaign
from ptxflow.eval.bench.records import Record, read_records
from ptxflow.eval.bench.roofline import Floors
from ptxflow.eval.bench.schedule import Outcome as Built
from ptxflow.eval.study.search.play import interference, play
from ptxflow.eval.study.search.replay import Replay, read_replays
from ptxflow.eval.tune import counters, knowledge, loop, report, session
from ptxflow.eval.tune.benches import STEADY, OnGpu
from ptxflow.eval.tune.champions import floors_of
from ptxflow.eval.tune.gaps import NEAR_PEAK, Gaps, Profile
from ptxflow.eval.tune.knowledge import Entry, Follow, Knowledge, Outcome, from_lines
from ptxflow.eval.tune.loop import EFFECTIVE, INEFFECTIVE, NOT_IMPLEMENTED, Session, Timed
from ptxflow.eval.tune.method import tuners
from ptxflow.eval.tune.moves import AXES, LESS, MORE, MOVES, OTHER, directed
from tests.scripted_gpu import MADE, FakeCompiler, fake_compile, scripted_gpu

ROOT = Path(__file__).resolve().parents[2]
FLOORS = Floors(compute=10.0, memory=5.0, launch=1.0)
(LARGER,) = (m for m in MOVES if m.name == "deeper ring")


@pytest.fixture(scope="module")
def space() -> RelationSpace:
    family, problem = find_problem(load("gemm_n256_k7168"), {"M": 64})
    return relate(family, problem, H200)


def uniform(part: RelationSpace, k: int, seed: int) -> np.ndarray:
    return part.sample_uniform(k, np.random.default_rng(seed))


class Scripted(loop.Bench):
    """Times by a function of the strategy; kernels are alike where `hidden` says so."""

    noise = 0.01

    def __init__(self, us: Callable[[Strategy], float], hidden: Sequence[str] = ()) -> None:
        self.us, self.hidden, self.asked = us, hidden, list[Strategy]()

    def times(self, strategies: Sequence[Strategy]) -> list[Timed]:
        self.asked += strategies
        return [Timed(self.us(s), "" if math.isfinite(self.us(s)) else "wrong") for s in strategies]

    def settle(self, strategies: Sequence[Strategy]) -> None:
        assert len(strategies) <= loop.SETTLED

    def profile(self, strategy: Strategy) -> None:
        return None

    def alike(self, ours: Strategy, other: Strategy) -> bool:
        return ours.replace(**{n: getattr(other, n) for n in self.hidden}) == other


def played(
    space: RelationSpace, bench: Scripted, seed: int = 0, begin: RelationSpace | None = None,
    **limits: int,
) -> tuple[Session, list[loop.Round]]:  # fmt: skip
    found = Session(space, FLOORS, bench, uniform, limits=loop.Limits(**limits), seed=seed)
    starts = [space.strategy(int(c)) for c in uniform(begin or space, 4, seed)]
    return found, list(found.rounds(starts))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_decision_has_a_move(family) -> None:
    moved = {n for m in MOVES if not m.families or family.name in m.families for n in m.changes
             if m.changes.keys() <= {d.name for d in family.wide.decisions}}  # fmt: skip
    assert {d.name for d in family.wide.decisions} <= moved


def test_moves_name_decisions_and_choices_that_there_are() -> None:
    assert len({m.name for m in MOVES}) == len(MOVES)
    for move in MOVES:
        assert move.axis in AXES and 0 < move.strength <= 1
        for name, to in move.changes.items():
            rows = [d for f in FAMILIES.values() for d in f.wide.decisions if d.name == name]
            assert rows, name
            assert to in (MORE, LESS, OTHER) or any(to in map(str, d.choices) for d in rows)


def test_a_direction_leaves_what_lies_there() -> None:
    assert directed((1, 2, 4, 8), 2, MORE) == (4, 8)
    assert directed((1, 2, 4, 8), 2, LESS) == (1,)
    assert directed((1, 2, 4, 8), 2, OTHER) == (1, 4, 8)
    assert directed((0, 1), 0, "1") == (1,) and directed((0, 1), 1, "1") == ()


def test_gaps_weigh_a_roof_by_how_much_it_matters() -> None:
    gaps = Gaps.of(FLOORS, 22.0)
    assert gaps.share == 0.5 and gaps.latency == 0.5
    assert gaps.compute == pytest.approx(1 - 10 / 22, abs=1e-3)
    assert gaps.memory == pytest.approx(0.5 * (1 - 5 / 22), abs=1e-3)
    assert not gaps.near_peak and Gaps.of(FLOORS, 11.2).near_peak
    counted = Gaps.of(FLOORS, 22.0, Profile(0.9, 0.2, 0.6, "long_scoreboard"))
    assert (counted.compute, counted.memory, counted.latency) == (0.1, 0.4, 0.3)
    assert counted.source == "ncu"
    many = dict.fromkeys(AXES, 9)
    assert gaps.budget(3, many) == {"compute": 1, "memory": 1, "latency": 1}
    assert Gaps(0.9, 0.1, 0.1, 0.1, "").budget(3, many)["compute"] == 2  # of one axis, at most
    assert sum(gaps.budget(3, {"compute": 0, "memory": 1, "latency": 0}).values()) == 1
    assert gaps.state("gemm", 300.0) == "gemm compute2 latency2 ai2"


def measured(found: Session, asking: Generator[Any, Any, Any]) -> Any:
    """What a part of a session returns, its questions answered by the session's bench."""
    try:
        asked = next(asking)
        while True:
            asked = asking.send(found.bench.times(asked))
    except StopIteration as end:
        return end.value


def planted(space: RelationSpace, start: Strategy, worth: float) -> Callable[[Strategy], float]:
    """Times in which everything but a deeper ring is worth nothing."""
    return lambda s: 40.0 / (worth if s.num_stages > start.num_stages else 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_attribution_classes_planted_moves(space: RelationSpace, seed: int) -> None:
    """A move that halves the time, one of no effect, and one that ptxas removes."""
    part = space.given({"num_stages": (2, 3)})
    starts = [part.strategy(int(uniform(part, 1, seed)[0]))]
    for worth, hidden, verdict in (
        (2.0, (), EFFECTIVE), (1.004, (), INEFFECTIVE), (1.004, ("num_stages",), NOT_IMPLEMENTED),
    ):  # fmt: skip
        bench = Scripted(planted(space, starts[0], worth), hidden)
        found = Session(space, FLOORS, bench, uniform, seed=seed)
        measured(found, found._measure(starts))
        fixed = LARGER.fixed(space.family, starts[0])
        kept = found._given({**found._kept(starts[0], fixed), **fixed})
        assert isinstance(kept, RelationSpace)
        champion = kept.strategy(int(uniform(kept, 1, seed)[0]))
        (better,) = measured(found, found._measure([champion]))
        assert better.us == 40.0 / worth
        worth = measured(found, found._attribution(starts[0], champion, LARGER, "s"))
        assert worth.verdict == verdict


def test_a_loop_finds_what_a_move_is_worth(space: RelationSpace) -> None:
    bench = Scripted(lambda s: 1000.0 / (s.num_stages * (2 if s.split_k > 1 else 1)))
    begin = space.given({"num_stages": (2,), "split_k": (1,)})
    found, rounds = played(space, bench, begin=begin, rounds=20, measurements=64)
    best = found.frontier[0]
    assert best.num_stages >= 4 and best.split_k > 1
    gained = [a for r in rounds for a in r.attributions if a.verdict == EFFECTIVE]
    assert gained and all(a.gain and a.gain > 0.01 for a in gained)
    assert len(bench.asked) == len(set(bench.asked)) == len(found.measured) <= 64
    assert rounds[-1].end and not any(r.end for r in rounds[:-1])


def scattered(s: Strategy) -> float:
    return 20.0 + int(s.key[:4], 16) / 4096


def test_a_round_takes_what_may_be_fastest(space: RelationSpace) -> None:
    """Told the truth, a move is made in the fastest way; where no move is left draws go on."""

    def hope(part: RelationSpace, codes: np.ndarray) -> np.ndarray:
        return np.log([scattered(part.strategy(int(c))) for c in codes])

    found = Session(space, None, Scripted(scattered), uniform, hope=hope, seed=2)
    (start,) = starts = [space.strategy(int(c)) for c in uniform(space, 1, 7)]
    first = next(found.rounds(starts))
    kept = [b for b in first.branches if b.moves and not b.drawn]
    assert len(kept) == 2 and sum(not b.moves for b in first.branches) == 2
    for branch in kept:
        (move,) = (m for m in MOVES if m.name in branch.moves)
        left = found._near(start, move.fixed(space.family, start))
        assert all(scattered(space.strategy(int(c))) >= branch.us for c in left)
    drawn = found.branches(start, [], np.random.default_rng(0))
    assert len(drawn) == found.limits.branches and not any(of for of, _, _ in drawn)


def test_a_loop_near_peak_ends_at_once(space: RelationSpace) -> None:
    found, rounds = played(space, Scripted(lambda s: 11.2))
    assert [r.end for r in rounds] == ["near peak"] and len(found.measured) == 4


def test_a_loop_passes_over_what_fails(space: RelationSpace) -> None:
    bench = Scripted(lambda s: math.inf if s.key < "6" else 30.0 + len(s.key.strip("0123456789")))
    found, rounds = played(space, bench, seed=3)
    assert all(found.measured[s].right for s in found.frontier)
    assert any(b.why == "wrong" for r in rounds for b in r.branches)
    with pytest.raises(ValueError, match="none of 4 kernels to start from is right: wrong"):
        played(space, Scripted(lambda s: math.inf))


def test_a_session_is_a_function_of_its_measurements(space: RelationSpace) -> None:
    once, again = (played(space, Scripted(scattered), seed=5) for _ in range(2))
    assert once[1] == again[1] and once[0].outcomes == again[0].outcomes
    assert played(space, Scripted(scattered), seed=6)[1] != once[1]


LEARN = """
import sys
import threading
from pathlib import Path
from ptxflow.eval.tune.knowledge import Knowledge, Outcome
for part in range(10):
    tries = [Outcome("s", "m", 0.1, "before")]
    Knowledge(Path(sys.argv[1])).learn(f"{sys.argv[2]}-{part}", "h200", tries)
"""


def test_knowledge_of_two_processes_at_once_and_a_session_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "moves.sqlite"
    both = [subprocess.Popen([sys.executable, "-c", LEARN, str(path), str(n)]) for n in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    base = Knowledge(path)
    assert not base.learn("0-0", "h200", [Outcome("s", "m", 0.1)])
    (entry,) = base.entries()
    assert (entry.tried, entry.helped) == (20, 20) and entry.gain == pytest.approx(2.0)
    assert base.follows() == [Follow("s", "before", "m", 20, 20)]
    other, lines = Knowledge(tmp_path / "other.sqlite"), tmp_path / "lines"
    assert knowledge.main(["export", str(path)]) == 0
    lines.write_text(capsys.readouterr().out)
    assert knowledge.main(["import", str(other.path), str(lines)]) == 0
    assert other.entries() == base.entries()
    assert knowledge.main(["merge", str(other.path), str(path)]) == 0
    assert other.entries()[0].tried == other.follows()[0].tried == 40
    assert knowledge.main(["show", str(path)]) == 0
    assert "s      m     h200    20     20      +10.00%" in capsys.readouterr().out
    assert knowledge.main(["show", str(tmp_path / "none")]) == 2
    assert knowledge.main(["import", str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0].endswith("none: no such file") and said[1] == "knowledge: import takes what to add"
    )


def test_knowledge_waits_for_who_writes_first(tmp_path: Path) -> None:
    """Also where there is no table yet."""
    path = tmp_path / "moves.sqlite"
    with closing(sqlite3.connect(path, check_same_thread=False)) as other:
        other.execute("begin immediate")
        threading.Timer(0.3, other.rollback).start()
        assert Knowledge(path).learn("0", "h200", [Outcome("s", "m", 0.1)])


def test_bad_knowledge_is_one_line(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish"
    rubbish.write_bytes(b"no database, but long enough to be taken for one" * 100)
    with pytest.raises(BadInput, match="rubbish: no knowledge base"):
        Knowledge(rubbish).entries()
    old = tmp_path / "old"
    with sqlite3.connect(old) as db:
        db.execute("pragma user_version=99")
    with pytest.raises(BadInput, match="of version 99; this reads 1"):
        Knowledge(old).entries()
    for text, why in (
        ("{", "no entry"), ('{"state": "s"}', "no entry"), ("[]", "no entry"),
        (json.dumps(vars(Entry("s", "m", "d", 1, 2, 0.0, 0.0))), "helped must be"),
        (json.dumps(vars(Entry("s", "m", "d", 1, 1, math.nan, 0.0))), "finite"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=f"x:1: .*{why}"):
            from_lines(text, "x")


def csv(values: dict[str, list[float]]) -> str:
    rows = [
        f'"{i}","7","python","host","kernel_{i}","1","7","(1,1,1)","(1,1,1)","0","9.0","Command '
        f'line profiler metrics","{name}","%","{value:,.2f}"'
        for name, found in values.items() for i, value in enumerate(found)
    ]  # fmt: skip
    head = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream",' \
        '"Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit",' \
        '"Metric Value"'  # fmt: skip
    return "\n".join(["==PROF== Connected to process 7", head, *rows]) + "\n"


def test_counters_weigh_launches_by_their_time(tmp_path: Path) -> None:
    values = {name: [0.0, 0.0] for name in counters.METRICS}
    values |= {counters.TIME: [3000.0, 1000.0], counters.COMPUTE: [80.0, 40.0]}
    values |= {counters.MEMORY: [20.0, 60.0], counters.STALL.format("wait"): [1.0, 1.0]}
    values |= {counters.STALL.format("gmma"): [3.0, 3.0]}
    log = tmp_path / "ncu.csv"
    log.write_text(csv(values))
    assert counters.read(log) == Profile(0.7, 0.3, 0.75, "gmma")
    del values[counters.MEMORY]
    for text, why in (
        (csv(values), "no CSV with the metrics"), ("", "no CSV"), ("rubbish\n\n", "no CSV"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission\n", "ncu: ERR_NVGPUCTRPERM - no permission"),
    ):  # fmt: skip
        log.write_text(text)
        with pytest.raises(counters.NoProfile, match=why):
            counters.read(log)
    with pytest.raises(counters.NoProfile, match="no text"):
        counters.read(tmp_path / "missing")


ARGUMENTS = ["--definition", "gemm_n256_k7168", "--axes", "M=64", "--measure", "no"]


def test_the_command_goes_on_and_refuses_what_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, base = str(tmp_path / "s"), str(tmp_path / "k.sqlite")
    arguments = [*ARGUMENTS, "--state", state, "--knowledge", base, "--budget", "12"]
    assert session.main(arguments) == 0
    said = capsys.readouterr()
    assert "no GPU: times are what the" in said.err and "champion" in said.out
    first = json.loads((tmp_path / "s" / "session.json").read_text())
    learnt = Knowledge(tmp_path / "k.sqlite").entries()
    assert learnt and first["champion"]["us"] <= first["champion"]["start_us"]
    assert (tmp_path / "s" / "champion" / "solution.json").is_file()
    assert first["champion"]["key"] in (tmp_path / "s" / "report.md").read_text()

    assert session.main(arguments) == 0  # the same way, and nothing is learned twice
    assert json.loads((tmp_path / "s" / "session.json").read_text()) == first
    assert Knowledge(tmp_path / "k.sqlite").entries() == learnt

    capsys.readouterr()
    assert session.main([*arguments, "--seed", "1"]) == 2
    assert "is of another session: seed is 0 there, 1 here" in capsys.readouterr().err
    (tmp_path / "s" / "session.json").write_text('{"settings":')
    assert session.main(arguments) == 2
    assert "move it away to begin anew" in capsys.readouterr().err
    assert session.main([*ARGUMENTS[:2], "--axes", "M=1,2", "--state", state]) == 2
    assert "a session tunes one workload" in capsys.readouterr().err


def test_a_session_that_was_stopped_anywhere_ends_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stopped in the middle of compiling, each time after another kernel: nothing is measured
    twice, and the end is that of a session that nobody stopped."""
    scripted_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(session, "deliver", lambda *_: None)  # kernels are names here
    monkeypatch.setattr(OnGpu, "alike", lambda *_: False)
    common = [*ARGUMENTS[:4], "--profiler", "no", "--budget", "12"]

    def end(name: str) -> tuple[int, dict[str, object]]:
        state = tmp_path / name
        code = session.main([*common, "--state", str(state)])
        held = json.loads((state / "session.json").read_text())
        return code, {n: held.get(n) for n in ("rounds", "champion", "measured", "noise")}

    assert end("whole")[0] == 0
    whole, made = end("whole")[1], dict(MADE)
    MADE.clear()

    def stopping(problem: Problem, s: Strategy, device: Device) -> Built:
        done = fake_compile(problem, s, device)
        if sum(MADE.values()) == stops[0]:
            stops.pop(0)
            raise KeyboardInterrupt
        return done

    stops = [2, 6, 11, 10**9]
    monkeypatch.setattr(campaign, "ProcessCompiler", partial(FakeCompiler, stopping))
    codes = [end("stopped")[0] for _ in range(len(stops))]
    assert codes == [130] * (len(codes) - 1) + [0]
    assert end("stopped") == (0, whole)
    records = read_records(tmp_path / "stopped" / "records.jsonl")
    seen = [r.identity for r in records if r.timing_pass == SCREEN]
    assert len(seen) == len(set(seen))
    assert {r.key for r in records} == set(made)
    assert "the same command goes on" in capsys.readouterr().err


@pytest.fixture(scope="module")
def replay(space: RelationSpace) -> Replay:
    """A sub-space whose times follow from two decisions and a little from the others."""
    part = enumerate_space(space.family, space.problem, H200)
    part = part.given({"tile_k": (64,), "swap": (0,), "epilogue": ("direct",), "cluster": ("1x1",)})
    part = part.given({"consumers": (2,), "persistent": (0,), "tile_m": (128,), "tile_n": (64, 96)})
    f = part.fields()
    times = 2 / f.num_stages + (f.split_k != 4) + part.codes % 97 / 1000
    return Replay("gemm_n256_k7168 M=64", part, np.asarray(times, float), 100.0)


def test_a_listed_space_is_narrowed_as_a_diagram_is(space: RelationSpace, replay: Replay) -> None:
    whole = enumerate_space(space.family, space.problem, H200)
    for fixed in ({"num_stages": (3, 4), "swap": (1,)}, {"cluster": ("1x2",)}, {}):
        narrow, diagram = whole.given(fixed), space.given(fixed)
        assert len(narrow) == len(diagram)
        assert (diagram.nodes(narrow.indices()) >= 0).all()
    with pytest.raises(EmptySpace):
        replay.space.given({"tile_k": (32,)})
    with pytest.raises(KeyError, match="no decisions"):
        whole.given({"other": (1,)})


def test_the_loop_plays_by_the_rules_and_finds_the_optimum(replay: Replay) -> None:
    flat = np.zeros(len(replay.times))
    asked = {}
    known = [replay.space.strategy(int(c)) for c in replay.space.codes[:3]]
    told = replace(tuners(replay, flat)[0], name="told", known=known, tries=[])
    for tuner in (*tuners(replay, flat), told):
        asked[tuner.name] = first = play(tuner, replay, 64, seed=1)
        assert len(set(first.tolist())) == len(first) == 64
        assert replay.times[first].min() <= np.sort(replay.times)[len(flat) // 100]
        assert interference(tuner, replay, first[:24], seed=1) is None
        assert tuner.tries and {o.move for o in tuner.tries} <= {m.name for m in MOVES}
        assert (tuner.floors is None) == all(o.state == BLIND_STATE for o in tuner.tries)
    whole = play(replace(tuner, tries=[]), replay, len(flat) + 9, seed=2)
    assert sorted(whole.tolist()) == list(range(len(flat)))  # then every strategy, once


def steady(us: float) -> Callable[[Strategy], float]:
    return lambda _: us


BLIND_STATE = "gemm compute3 memory3 ai1"


def test_near_peak_ends_a_session_that_no_search_would_improve() -> None:
    """On recorded times: every kernel at 95% of attainable ends the session that it begins, in its
    first round, and the best of all is faster by 3% at most."""
    found = 0
    for name in ("h200-streaming-held-out", "h200-streaming-trained"):
        for one in read_replays([ROOT / f"eval/measurements/{name}.jsonl.xz"]):
            us, floors = one.times * one.yardstick, floors_of(one.space.problem, one.space.device)
            for at in np.flatnonzero(floors.attainable >= NEAR_PEAK * us):
                start = one.space.strategy(int(one.space.codes[at]))
                session = Session(one.space, floors, Scripted(steady(us[at])), uniform)
                assert [r.end for r in session.rounds([start])] == ["near peak"]
                assert us[at] <= 1.03 * us.min()
                found += 1
    assert found > 20


def test_long_gemms_are_timed_at_the_clocks_of_the_first(tmp_path: Path) -> None:
    def record(us: float, library: float) -> Record:
        peers = {"torch.mm": library, "copy": 1.0}
        return Record("d", {}, {}, "k", "h200", "ok", latency_us={"median": us}, peers=peers)

    bench = OnGpu(None, None, None, tmp_path / "profiles.jsonl")  # type: ignore[arg-type]
    times = [bench._us(record(*x)) for x in ((60.0, 50.0), (66.0, 55.0), (6.6, 5.5), (9.0, 0.0))]
    assert times == pytest.approx([60.0, 60.0, 6.6, 9.0])


def test_the_page_is_that_of_the_sessions_which_agree_with_their_records() -> None:
    packed = ROOT / "eval" / "results" / "tune-h200.jsonl.xz"
    sessions, page = knowledge.ended(packed), (ROOT / "docs" / "moves.md").read_text()
    assert report.table(sessions) in page and knowledge.moves_table(knowledge.read(packed)) in page
    assert report.beside_counters(sessions) in page
    timed: dict[tuple[Any, ...], list[float]] = {}
    files = [packed.with_name(f"tune-{of}-h200.jsonl.xz") for of in ("rivals", "records")]
    for r in (r for file in files for r in read_records(file)):
        assert r.gpu["driver"] and r.ptxas and r.correct and r.latency_us
        long = r.timing_pass == SCREEN and r.peers.get("torch.mm", 0.0) >= STEADY
        us = r.latency_us["median"] / (r.peers["torch.mm"] if long else 1.0)
        timed.setdefault((*r.identity[:2], r.timing_pass, r.key), []).append(us)
    for s in sessions:
        of = Record(s["settings"]["definition"], s["settings"]["axes"], {}, "", "h200", "ok")
        tried = {b["key"]: b["us"] for made in s["rounds"] for b in made["branches"]}
        scale = [us / timed[*of.identity[:2], SCREEN, key][-1] for key, us in tried.items()]
        assert scale == pytest.approx([scale[0]] * len(scale), rel=1e-3)  # microseconds, or shares
        assert scale[0] > STEADY or scale[0] == pytest.approx(1.0, rel=1e-3)
        final = s["champion"]
        assert final["us"] == pytest.approx(
            timed[*of.identity[:2], REFINE, final["key"]][-1], abs=1e-2
        )
