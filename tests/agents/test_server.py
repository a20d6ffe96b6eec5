"""Every tool and resource of the MCP server, by the SDK's own client over stdio; its limits."""

import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("mcp", reason="the extra ptxflow[mcp] is not installed")

from ptxflow.compiler.atoms import all_atoms
from ptxflow.env.tasks.arguments import find_device, find_problem, find_space
from ptxflow.env.tasks.definition import load, names, own_names
from ptxflow.eval.agents.tools import TOOLS
from ptxflow.eval.tune.knowledge import Knowledge, Outcome
from tests.agents.broken import RIGHT, launch
from tests.agents.client import Agent, Refused
from tests.agents.client import agent as started
from tests.families import gemm
from tests.families import gqa_prefill as prefill

if TYPE_CHECKING:
    from collections.abc import Mapping

GEMM: dict[str, Any] = {"definition": "gemm_n4096_k4096", "axes": {"M": 1024}, "device": "h200"}
NORM: dict[str, Any] = {"definition": "rmsnorm_h128", "axes": {"batch_size": 4}, "device": "h200"}
ENDLESS = RIGHT.replace("@!%done bra TRY;", "bra TRY;")


def space_of(asked: "Mapping[str, Any]") -> Any:
    family, problem = find_problem(load(asked["definition"]), asked["axes"])
    return find_space(family, problem, find_device(asked["device"]))


def test_every_tool_teaches(agent: Agent) -> None:
    tools = agent.portal.call(agent.client.list_tools).tools
    assert {t.name for t in tools} == {*TOOLS}
    for tool in tools:
        assert tool.description and len(tool.description) > 60
        assert tool.input_schema["additionalProperties"] is False
        assert all("description" in p for p in tool.input_schema["properties"].values())
        assert tool.annotations is not None
        assert tool.annotations.read_only_hint is (tool.name not in ("lower", "measure"))


def test_definitions_are_found_and_read(agent: Agent, root: Path) -> None:
    listed = [d["name"] for d in agent.call("definitions")["definitions"]]
    assert listed == [*names(), *own_names()]
    assert agent.call("definitions", like="moe")["definitions"][0]["family"] == "moe"
    found = agent.call("definition", name="gemm_n4096_k4096")
    assert found["axes"]["N"] == {"type": "const", "value": 4096} and len(found["workloads"]) == 8
    assert (
        agent.read(found["texts"]["reference.py"])
        == load("gemm_n4096_k4096").to_json()["reference"]
    )
    (root / "mine.json").write_text(agent.read("definition://rmsnorm_h128"))
    assert agent.call("definition", name="mine.json")["name"] == "rmsnorm_h128"


def test_a_space_counts_what_is_left(agent: Agent) -> None:
    space = space_of(GEMM)
    codes = space.indices()
    found = agent.call("space", **GEMM)
    assert found["strategies"] == len(space)
    assert [r["rule"] for r in found["rules"]] == [r.sentence for r in space.family.rules]
    for i, row in enumerate(found["decisions"]):
        assert row["left"] == [int((codes[:, i] == c).sum()) for c in range(len(row["choices"]))]
    fixed = agent.call("space", **GEMM, fixed={"tile_k": "64", "num_stages": [4, 5]})
    assert 0 < fixed["strategies"] < len(space)
    rows = {row["name"]: row["left"] for row in fixed["decisions"]}
    assert [n > 0 for n in rows["tile_k"]] == [False, True, False]


def test_a_strategy_is_explained_and_mended(agent: Agent) -> None:
    best = agent.call("sample", **GEMM, k=2)
    first = best["strategies"][0]
    assert first["predicted_us"] <= best["strategies"][1]["predicted_us"]
    found = agent.call("check_strategy", **GEMM, choices=first["choices"])
    assert found == {"workload": best["workload"], "valid": True, "key": first["key"]}
    wrong = {**first["choices"], "num_stages": 7, "tile_k": 128}
    told = agent.call("check_strategy", **GEMM, choices=wrong)
    assert not told["valid"] and "shared memory" in told["refusals"][0]["rule"]
    assert (
        len(told["change"]) == 1 and {**wrong, **told["change"]}.items() <= told["nearest"].items()
    )
    assert agent.call("check_strategy", **GEMM, choices=told["nearest"])["valid"]


def test_a_strategy_is_lowered(agent: Agent, root: Path) -> None:
    (drawn,) = agent.call("sample", **NORM, k=1)["strategies"]
    found = agent.call("lower", **NORM, choices=drawn["choices"], out="kernels/norm")
    assert found["right"] and found["usage"]["spill_stores"] == 0
    assert "exactly right" in found["emulation"]
    ptx = agent.read(found["texts"]["kernel.ptx"])
    assert ptx.startswith(".version") and (root / "kernels/norm/kernel.ptx").read_text() == ptx
    assert (root / "kernels/norm/kernel.cubin").stat().st_size == found["cubin_bytes"]
    part = agent.call("read_text", text=found["texts"]["kernel.ptx"], first=2, lines=1)
    assert part["text"] == ".target sm_90a" and part["lines_in_all"] == len(ptx.splitlines())
    assert agent.call("launch_template", ptx="kernels/norm/kernel.ptx")["version"] == 1


def test_an_epilogue_is_compiled_or_refused(agent: Agent) -> None:
    s = gemm.swapped(tile_n=16, consumers=1)
    asked = GEMM | {"axes": {"M": 16}, "choices": s.to_json()["choices"]}
    found = agent.call("epilogue", **asked, expression="h = acc + bias; max(h, 0.1 * h)")
    assert found["right"] and found["reads"] == ["bias"] and "kernel.ptx" in found["texts"]
    found = agent.call("epilogue", **asked, expression="acc @ bias")
    assert found["stage"] == "Refused" and "acc @ bias is not allowed" in found["why"]
    found = agent.call("epilogue", **asked, expression="log2(acc)")
    assert found["stage"] == "CompileError" and "not finite" in found["why"]
    with pytest.raises(Refused, match="not of gemm"):
        agent.call("epilogue", **NORM, choices={}, expression="acc")


def of_one_head(root: Path, page: int) -> str:
    """The name of a definition of attention, over pages or packed keys."""
    path = root / f"pages-of-{page}.json"
    path.write_text(json.dumps(prefill.definition(page, heads=1, kv_heads=1, dim=64)))
    return path.name


def test_a_mask_is_compiled_or_refused(agent: Agent, root: Path) -> None:
    s = prefill.strategy(consumers=1, tile_kv=32, overlap=0, stages=1)
    asked = {"definition": of_one_head(root, 0), "choices": s.to_json()["choices"]}
    found = agent.call("mask", **asked, condition="q - k < 24 or k < 4")
    assert found["right"] and not found["usage"]["spill_stores"] and "kernel.ptx" in found["texts"]
    found = agent.call("mask", **asked, condition="q - k < 2.5")
    assert found["stage"] == "Refused" and "column 9: 2.5 is not allowed" in found["why"]
    with pytest.raises(Refused, match="not of gqa_prefill"):
        agent.call("mask", **NORM, choices={}, condition="q == k")


def test_an_index_map_is_compiled_or_refused(agent: Agent, root: Path) -> None:
    s = prefill.strategy(consumers=1, tile_kv=32, overlap=0, stages=1)
    asked = {"choices": s.to_json()["choices"], "width": 3}
    pages = asked | {"definition": of_one_head(root, 64)}
    found = agent.call("index_map", **pages, entry="page % 3", condition="q - k < 129")
    assert found["right"] and not found["usage"]["spill_stores"] and "kernel.ptx" in found["texts"]
    found = agent.call("index_map", **pages, entry="page")
    assert found["stage"] == "Refused" and "a sequence has the entries 0 to 2" in found["why"]
    packed = asked | {"definition": of_one_head(root, 0)}
    found = agent.call("index_map", **packed, entry="page % 3")
    assert found["stage"] == "CompileError" and "keys are packed" in found["why"]


def test_a_roof_and_its_gaps(agent: Agent) -> None:
    found = agent.call("roofline", **GEMM, us=50)
    assert found["bound"] == "tensor peak" and found["flops"] == 2 * 1024 * 4096 * 4096
    assert found["share_of_attainable"] == pytest.approx(found["attainable_us"] / 50)
    assert [*found["gaps"]] == sorted(found["gaps"], key=found["gaps"].get, reverse=True)


def test_ptx_is_checked(agent: Agent, root: Path) -> None:
    assert agent.call("check_ptx", ptx=RIGHT, launch=launch())["verdict"] == "clean"
    (root / "k.ptx").write_text(RIGHT)
    (root / "launch.json").write_text(json.dumps(launch()))
    found = agent.call("check_ptx", ptx="k.ptx", launch="launch.json", schedules=1)
    assert found["verdict"] == "clean" and found["schedules"] == 1 and found["unreached"] == []
    stopped = agent.call("check_ptx", ptx=ENDLESS, launch=launch(), schedules=1, limit=5000)
    assert stopped["verdict"] == "stopped" and "5000 instructions" in stopped["stopped"]


def test_instructions_are_told(agent: Agent) -> None:
    (row,) = agent.call("instruction", name="tma_load")["rows"]
    assert row["lanes"] == "one" and row["isa"].startswith("9.7.9")
    many = agent.call("instruction", name="tcgen05")
    assert many["in_all"] > 8 and len(many["rows"]) == 8
    assert all(f"`{a.name}`" in agent.read("page://instructions") for a in all_atoms())


def test_knowledge_is_read(agent: Agent, root: Path) -> None:
    tried = [Outcome("gemm compute2 memory1 ai2", "deeper ring", gain) for gain in (0.1, -0.02)]
    Knowledge(root / "moves.sqlite").learn("once", "h200", tried)
    (row,) = agent.call("knowledge", path="moves.sqlite", like="gemm")["entries"]
    assert (row["tried"], row["helped"], row["mean_gain"]) == (2, 1, 0.04)


def test_measuring_says_why_it_cannot(agent: Agent) -> None:
    (drawn,) = agent.call("sample", **NORM, k=1)["strategies"]
    try:
        found = agent.call("measure", **NORM, choices=drawn["choices"])
    except Refused as error:
        assert "NVIDIA" in str(error) or "GPU" in str(error)
    else:
        assert found["status"] == "ok" and found["latency_us"]["median"] > 0


@pytest.mark.slow
def test_records_are_a_resource(agent: Agent) -> None:
    rows = json.loads(agent.read("records://gemm_n4096_k4096"))["fastest"]
    assert {r["device"] for r in rows} == {"h100", "h200"} and all(r["us"] > 0 for r in rows)


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    "above the root": ("read_text", {"text": "../secret.json"}, "not under the root"),
    "absolute": ("definition", {"name": "/etc/passwd"}, "not under the root"),
    "by a link": ("read_text", {"text": "link"}, "not under the root"),
    "by a launch": ("check_ptx", {"ptx": RIGHT, "launch": {"version": 1, "buffers": {
        "x": {"contents": {"file": "../secret.npy"}}}}}, "not under the root"),
    "to write": ("lower", {**NORM, "choices": {}, "out": "../x"}, "no choice of"),
    "a null byte": ("read_text", {"text": "a\0b"}, "not under the root"),
    "unknown argument": ("space", {**GEMM, "tile": 3}, "tile"),
    "wrong type": ("space", {"definition": 3}, "definition"),
    "unknown axis": ("space", {**GEMM, "axes": {"Q": 3}}, "no variable axis 'Q'"),
    "unknown definition": ("space", {"definition": "gem_n4096"}, "near names"),
    "unknown choice": ("space", {**GEMM, "fixed": {"tile_k": 65}}, "tile_k must be one of"),
    "unknown tool": ("shell", {"command": "id"}, "shell"),
    "no text": ("read_text", {"text": "text://0/x"}, "no text has the address"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_wrong_is_one_clear_error(agent: Agent, root: Path, case: str) -> None:
    if not (root / "link").is_symlink():
        (root / "link").symlink_to(root.parent / "secret.json")
    tool, arguments, words = HOSTILE[case]
    with pytest.raises(Refused, match=words.replace("'", ".")):
        agent.ask(tool, arguments)


def test_a_folder_above_the_root_is_not_written(agent: Agent, root: Path) -> None:
    (drawn,) = agent.call("sample", **NORM, k=1)["strategies"]
    with pytest.raises(Refused, match="not under the root"):
        agent.call("lower", **NORM, choices=drawn["choices"], out="../x")
    assert not (root.parent / "x").exists()


def children() -> set[int]:
    """Processes that serve calls now."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ptxflow.eval.agents.child" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_call_is_told_of_and_cancelled(agent: Agent) -> None:
    agent.call("check_ptx", ptx=RIGHT, launch=launch())
    said: list[str | None] = []
    slow = {"ptx": ENDLESS, "launch": launch(), "limit": 50_000, "schedules": 1}
    agent.ask("check_ptx", slow, lambda done, whole, message: said.append(message))
    assert said[0] == "check_ptx: emulating"
    before = children()
    assert agent.cancelled("check_ptx", 0.5, **{**slow, "limit": 5_000_000})
    agent.call("definitions", like="moe")
    assert children() - before, "the call that was given up has its process no more"


@pytest.mark.slow
def test_limits_and_a_crash_end_one_call(tmp_path: Path) -> None:
    slow = {"ptx": ENDLESS, "launch": launch(), "limit": 5_000_000}
    huge = {**launch(), "buffers": {n: {"dtype": "float32", "shape": [2**27]} for n in "xy"}}
    before = children()
    with started(tmp_path, "--seconds", "20", "--memory", "600") as agent:
        with pytest.raises(Refused, match=r"needs more than 600 MiB|allocate"):
            agent.call("check_ptx", ptx=RIGHT, launch=huge)
        killed: list[int] = []

        def kill(*_: object) -> None:
            if not killed:
                killed.extend(children() - before)
                os.kill(killed[0], signal.SIGKILL)

        with pytest.raises(Refused, match="ended with code -9; the server"):
            agent.ask("check_ptx", slow, kill)
        began = time.monotonic()
        with pytest.raises(Refused, match="was stopped after 20 s"):
            agent.ask("check_ptx", slow)
        assert time.monotonic() - began < 60
        assert agent.call("definitions", like="moe")["definitions"]
    for _ in range(100):
        if children() <= before:
            return
        time.sleep(0.1)
    raise AssertionError("a process outlives its server")
