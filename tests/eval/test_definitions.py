"""Definitions: the 46 files, what loading refuses, how axes are bound; our own, and what sampling
says of them where no policy was trained."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sample
from ptxflow.command import BadInput
from ptxflow.env.tasks import definition as module
from ptxflow.env.tasks.arguments import find_problem
from ptxflow.env.tasks.definition import Definition, DefinitionError, load, names, own_names, parse
from ptxflow.eval.bench.baselines.common import gemm_epilogue
from ptxflow.eval.bench.baselines.registry import SLACK, WRONG
from ptxflow.eval.bench.inputs import make_inputs
from ptxflow.eval.bench.reference_text import stale, text_of
from ptxflow.eval.bench.references import load_reference, source
from ptxflow.eval.bench.tolerance import tolerance
from ptxflow.eval.sample.selection import reward_alone
from ptxflow.eval.verify.cases import case_of
from ptxflow.eval.verify.cases.case import plain
from tests.builders import python

GEMM = "gemm_n4096_k4096"


def test_there_are_46_and_their_references_are_generated() -> None:
    assert len(names()) == 46
    assert stale() == {}


@pytest.mark.parametrize("name", names())
def test_definition_is_whole(name: str) -> None:
    definition = load(name)
    assert definition.name == name
    assert parse(json.loads(json.dumps(definition.to_json()))) == definition
    imported = set(re.findall(r"^(?:import|from) (\S+)", definition.source, re.MULTILINE))
    assert imported <= {"torch", "math", "itertools", "collections.abc", "torch.nn.functional"}
    run: Any = load_reference(definition)
    code = run.__wrapped__.__code__
    assert code.co_varnames[: code.co_argcount] == tuple(definition.inputs)


def test_upstream_schema_takes_every_definition() -> None:
    data = pytest.importorskip("flashinfer_bench.data")
    for name in names():
        assert data.Definition.model_validate(load(name).to_json()).name == name


def test_tags_and_optional_inputs_are_kept(tmp_path: Path) -> None:
    """As upstream writes them: tags of a definition, and inputs that a caller may leave out."""
    data = load("gdn_decode_qk16_v32_d128_k_last").to_json() | {"tags": ["stage:decode", "tp:8"]}
    assert data["inputs"]["state"]["optional"] is True and "optional" not in data["inputs"]["q"]
    data["inputs"]["scale"]["optional"] = True
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    definition = load(path)
    assert definition.tags == ("stage:decode", "tp:8")
    assert [n for n, t in definition.inputs.items() if t.optional] == ["state", "scale"]
    assert definition.to_json() == data == json.loads(text_of(definition))
    assert definition.resized(num_v_heads=16).inputs["state"].optional


def test_constants_are_those_of_the_description() -> None:
    """Facts that no tensor shape carries: eps, and top-k of the indexer."""
    for name in names():
        definition = load(name)
        if definition.op_type == "rmsnorm":
            said = re.search(r"eps = (1e-\d)", definition.description)
            used = re.search(r"^EPS = (\S+)$", definition.source, re.MULTILINE)
            assert used and said and float(used[1]) == float(said[1])
    assert "TOPK = 256\n" in load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64").source


def test_bind_gives_every_axis() -> None:
    assert load(GEMM).bind({"M": 17}) == {"M": 17, "N": 4096, "K": 4096}
    assert load(GEMM).bind({"M": 1, "N": 4096})["M"] == 1
    assert load(GEMM).var_axes == ("M",)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "no value is given for M"),
        ({"M": 0}, "axis 'M' must be a positive integer, not 0"),
        ({"M": -4}, "axis 'M' must be a positive integer, not -4"),
        ({"M": "x"}, "axis 'M' must be a positive integer, not 'x'"),
        ({"M": 1.5}, "axis 'M' must be a positive integer, not 1.5"),
        ({"M": True}, "axis 'M' must be a positive integer, not True"),
        ({"M": 1, "N": 2048}, "axis 'N' is the constant 4096, not 2048"),
        ({"M": 1, "L": 1}, "unknown axis 'L'; the axes are M, N, K"),
    ],
)
def test_bind_refuses(axes: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=re.escape(message)) as error:
        load(GEMM).bind(axes)
    assert "\n" not in str(error.value)


def test_bind_checks_equalities_between_axes_only() -> None:
    decode = load("gqa_paged_decode_h32_kv8_d128_ps64")
    axes = {"batch_size": 2, "num_pages": 9, "len_indptr": 4, "num_kv_indices": 8}
    with pytest.raises(DefinitionError, match=r"break len_indptr == batch_size \+ 1"):
        decode.bind(axes)
    assert decode.bind(axes | {"len_indptr": 3})["num_kv_indices"] == 8
    indexer = load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64")  # topk <= ... is not enforced
    indexer.bind({"batch_size": 1, "max_num_pages": 1, "num_pages": 1})


def test_what_comes_with_ptxflow_is_parsed_once(tmp_path: Path) -> None:
    """And a file whenever it is asked for, as it may change."""
    assert load("rmsnorm_h512") is load("rmsnorm_h512")
    file = tmp_path / "d.json"
    for name in ("first", "second"):
        file.write_text(json.dumps(load("rmsnorm_h512").to_json() | {"name": name}))
        assert load(file).name == name


def test_name_of_a_gemm_says_its_constants() -> None:
    named = load("gemm_n11008_k4096")
    assert named.const_axes == {"N": 11008, "K": 4096}
    assert find_problem(named, {"M": 7})[1].flops == 2 * 7 * 11008 * 4096
    with pytest.raises(DefinitionError, match="unknown definition"):
        load("gemm_n0_k4096")


def test_unknown_name_lists_near_ones() -> None:
    with pytest.raises(DefinitionError, match=r"near names: gemm_n4096_k4096\b"):
        load("gem_n4096_k4096")
    with pytest.raises(DefinitionError, match="no name is near"):
        load("@@@")


def _broken(change: Any) -> Any:
    data = load(GEMM).to_json()
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("name"), '"name" must be a non-empty string'),
        (lambda d: d.update(op_type=3), '"op_type" must be a non-empty string'),
        (lambda d: d.pop("axes"), '"axes" must be a non-empty object of axis name to axis'),
        (lambda d: d["axes"].update(M={"type": "any"}), 'axis "M" must be {"type": "var"} or'),
        (lambda d: d["axes"].update(N={"type": "const", "value": 0}), 'axis "N" must be'),
        (lambda d: d["axes"].update(N={"type": "const", "value": "8"}), 'axis "N" must be'),
        (lambda d: d.update(inputs=[]), '"inputs" must be a non-empty object'),
        (lambda d: d["inputs"].update(A=3), 'input "A" must be an object with "shape"'),
        (lambda d: d["inputs"]["A"].pop("dtype"), 'input "A" must be an object with "shape"'),
        (lambda d: d["inputs"]["A"].update(dtype="fp12"), 'dtype of input "A" must be one of'),
        (lambda d: d["inputs"]["A"].update(dtype=[]), 'dtype of input "A" must be one of'),
        (lambda d: d["inputs"]["A"].update(shape="MK"), 'shape of input "A" must be a list'),
        (lambda d: d["outputs"]["C"].update(shape=["M", "Q"]), "made of axes (M, N, K), not 'Q'"),
        (lambda d: d["outputs"].update(A=d["inputs"]["A"]), "both have A"),
        (lambda d: d["inputs"]["A"].update(optional=1), '"optional" of input "A" must be true or'),
        (lambda d: d["outputs"]["C"].update(optional=True), '"optional" of output "C" must be'),
        (lambda d: d.update(tags=["a", " "]), '"tags" must be a list of non-empty strings'),
        (lambda d: d.update(constraints=["M =="]), '"constraints" must be Python expressions'),
        (lambda d: d.update(reference="def run(:"), '"reference" must be Python source text'),
        (lambda d: d.update(reference="x = 1"), "with a top-level function run"),
    ],
)
def test_malformed_definition_names_the_key(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(_broken(change)))
    with pytest.raises(DefinitionError, match=re.escape(message)) as error:
        load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="No such file"):
        load(str(tmp_path / "none.json"))
    with pytest.raises(DefinitionError, match="directory"):
        load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DefinitionError, match="not UTF-8"):
        load(tmp_path / "binary.json")


def _file(tmp_path: Path, **changes: Any) -> Any:
    data = load(GEMM).to_json() | {"name": "mine"}
    del data["reference"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data | changes))
    return path


def test_file_without_reference_gets_ours(tmp_path: Path) -> None:
    import torch

    axes = {"rows": {"type": "var"}, "N": {"type": "const", "value": 3}}
    definition = load(
        _file(
            tmp_path,
            axes=axes | {"K": {"type": "const", "value": 2}},
            inputs={
                "A": {"shape": ["rows", "K"], "dtype": "bfloat16"},
                "B": {"shape": ["N", "K"], "dtype": "bfloat16"},
            },
            outputs={"C": {"shape": ["rows", "N"], "dtype": "bfloat16"}},
        )
    )
    a = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]], dtype=torch.bfloat16)
    assert load_reference(definition)(a, b).tolist() == [[1.0, 2.0, 11.0]]


def test_our_reference_is_not_given_to_another_layout(tmp_path: Path) -> None:
    other = {
        "A": {"shape": ["K", "M"], "dtype": "float16"},
        "B": load(GEMM).to_json()["inputs"]["B"],
    }
    with pytest.raises(DefinitionError, match="no reference in the definition"):
        load_reference(load(_file(tmp_path, inputs=other)))
    with pytest.raises(DefinitionError, match="none for op_type 'conv'"):
        load_reference(load(_file(tmp_path, op_type="conv")))


def test_reference_of_a_file_is_the_definition_of_it(tmp_path: Path) -> None:
    definition = load(_file(tmp_path, reference="def run(A, B):\n    return 7\n"))
    assert load_reference(definition)(None, None) == 7
    with pytest.raises(DefinitionError, match="its reference does not load: boom"):
        text = "raise OSError('boom')\ndef run(A, B):\n    return 7\n"
        load_reference(load(_file(tmp_path, reference=text)))


def test_resized_takes_constants_along() -> None:
    small = load("dsa_topk_indexer_fp8_h64_d128_topk256_ps64").resized(topk=6)
    assert "TOPK = 6\n" in small.source
    assert source(small) == small.source


def test_loading_needs_no_torch() -> None:
    code = (
        "import sys; from ptxflow.env.tasks.definition import load; "
        f"load({GEMM!r}).bind({{'M': 1}}); sys.exit('torch' in sys.modules)"
    )
    assert python("-c", code).returncode == 0


def test_definition_folder_holds_nothing_else() -> None:
    assert {path.suffix for path in module.FOLDER.rglob("*") if path.is_file()} == {".json"}
    for path in module.FOLDER.glob("*/*.json"):
        assert json.loads(path.read_text())["op_type"] == path.parent.name


M, N, K = 5, 136, 256


def small(name: str) -> Definition:
    return load(name).resized(N=N, K=K, num_n_blocks=2, num_k_blocks=2)


def test_they_are_none_of_the_46() -> None:
    assert len(own_names()) == 8 and not set(own_names()) & set(names())
    assert all(load(name).name == name for name in own_names())


@pytest.mark.parametrize("name", own_names())
def test_references_are_what_cases_expect(name: str) -> None:
    definition = small(name)
    _, problem = find_problem(definition, {"M": M})
    case = case_of(problem)
    given = []
    for tensor, spec in definition.inputs.items():
        held = case.tensors[tensor]
        if spec.dtype.startswith("float8"):
            given.append(torch.from_numpy(held).view(torch.float8_e4m3fn))
        else:
            values = np.ascontiguousarray(plain(held))
            given.append(torch.from_numpy(values).to(getattr(torch, spec.dtype)))
    found = load_reference(definition)(*given).float().numpy()
    low, high = case.expected["C"]
    assert ((found >= low) & (found <= high)).all()


@pytest.mark.parametrize("name", own_names())
def test_inputs_keep_sums_normal_and_what_models_write_is_near_the_reference(name: str) -> None:
    definition = small(name)
    given = make_inputs(definition, {"M": 64}, 1)
    assert list(given) == list(definition.inputs)
    found = load_reference(definition)(**given).float()
    assert 0.2 < found.std() < 2
    limit = tolerance(definition)
    if "A_scale" in given:
        wide = [given[n].float() for n in ("A", "A_scale", "B", "B_scale")]
        a, b = wide[0].unflatten(1, (2, 128)), wide[2].unflatten(1, (2, 128))
        b = b * wide[3].repeat_interleave(128, 0)[:N, :, None]
        other = torch.einsum("mkc,nkc->mn", a * wide[1].T[..., None], b)
        near, most = 1.0, 0.0
    else:
        other = gemm_epilogue(
            given["A"], given["B"], *(given.get(n) for n in ("bias", "up", "residual"))
        )
        other = other.float()
        near, most = SLACK, WRONG  # it rounds on the way
    outside = (other - found).abs() > near * (limit.atol + limit.rtol * found.abs())
    assert outside.float().mean() <= most


def test_what_is_said_without_a_policy() -> None:
    assert (
        reward_alone(Path("p"), "f", "both") == "p has no policy of f: the reward's best are taken"
    )
    with pytest.raises(BadInput, match="take --from reward"):
        reward_alone(Path("p"), "f", "policy")


@pytest.mark.slow
def test_sampling_without_a_policy_says_so_in_a_line(tmp_path: Path, capsys: Any) -> None:
    argv = ["--definition", "gemm_bias_n6144_k4096", "--from", "policy", "--measure", "no"]
    assert sample.main([*argv, "--device", "h200", "--out", str(tmp_path / "out")]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("sample: ") and "has no policy of gemm_epilogue: take --from" in line
