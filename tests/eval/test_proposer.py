"""Proposers: a language model that errs in every way, endpoints that fail, transcripts."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from ptxflow.command import BadInput
from ptxflow.compiler.backend.ptxas import PtxasError
from ptxflow.compiler.compilation import compile_kernel
from ptxflow.compiler.errors import CompileError
from ptxflow.compiler.family import Problem, Strategy
from ptxflow.compiler.kernels.gemm_epilogue import written
from ptxflow.compiler.kernels.gemm_epilogue.written import Epilogue
from ptxflow.compiler.kernels.gqa_prefill import mask, page_map
from ptxflow.env.measurements import write_tables
from ptxflow.env.relation import RelationSpace, relate
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space, StrategySpace
from ptxflow.env.tasks.arguments import find_device, find_problem, find_space
from ptxflow.env.tasks.definition import load
from ptxflow.eval import __main__ as evaluate
from ptxflow.eval.bench.records import pack, read_records
from ptxflow.eval.study.search.play import interference, play
from ptxflow.eval.study.search.replay import read_replays, workload_name
from ptxflow.eval.tune import session
from ptxflow.eval.tune.endpoint import ChatError, Endpoint, Recorded
from ptxflow.eval.tune.method import spoken
from ptxflow.eval.tune.proposer import Asked, Model, Tried
from ptxflow.eval.verify import glue
from ptxflow.eval.verify.emulation import run_emulation
from tests.families import gemm
from tests.families import gqa_prefill as prefill

RECORDS = Path("eval/measurements/h200-serving-more-held-out.jsonl.xz")
PLAYED = (
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64 batch_size=3 len_indptr=4 num_kv_indices=102 "
    "num_pages=143 total_q=300"
)
ONE_HEAD = {"heads": 1, "kv_heads": 1, "dim": 64}
Reply = Callable[[BaseHTTPRequestHandler, Mapping[str, Any]], None]


def pursue(
    proposer: Model, space: StrategySpace, judge: Callable[[Strategy], Tried], rounds: int, k: int
) -> list[Tried]:
    """Everything that was tried: proposals are judged and told of, until one is right or after so
    many rounds."""
    history: list[Tried] = []
    for _ in range(rounds):
        history += map(judge, proposer.propose(Asked(space, k, tuple(history))))
        if any(t.right for t in history):
            break
    return history


def compiled(space: StrategySpace, strategy: Strategy) -> Tried:
    """A judge without a GPU: the kernel must compile, and its PTX be right in the emulator; then it
    is worth what the analytic model says."""
    problem, device = space.problem, space.device
    try:
        compile_kernel(problem, strategy, device)
    except (CompileError, PtxasError) as error:
        return Tried(strategy, why=f"{type(error).__name__}: {error}")
    run = run_emulation(problem, strategy, device)
    if not run.right:
        return Tried(strategy, why=f"wrong in the emulator: {run.complaints[0]}")
    part = Space(space.family, problem, device, np.array([space.code(strategy)]))
    (tflops,) = ModelReward().tflops(part, part.codes)
    return Tried(strategy, problem.flops / tflops / 1e6)


def spaces(name: str = "rmsnorm_h128", **axes: int) -> tuple[Space, RelationSpace]:
    family, problem = find_problem(load(name), axes or {"batch_size": 64})
    device = find_device("h200")
    return find_space(family, problem, device), relate(family, problem, device)


def says(text: str) -> Reply:
    """A chat completion of this text, with tokens."""
    body = {"choices": [{"message": {"content": text}}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10}}  # fmt: skip
    return sends(json.dumps(body).encode())


def sends(body: bytes, status: int = 200) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, request: Mapping[str, Any]) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return reply


def drips(handler: BaseHTTPRequestHandler, request: Mapping[str, Any]) -> None:
    """A byte now and then, each well before a socket's timeout."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(40):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


@contextmanager
def serving(*replies: Reply) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """An endpoint's address, which gives these replies in turn, and what it was asked."""
    asked: list[Mapping[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            with suppress(OSError):  # who asked has gone
                replies[len(asked) - 1](self, asked[-1])

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()


def answer(space: Space, *strategies: Strategy, **changes: Any) -> str:
    return json.dumps({"strategies": [space.family.choices(s) | changes for s in strategies]})


def test_a_model_that_errs_in_every_way_ends_with_a_right_kernel(tmp_path: Path) -> None:
    """No JSON, an unknown decision, a broken rule, a spill, wrong values, a timeout; then right."""
    space, _ = spaces()
    spills, wrong, good = (space.strategy(int(c)) for c in space.codes[[0, 1, 2]])
    broken = next(
        s for d in space.decisions for c in d.choices
        for s in [good.replace(**{d.name: c})]
        if space.family.refusals(space.problem, s, space.device)
    )  # fmt: skip
    sentence = space.family.refusals(space.problem, broken, space.device)[0]

    def judge(strategy: Strategy) -> Tried:
        if strategy == spills:
            return Tried(strategy, why="AssemblyError: ptxas spills 16 bytes")
        if strategy == wrong:
            return Tried(strategy, why="wrong in the emulator: output: 3 elements differ")
        return compiled(space, strategy)

    replies = [
        says("Let me think about this."), says(answer(space, good, tile_q=3)),
        says(answer(space, broken)), says(answer(space, spills)), says(answer(space, wrong)),
        drips, says(f"```json\n{answer(space, good)}\n```"),
    ]  # fmt: skip
    path = tmp_path / "transcript.jsonl"
    with serving(*replies) as (url, asked):
        model = Model(Recorded(path, Endpoint(url, "secret", 1.0)), "scripted")
        history = pursue(model, space, judge, rounds=8, k=1)
    assert [(t.strategy, t.right) for t in history] == [
        (spills, False),
        (wrong, False),
        (good, True),
    ]
    said = [r["messages"][-1]["content"] for r in asked]
    assert "no JSON object" in said[1] and "no decision 'tile_q'" in said[2]
    assert sentence in said[3]
    assert "ptxas spills" in said[4] and "3 elements differ" in said[5]
    assert [len(r["messages"]) for r in asked] == [2, 4, 6, 8, 2, 2, 2]
    assert any("no answer within 1 s" in f for f in model.failed)
    assert model.tokens == {"prompt": 600, "completion": 60}
    assert "secret" not in path.read_text()

    again = Model(Recorded(path), "scripted")
    assert pursue(again, space, judge, rounds=8, k=1) == history
    assert again.failed == model.failed and again.tokens == model.tokens


def test_refusals_go_back_three_times_at_most() -> None:
    space, _ = spaces()
    with serving(*[says("no")] * 9) as (url, asked):
        model = Model(Endpoint(url), "scripted")
        assert model.propose(Asked(space, 2)) == [] and len(asked) == 4
    assert model.failed == ["0 of 2 strategies after 4 answers"]
    assert [len(r["messages"]) for r in asked] == [2, 4, 6, 8]
    held = asked[0]["response_format"]["json_schema"]["schema"]["properties"]["strategies"]
    assert set(held["items"]["properties"]) == {d.name for d in space.decisions}


WRITTEN: dict[str, tuple[ModuleType, Callable[[str], Any], list[tuple[str, str]], str]] = {
    "an epilogue": (written, lambda text: relu(text), [
        ("relu(acc + bias", "no syntax of an epilogue"), ("relu(acc + beta)", "called beta"),
        ("acc.relu()", "acc.relu is no function"), ("relu(acc)", "'bias' is wanted"),
        ("log2(acc + bias)", "elements of C differ"),
        ("max(acc, 0) + bias", "elements of C differ"),
    ], "max(acc + bias, 0)"),
    "a mask": (mask, lambda text: window(text), [
        ("q - k", "this is a number"), ("q - k < w", "called w"),
        ("(q * k) % 2 == 0", "are the most"), ("k >= 0", "hides no key, or all"),
        ("q - k <= 20", "elements of output differ"),
    ], "q - k < 20"),
    "an index map": (page_map, lambda text: ring(text), [
        ("page < 3", "not allowed"), ("page", "has the entries 0 to 2"),
        ("page % pages", "by a number above 0"), ("page % 4", "can be 0 to 3"),
        ("pages % 3", "something of page"), ("2 - page % 3", "elements of output differ"),
    ], "page % 3"),
}  # fmt: skip
SLOW = [pytest.param(p, marks=pytest.mark.slow) for p in WRITTEN if p != "a mask"]


def relu(text: str) -> tuple[glue.Glue, Problem, Strategy]:
    p = gemm.problem(m=16)
    s = gemm.swapped(tile_n=16, consumers=1)
    epilogue = Epilogue.parse(text)
    made = glue.written(epilogue, lambda given: torch.relu(given["acc"] + given["bias"]))
    return made, *glue.given(p, s, epilogue)


def window(text: str) -> tuple[glue.Glue, Problem, Strategy]:
    wanted = mask.Mask.parse("q - k < 20").sees
    made = glue.attended(mask.Mask.parse(text), sees=wanted)
    return made, prefill.problem(**ONE_HEAD), prefill.strategy(consumers=1, tile_kv=32)


def ring(text: str) -> tuple[glue.Glue, Problem, Strategy]:
    wanted = page_map.PageMap.parse("page % 3", 3)
    made = glue.attended(None, page_map.PageMap.parse(text, 3), entries=wanted)
    return made, prefill.problem(64, **ONE_HEAD), prefill.strategy(consumers=1, tile_kv=32)


@pytest.mark.parametrize("part", ["a mask", *SLOW])
def test_a_model_that_errs_in_every_way_ends_with_a_right_part(part: str) -> None:
    """No JSON, no text, texts that each stage refuses, an endpoint that is slow; then right. What
    was refused goes back, in a line."""
    module, made, wrong, right = WRITTEN[part]
    texts = [json.dumps({"text": text}) for text, _ in wrong]
    replies = [says("relu"), says('{"text": 3}'), *map(says, texts), drips,
               says(json.dumps({"text": right}))]  # fmt: skip
    with serving(*replies) as (url, asked):
        model = Model(Endpoint(url, seconds=1.0), "scripted", returns=len(wrong) + 2)
        judge = glue.judge(made, find_device("h200"))
        assert model.write(str(module.__doc__), f"{part} that I say", judge) == ""
        assert model.write(str(module.__doc__), f"{part} that I say", judge) == right
    said = [r["messages"][-1]["content"] for r in asked]
    assert "no JSON object" in said[1] and "no JSON object" in said[2]
    for told, (_, why) in zip(said[3:], wrong, strict=False):
        assert why in told and "\n" not in told
    assert str(module.__doc__) in asked[0]["messages"][0]["content"]
    assert len(model.failed) == 1 and "no answer within 1 s" in model.failed[0]


FAULTS: dict[str, tuple[Reply, str]] = {
    "an error": (sends(b"{}", 500), "HTTP 500"),
    "rubbish": (sends(b"\xff\xfe<html>"), "codec|Expecting"),
    "no completion": (sends(b'{"choices": []}'), "no chat completion"),
    "too much": (sends(b" " * (5 << 20)), "exceeds"),
    "slow": (drips, "no answer within 1 s"),
    "deep": (sends(b"[" * 100_000), "recursion|Expecting|maximum"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_endpoint_that_fails_costs_its_timeout(fault: str) -> None:
    reply, words = FAULTS[fault]
    with serving(reply) as (url, _):
        began = time.monotonic()
        with pytest.raises(ChatError, match=words) as failed:
            Endpoint(url, seconds=1.0)({"model": "m", "messages": []})
        assert time.monotonic() - began < 3 and "\n" not in str(failed.value)


def test_an_endpoint_that_is_down_proposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (url, _):
        pass
    model = Model(Endpoint(url, seconds=1.0), "scripted")
    assert model.propose(Asked(spaces()[0], 1)) == []
    assert len(model.failed) == 1 and "refused" in model.failed[0]
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(BadInput, match="OPENAI_BASE_URL"):
        Endpoint.from_environment()
    with pytest.raises(BadInput, match="must begin with http"):
        Endpoint("file:///etc/passwd")


def test_a_model_plays_in_a_tuning_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round measures what it proposes; a session that is repeated asks nobody."""
    _, space = spaces("rmsnorm_h4096", batch_size=64)
    chosen = [space.strategy(int(c)) for c in space.sample_uniform(3, np.random.default_rng(7))]
    monkeypatch.setenv("PTXFLOW_MODEL", "m")
    asked = ["--definition", "rmsnorm_h4096", "--axes", "batch_size=64", "--measure", "no",
             "--space", "listed", "--rounds", "2", "--starts", "4", "--proposer", "model",
             "--state", str(tmp_path)]  # fmt: skip
    replies = [says(json.dumps({"strategies": [space.family.choices(s)]})) for s in chosen]
    with serving(*replies) as (url, requests):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        assert session.main(asked) == 0
    held = json.loads((tmp_path / "session.json").read_text())
    tried = [b["key"] for r in held["rounds"] for b in r["branches"] if not b["moves"]]
    assert tried == [s.key for s in chosen[: len(requests)]] and len(requests) == 2
    assert held["model"] == {"tokens": {"prompt": 200, "completion": 20}, "failed": []}
    assert session.main(asked) == 0
    again = json.loads((tmp_path / "session.json").read_text())
    assert again["rounds"] == held["rounds"] and again["model"] == held["model"]


def test_transcripts_that_are_none_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("{}\n")
    with pytest.raises(BadInput, match="no transcript"):
        Recorded(path)


@pytest.mark.usefixtures("one_plot")
def test_a_model_plays_in_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told times as they come, is of no use in the end, and plays again from its transcript
    alone: the same choices, the same tokens; by the rules of play."""
    rows = [r for r in read_records(RECORDS) if workload_name(r.definition, r.axes) == PLAYED]
    write_tables(records := tmp_path / "records.jsonl.xz", pack(rows))
    (replay,) = read_replays([records])
    space, chosen = replay.space, np.argsort(-replay.times)[[3, 5, 7, 9]]
    foreign = json.dumps({"strategies": [
        space.family.choices(space.strategy(int(space.codes[0])))
        | {n: next(c for c in d.choices if c not in own)}
        for d in space.decisions for n, own in [(d.name, replay.choices.get(d.name, ()))] if own
    ]})  # fmt: skip
    replies = [foreign, answer(space, *(space.strategy(int(space.codes[i])) for i in chosen[:2])),
               answer(space, *(space.strategy(int(space.codes[i])) for i in chosen[2:])),
               *["no"] * 4]  # fmt: skip
    path, out = tmp_path / "model.jsonl", tmp_path / "out"
    asked = ["--measurements", str(records), "--kernels", str(records), "--workloads", PLAYED,
             "--methods", "uniform", "--seeds", "2", "--budget", "12", "--parts", "none",
             "--jobs", "1", "--transcript", str(path), "--out", str(out)]  # fmt: skip
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert evaluate.main(asked) == 2 and "has no answers" in capsys.readouterr().err
    monkeypatch.setenv("PTXFLOW_MODEL", "scripted")
    with serving(*map(says, replies)) as (url, requests):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        assert evaluate.main(asked) == 0
    held = (out / "results.json").read_bytes()
    (cost,) = json.loads(held)["costs"]
    assert (cost["method"], cost["workload"]) == ("language model", PLAYED)
    assert cost["tokens"] == {"prompt": 100 * len(requests), "completion": 10 * len(requests)}
    assert cost["failed"] == ["0 of 8 strategies after 4 answers"] and len(requests) == 3 + 4
    assert "| language model |" in capsys.readouterr().out
    told = requests[-1]["messages"][1]["content"]
    assert told.count("Tried ") == 4 and f"{replay.seconds[chosen[0]] * 1e6:.2f} us" in told
    assert "must be one of" in requests[1]["messages"][-1]["content"]

    monkeypatch.delenv("OPENAI_BASE_URL")
    assert evaluate.main(asked) == 0 and (out / "results.json").read_bytes() == held
    player = spoken(path, replay)
    first = play(player, replay, 12, seed=0)
    assert first[:4].tolist() == chosen.tolist() and len(set(first.tolist())) == 12
    assert interference(player, replay, first) is None
    assert player.cost(replay, first) == {n: cost[n] for n in ("tokens", "failed")}
