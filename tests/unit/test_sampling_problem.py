"""The filters of the definitions of sampling, and the digits of a key."""

from __future__ import annotations

from ptxflow.compiler.atoms.reductions import KEY_BITS
from ptxflow.compiler.kernels.sampling.decisions import DECISIONS, later_digits
from ptxflow.env.tasks.definition import load, names
from tests.families.sampling import H200, SAMPLING


def test_the_nine_definitions_are_problems() -> None:
    given = [load(name) for name in names() if load(name).op_type == "sampling"]
    made = [SAMPLING.problem(d.to_json(), d.bind({"batch_size": 7})) for d in given]
    assert len(made) == 9
    filters = {(p.constant("top_k"), p.constant("top_p")) for p in made}
    assert filters == {(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)}
    assert all(p.bytes >= 4 * 7 * p["vocab_size"] and p.bound(H200) == "memory" for p in made)


def test_digits_make_up_a_key() -> None:
    choices = next(d.choices for d in DECISIONS if d.name == "bits")
    assert all(int(c) + sum(later_digits(int(c))) == KEY_BITS for c in choices)
