"""The torch operator of a library: opcheck, one graph under torch.compile, fake tensors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.library.fake import FakeLibrary
from tests.library.made import AFFINE, AFFINE_LAUNCH, GEMM, Kernel, loaded, one_member


@pytest.fixture
def affine(tmp_path: Path) -> tuple[Kernel, FakeLibrary]:
    return loaded(tmp_path / "affine", one_member(AFFINE, AFFINE_LAUNCH))


def inputs(m: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, int]:
    marks = torch.zeros(m + 1, dtype=torch.int32)
    return torch.randn(m, 8), marks, torch.randn(m, 8), 2.0, 7


def test_the_operators_compute_what_calls_do(affine: tuple[Kernel, FakeLibrary]) -> None:
    kernel, _ = affine
    x, marks, state, scale, rounds = inputs()
    y, z = getattr(torch.ops.ptxflow, kernel.op.name)(x, marks, state, scale, rounds)
    torch.testing.assert_close((y, z), kernel(x, marks, state, scale, rounds))
    out = torch.empty_like(y), torch.empty_like(z)
    kernel.op.out(x, marks, None, scale, rounds, *out)
    torch.testing.assert_close(out[0], x * 2)


def test_fake_tensors_have_the_shapes(affine: tuple[Kernel, FakeLibrary]) -> None:
    kernel, library = affine
    with FakeTensorMode():
        y, z = kernel(torch.empty(9, 8), torch.empty(10, dtype=torch.int32), None, 1.0, 2)
    assert (y.shape, z.shape, z.dtype) == ((9, 8), (9,), torch.int32)
    assert library.launches == 0


def test_another_library_of_a_definition_has_a_name_of_its_own(tmp_path: Path) -> None:
    first, _ = loaded(tmp_path / "a", GEMM)
    again, _ = loaded(tmp_path / "a", GEMM)
    other, _ = loaded(tmp_path / "b", replace(GEMM, tools={"ptxflow": "other"}))
    assert first.op.name == again.op.name == "gemm_n128_k2048"
    assert other.op.name == f"gemm_n128_k2048_{other.digest[:8]}"


def test_it_has_no_backward(affine: tuple[Kernel, FakeLibrary]) -> None:
    kernel, _ = affine
    x, *rest = inputs()
    with pytest.raises(RuntimeError, match="no backward"):
        kernel.op.make(x.requires_grad_(), *rest)[0].sum().backward()


@pytest.mark.slow
def test_opcheck_passes(affine: tuple[Kernel, FakeLibrary]) -> None:
    kernel, _ = affine
    torch.library.opcheck(kernel.op.make, inputs())
    x, marks, _, scale, rounds = inputs()
    torch.library.opcheck(kernel.op.make, (x, marks, None, scale, rounds))
    out = torch.empty(3, 8), torch.empty(3, dtype=torch.int32)
    torch.library.opcheck(kernel.op.out, (*inputs(), *out))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torch_compile_takes_it_whole(affine: tuple[Kernel, FakeLibrary], backend: str) -> None:
    kernel, library = affine

    def program(x, marks, state, out):  # type: ignore[no-untyped-def]
        y, z = kernel(x + 1, marks, state, scale=2.0, rounds=7)
        kernel(y, marks, None, 0.5, 1, out=out)
        return y * 2, z, out[0] + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=None, backend=backend)
    for m in (3, 5, 6):
        x, marks, state, *_ = inputs(m)
        out = torch.empty(m, 8), torch.empty(m, dtype=torch.int32)
        y, z, more = compiled(x, marks, state, out)
        expected = (x + 1) * 2 + state
        torch.testing.assert_close(y, expected * 2)
        assert z.tolist() == [7] * m
        torch.testing.assert_close(out[0], expected * 0.5)
        torch.testing.assert_close(more, out[0] + 1)
    assert library.launches == 12
