"""Launches: expressions over axes, JSON round trip, grids that cover the problem."""

import json
import math

import pytest

from ptxflow.compiler.launch import (
    Arguments,
    InputParam,
    Launch,
    PointerParam,
    PresentParam,
    RandomParam,
    evaluate,
)
from tests.families.gemm import CASES, GEMM, IDS, problem_for


@pytest.mark.parametrize(
    ("expr", "value"),
    [("7", 7), ("-(-M // 128) * 32", 96), ("min(132, M + 1)", 132), ("max(3, M % 7) * 2", 8)],
)
def test_expressions(expr: str, value: int):
    assert evaluate(expr, {"M": 300 if "%" not in expr else 4}) == value


@pytest.mark.parametrize("expr", ["M", "__import__('os')", "3.5", "M.x", "min(M)(1)", "2 ** 3"])
def test_anything_else_is_refused(expr: str):
    with pytest.raises(ValueError, match="cannot evaluate"):
        evaluate(expr, {"N": 1})


@pytest.mark.parametrize(("dev", "name", "s"), CASES, ids=IDS)
def test_launches(dev, name, s):  # type: ignore[no-untyped-def]
    launch = GEMM.launch(problem_for(s), s, dev)
    assert Launch.from_json(json.loads(json.dumps(launch.to_json()))) == launch
    for m in (1, 100, 4096, 16294):
        grid = evaluate(launch.grid[0], {"M": m})
        cluster_m, cluster_n = map(int, s.cluster.split("x"))
        rows, columns = (4096, m) if s.swap else (m, 4096)  # along the M and N sides of the MMA
        tiles = math.ceil(rows / (s.tile_m * cluster_m)) * math.ceil(
            columns / (s.tile_n * cluster_n)
        )
        wanted = tiles * cluster_m * cluster_n * s.split_k
        assert grid == (min(wanted, dev.sms // 2 * 2) if s.persistent else wanted)
        assert grid % (cluster_m * cluster_n * s.split_k) == 0


def test_parameters_by_value():
    given = Arguments({"scale": -2.0, "k": -1, "none": None}, seed=2**63 + 5, offset=2**32 + 7)
    assert [given.word(RandomParam(i)) for i in range(4)] == [5, 2**31, 7, 1]
    assert given.word(InputParam("scale", "float32")) == 0xC0000000
    assert given.word(InputParam("k", "int32")) == 0xFFFFFFFF
    assert given.word(InputParam("none", "float32")) == 0
    with pytest.raises(KeyError):
        given.word(InputParam("other", "float32"))


def test_launches_with_parameters_by_value_survive_json():
    params = (PointerParam("s"), PresentParam("s"), InputParam("x", "float32"), RandomParam(3))
    launch = Launch("e", ("1", "1", "1"), 32, (1, 1, 1), 0, params)
    assert Launch.from_json(json.loads(json.dumps(launch.to_json()))) == launch
