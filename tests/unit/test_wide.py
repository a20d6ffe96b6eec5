"""The wide space of a family holds the listed one, whose strategies keep their names and keys."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxflow.compiler.device import B200, H200, Device
from ptxflow.compiler.family import Decision, Problem, Wide, rule
from ptxflow.compiler.kernels import FAMILIES, family
from ptxflow.compiler.kernels.gemm import GEMM
from ptxflow.env.relation import relate
from ptxflow.env.reward import ModelReward
from ptxflow.env.space import Space, decision_digest, enumerate_space
from ptxflow.env.tasks.arguments import find_whole_space
from ptxflow.eval.bench.records import RecordError, require_records
from ptxflow.eval.sample import wide
from ptxflow.eval.sample.widened import WideReward
from tests.builders import gemm_problem, toy_family
from tests.families import gqa_decode, moe

PROBLEMS = (gemm_problem(17, 4096, 4096), gemm_problem(1063, 4096, 4096), moe.problem(7),
            gqa_decode.problem(1, 100, 16), gqa_decode.problem(16, 4096, 64))  # fmt: skip


@pytest.mark.parametrize("device", [H200, B200])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_listed_strategies_are_in_the_wide_space_under_their_keys(
    problem: Problem, device: Device
) -> None:
    own, rng = family(problem.family), np.random.default_rng(17)
    listed = enumerate_space(own, problem, device)
    wide = relate(own.wide, problem, device)
    for code in listed.sample_uniform(50, rng):
        strategy = listed.strategy(int(code))
        assert wide.strategy(wide.code(strategy)) == strategy
    old = {d.name: d.choices for d in own.decisions}
    as_listed = wide.given(old | {n: (c,) for n, c in own.wide.implied.items()})
    assert len(listed) <= len(as_listed) < len(wide)


@pytest.mark.parametrize(("problem", "least"), [(PROBLEMS[1], 10**8), (PROBLEMS[2], 10**9)])
def test_more_strategies_than_can_be_listed_of_which_none_names_what_is_implied(
    problem: Problem, least: int
) -> None:
    wide = relate(family(problem.family).wide, problem, H200)
    assert len(wide) > least
    implied = wide.family.implied.items()
    for code in wide.sample_uniform(200, np.random.default_rng(0)):
        strategy = wide.strategy(int(code))
        assert not set(strategy.choices) & set(implied)
        assert wide.code(strategy) == code


@pytest.mark.parametrize("problem", PROBLEMS[1:])
def test_a_listed_reward_is_carried_over_where_the_nearest_listed_strategy_does_not_fit(
    problem: Problem,
) -> None:
    own, model = family(problem.family), ModelReward()
    wide = relate(own.wide, problem, H200)
    codes = np.unique(wide.sample_uniform(5000, np.random.default_rng(3)))
    carried = WideReward(model, own).tflops(wide, codes)
    assert carried == pytest.approx(model.tflops(wide, codes))


def test_other_decisions_have_another_digest_and_no_wider_space() -> None:
    assert decision_digest(GEMM.wide) != decision_digest(GEMM)
    assert GEMM.wide.wide is GEMM.wide
    assert set(GEMM.more.lifted) <= {r.sentence for r in GEMM.rules}


def test_what_rewards_know_of_comes_first_among_new_decisions() -> None:
    """A walk's prefixes have sums of their own until then; behind them any choice is as good."""
    for own in FAMILIES.values():
        new = [d.name for d in own.wide.decisions if d.name in own.wide.implied]
        assert new == [*own.more.told, *own.wide.unknown]


def test_few_strategies_are_listed_where_prefixes_lead_nowhere() -> None:
    """Of this workload there would be 10^8 of these, which took 24 GB."""
    small = gqa_decode.problem(1, 14, group=8, key_heads=4)
    assert isinstance(find_whole_space(family("gqa_decode").wide, small, H200), Space)


def test_unknown_decisions_and_choices_are_refused() -> None:
    wide = relate(GEMM.wide, gemm_problem(1063, 4096, 4096), H200)
    strategy = wide.strategy(wide.code(_some(wide)))
    with pytest.raises(KeyError, match="gemm has no decisions \\['abacus'\\]"):
        GEMM.wide.choices(replace(strategy, choices=(*strategy.choices, ("abacus", 1))))
    assert any(
        said.startswith("tile_n must be one of")
        for said in GEMM.wide.refusals(wide.problem, strategy.replace(tile_n=7), H200)
    )


def _some(wide):  # type: ignore[no-untyped-def]
    return wide.strategy(int(wide.sample_uniform(1, np.random.default_rng(1))[0]))


def test_a_rule_that_hides_an_implied_decision_is_refused() -> None:
    """It would be judged as if the decision were not there."""
    hides = rule("looks twice", "swap", lambda f, p, d: f.get("twice", 0) <= f.swap)
    more = Wide((Decision("twice", (0, 1), "of a test"),), (hides,))
    toy = toy_family("toy", (Decision("swap", (0, 1), ""),), (), more=more)
    with pytest.raises(ValueError, match="'looks twice' reads what it does not declare"):
        relate(toy.wide, gemm_problem(17, 4096, 4096), H200)


def test_draws_of_the_wide_space_are_as_fast_as_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = Path(wide.__file__).resolve().parents[2]
    results, page = root / "eval" / "results", (root / "env" / "README.md").read_text()
    listed = str(results / "near-listed-h200.jsonl.xz")
    assert wide.main([str(results / "near-wide-h200.jsonl.xz"), "--than", listed]) == 0
    told = capsys.readouterr().out.splitlines()[-1].partition("faster by ")[2]
    assert told.partition(";")[0] in " ".join(page.split())
    same = wide.refined(require_records(Path(listed)))
    assert wide.beside(same, same).endswith("least 1.000; 0 slower by more than 1%")
    with pytest.raises(RecordError, match="no workload in common"):
        wide.beside(same, {})
