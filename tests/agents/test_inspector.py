"""Every tool and resource by the protocol's own inspector (npm: @modelcontextprotocol/inspector),
over stdio; skipped where `mcp-inspector` is not on the path."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra ptxflow[mcp] is not installed")

from ptxflow.eval.agents.tools import TOOLS
from ptxflow.eval.tune.knowledge import Knowledge, Outcome
from tests.agents.broken import RIGHT, broken, launch
from tests.agents.client import ROOT
from tests.families import gemm
from tests.families import gqa_prefill as prefill

INSPECTOR = shutil.which("mcp-inspector")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSPECTOR, reason="mcp-inspector is not on the path"),
]
NORM: dict[str, Any] = {"definition": "rmsnorm_h128", "axes": {"batch_size": 4}, "device": "h200"}
GEMM = {
    "definition": "gemm_n128_k2048", "axes": {"M": 16}, "device": "h200",
    "choices": gemm.swapped(tile_n=16, consumers=1).to_json()["choices"],
}  # fmt: skip
ATTENTION = {
    "device": "h200", "choices": prefill.strategy(consumers=1).to_json()["choices"],
}  # fmt: skip
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "definitions": ({"like": "moe"}, "definitions"),
    "definition": ({"name": "rmsnorm_h128"}, "axes"),
    "roofline": ({**NORM, "us": 3.5}, "attainable_us"),
    "space": ({**NORM, "fixed": {"unroll": 1}}, "decisions"),
    "sample": ({**NORM, "k": 2}, "strategies"),
    "check_strategy": (GEMM, "valid"),
    "lower": ({**GEMM, "out": "made"}, "right"),
    "epilogue": ({**GEMM, "expression": "relu(acc + bias)"}, "right"),
    "mask": ({**ATTENTION, "definition": "gqa_ragged_prefill_causal_h32_kv8_d128",
              "condition": "q - k < 24"}, "right"),
    "index_map": ({**ATTENTION, "definition": "gqa_paged_prefill_causal_h32_kv8_d128_ps64",
                   "entry": "page % 3", "width": 3}, "right"),
    "measure": (GEMM, "status"),
    "knowledge": ({"path": "moves.sqlite"}, "entries"),
    "launch_template": ({"ptx": "k.ptx"}, "buffers"),
    "check_ptx": ({"ptx": "k.ptx", "launch": launch()}, "verdict"),
    "instruction": ({"name": "wgmma"}, "rows"),
    "read_text": ({"text": "k.ptx", "lines": 3}, "text"),
}  # fmt: skip


def inspected(root: Path, method: str, *options: str) -> dict[str, Any]:
    """What the inspector prints of a server of its own."""
    done = subprocess.run(
        [str(INSPECTOR), "--cli", sys.executable, "-m", "ptxflow", "mcp", "--root", str(root),
         "--method", method, *options],
        cwd=root, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    (folder / "k.ptx").write_text(RIGHT)
    Knowledge(folder / "moves.sqlite").learn("once", "h200", [Outcome("gemm", "deeper ring", 0.1)])
    return folder


def test_it_lists_every_tool_and_reads_resources(root: Path) -> None:
    tools = inspected(root, "tools/list")["tools"]
    assert {t["name"] for t in tools} == {*TOOLS} == {*CALLS}
    listed = inspected(root, "resources/templates/list")["resourceTemplates"]
    assert {"definition://{name}", "records://{name}"} <= {t["uriTemplate"] for t in listed}
    (found,) = inspected(root, "resources/read", "--uri", "page://instructions")["contents"]
    assert "`tma_load`" in found["text"]


@pytest.mark.parametrize("tool", CALLS)
def test_it_calls_every_tool(root: Path, tool: str) -> None:
    arguments, key = CALLS[tool]
    given = [f"{n}={v if isinstance(v, str) else json.dumps(v)}" for n, v in arguments.items()]
    found = inspected(root, "tools/call", "--tool-name", tool, "--tool-arg", *given)
    if tool == "measure" and found.get("isError"):  # where there is no GPU
        assert "NVIDIA" in found["content"][0]["text"] or "GPU" in found["content"][0]["text"]
        return
    answer = found["structuredContent"]
    assert not found.get("isError") and key in answer and answer.get("right", True)


def test_it_is_told_what_is_wrong(root: Path) -> None:
    (root / "broken.ptx").write_text(broken("a missing fence"))
    given = ["ptx=broken.ptx", f"launch={json.dumps(launch())}"]
    found = inspected(root, "tools/call", "--tool-name", "check_ptx", "--tool-arg", *given)
    assert "proxy-fence" in json.dumps(found["structuredContent"]["findings"])
    found = inspected(root, "tools/call", "--tool-name", "definition", "--tool-arg", "name=../x")
    assert found["isError"] and len(found["content"][0]["text"]) < 2000
