"""What an agent does with the server's answers alone: new strategies, repairs of PTX."""

import pytest

pytest.importorskip("mcp", reason="the extra ptxflow[mcp] is not installed")

from ptxflow.eval.bench.markdown import quoted
from tests.agents.broken import BROKEN, broken, launch
from tests.agents.client import ROOT, Agent
from tests.agents.scripted import MOST, new_strategy, repaired
from tests.agents.transcript import held

slow = pytest.mark.slow


@pytest.mark.parametrize("name", BROKEN)
def test_a_text_is_repaired_in_three_calls(agent: Agent, name: str) -> None:
    text, seen = repaired(agent, broken(name), launch())
    assert seen[0]["verdict"] == "faulty" and seen[-1]["verdict"] == "clean"
    assert len(seen) <= MOST and text != broken(name)


@pytest.mark.parametrize(
    ("definition", "axes", "device"),
    [
        ("rmsnorm_h128", {"batch_size": 64}, "h200"),
        pytest.param("gemm_n128_k2048", {"M": 200}, "b200", marks=slow),
        pytest.param("gdn_decode_qk16_v32_d128_k_last", {"batch_size": 8}, "h200", marks=slow),
    ],
)
def test_a_new_strategy_is_written(
    agent: Agent, definition: str, axes: dict[str, int], device: str
) -> None:
    made = new_strategy(agent, definition, axes, device)
    assert made["right"] and made["key"] not in made["drawn"]
    assert made["usage"]["spill_stores"] == 0 and "exactly right" in made["emulation"]


def test_the_page_shows_this_session(agent: Agent) -> None:
    agent.transcript.clear()
    page = (ROOT / "docs" / "agents.md").read_text()
    assert quoted(page)["transcript"] == held(agent)
