"""A Solution is one JSON file that runs by itself: a library, and the runtime that calls it."""

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ptxflow.eval.bench.own_work import own_work
from ptxflow.eval.bench.session import unpack
from ptxflow.eval.sample.solution import SolutionError, main, read_solution, solution
from tests.builders import refused
from tests.house import named
from tests.library.fake import FakeDevice, FakeLibrary
from tests.library.made import AFFINE, AFFINE_LAUNCH, FILES, GEMM, KERNELS, contents, one_member


def imported(
    folder: Path, data: dict[str, Any], patch: pytest.MonkeyPatch
) -> tuple[Any, FakeLibrary]:
    """main.py of an unpacked Solution, over a device that is none."""
    return loaded(unpack(data, folder), patch)


def loaded(path: Path, patch: pytest.MonkeyPatch) -> tuple[Any, FakeLibrary]:
    """A module that brings its own runtime, over a device that is none."""
    spec = importlib.util.spec_from_file_location("brought", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = FakeLibrary(KERNELS)
    patch.setattr(module.library_call, "Cuda", lambda: FakeDevice(library))
    return module, library


def operands(m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of a product, and what is right."""
    a, b = torch.randn(m, 2048).half(), torch.randn(128, 2048).half()
    return a, b, (a.float() @ b.float().T).half()


def close(c: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(c, right, rtol=1e-3, atol=0.1)


@pytest.fixture
def data() -> dict[str, Any]:
    return solution(GEMM, FILES, "a test")


def test_it_imports_nothing_of_ours(data: dict[str, Any]) -> None:
    texts = {s["path"]: s["content"] for s in data["sources"]}
    assert all(Path(path).name == path for path in texts)
    own = {path.removesuffix(".py") for path in texts if path.endswith(".py")}
    found = {name for path, text in texts.items() if path.endswith(".py")
             for _, name in named(text)}  # fmt: skip
    assert {name.split(".")[1] for name in found if name.startswith(".")} == own - {
        "main", "library_call"
    }  # fmt: skip
    others = {name.split(".")[0] for name in found} - {""} - sys.stdlib_module_names
    assert others == set(data["spec"]["dependencies"])


def test_it_dispatches_and_passes_destinations(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, library = imported(tmp_path, data, monkeypatch)
    for m in (1, 64, 65, 300, 1):
        a, b, right = operands(m)
        close(module.run(a, b), right)
        c = torch.empty_like(right)
        with own_work():  # torch computes nothing of it
            assert module.run(a, b, c) is c and module.run(B=b, A=a).shape == c.shape
            assert module.run(A=a, C=c, B=b) is c
        close(c, right)
    assert library.launches == 20 and library.loaded == [b"cubin of a", b"cubin of b"]
    assert module.kernel().op.make.namespace == module.RUNTIME  # apart from ptxflow's own


def test_optional_inputs_scalars_and_two_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = one_member(AFFINE, AFFINE_LAUNCH, M=(1, 64))
    module, _ = imported(tmp_path, solution(made, contents(made), "a test"), monkeypatch)
    x, marks = torch.randn(3, 8), torch.zeros(4, dtype=torch.int32)
    y, z = torch.empty(3, 8), torch.empty(3, dtype=torch.int32)
    module.run(x, marks, None, 2.0, 7, y, z)
    torch.testing.assert_close(y, x * 2)
    assert z.tolist() == [7] * 3
    torch.testing.assert_close(module.run(x, marks, y, 2.0, 7)[0], x * 4)


def test_two_of_them_share_a_runtime_and_outlive_a_folder(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = imported(tmp_path / "1", data, monkeypatch)
    shutil.rmtree(tmp_path / "1")
    other = replace(GEMM, members=GEMM.members[:1], dispatch=replace(GEMM.dispatch, cells=(0, 0)))
    one = solution(other, contents(other), "a test")
    second, library = imported(tmp_path / "2", one, monkeypatch)
    assert one["name"].endswith("_a") and one["name"] != data["name"]
    assert first.library_call is second.library_call
    a, b, right = operands(100)
    close(second.run(a, b), right)
    assert library.loaded == [b"cubin of a"]


def changed(data: dict[str, Any], path: str, text: str) -> dict[str, Any]:
    assert path in {s["path"] for s in data["sources"]}
    sources = [s | {"content": text} if s["path"] == path else s for s in data["sources"]]
    return data | {"sources": sources}


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("a.cubin.base64", "Y3ViaW4gb2YgYg==", "a.cubin: its SHA-256"),
        ("a.cubin.base64", "Y3ViaW4", "a.cubin.base64: Incorrect padding"),
        ("b.cubin.base64", "Y3ViaW4gb2YgYg==" * 9, "more than 16 bytes"),
        ("b.ptx", "ptx", "b.ptx: its size"),
        ("manifest.json", "{}", "has no schema"),
    ],
)
def test_a_damaged_one_is_refused(
    data: dict[str, Any], path: str, text: str, message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module, library = imported(tmp_path, changed(data, path, text), monkeypatch)
    with pytest.raises(ValueError, match=message):
        module.run(*operands(3)[:2])
    assert not library.loaded


def test_wrong_tensors_and_sizes_are_refused(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, library = imported(tmp_path, data, monkeypatch)
    a, b, c = operands(3)
    for given, message in (
        ((a.float(), b), "A must be torch.float16"),
        ((a[:, :1024], b), "A has K=1024"),
        ((a, b, c.float()), "C must be torch.float16"),
        ((a, b, c, c), "out must be C"),
        ((operands(5000)[0], b), "no kernel for M=5000, outside 1 to 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            module.run(*given)
    assert not library.launches


def test_the_file_reads_back_and_names_what_is_wrong(data: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(data))
    assert read_solution(path) == data
    for change, message in (
        ({"spec": data["spec"] | {"language": "cuda"}}, "only Solutions in python"),
        ({"spec": data["spec"] | {"entry_point": "x.py::run"}}, "no source file 'x.py'"),
        ({"sources": [{"path": "../main.py", "content": "x"}]}, "no source file|leads out"),
        ({"sources": data["sources"] + [{"path": "/x", "content": "x"}]}, "leads out"),
    ):
        path.write_text(json.dumps(data | change))
        with pytest.raises(SolutionError, match=message):
            read_solution(path)
    path.write_text("[]")
    with pytest.raises(SolutionError, match="needs name, definition"):
        read_solution(path)


def test_names_that_would_leave_the_page_are_refused() -> None:
    definition = json.loads(json.dumps(GEMM.definition))
    definition["outputs"] = {'C"""': definition["outputs"]["C"]}
    with pytest.raises(SolutionError, match="cannot be a name"):
        solution(replace(GEMM, definition=definition), FILES, "a test")


def test_check_without_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "none.json" in refused(main, capsys, "check", tmp_path / "none.json")


@pytest.mark.usefixtures("driverless")
def test_check_without_a_gpu_is_one_line(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "solution.json"
    path.write_text(json.dumps(data))
    assert "libcuda.so.1" in refused(main, capsys, "check", path)


def test_rows_of_flashinfer_trace_are_checked_before_a_gpu_is_asked_for(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, rows = tmp_path / "solution.json", tmp_path / "rows.jsonl"
    path.write_text(json.dumps(data))
    workload = {"axes": {"M": 3}, "uuid": "u", "inputs": {
        "A": {"type": "safetensors", "path": "none.safetensors", "tensor_key": "A"}}}  # fmt: skip
    for name, message in ((data["definition"], "none.safetensors"), ("other", "no workload of")):
        rows.write_text(json.dumps({"definition": name, "workload": workload}) + "\n")
        assert message in refused(main, capsys, "check", path, "--workloads", rows)


def test_the_schema_of_flashinfer_bench_takes_it(data: dict[str, Any]) -> None:
    package = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench not installed")
    made = package.Solution.model_validate(data)
    assert made.get_entry_symbol() == "run" and "flashinfer_bench" in sys.modules
