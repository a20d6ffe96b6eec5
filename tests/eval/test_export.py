"""A library as a repository of Hugging Face's kernels: it runs alone, and their tools take it."""

import base64
import hashlib
import json
from pathlib import Path

import pytest

from ptxflow.compiler.library.manifest import write_library
from ptxflow.eval.sample.export import METADATA, VARIANT, main
from tests.builders import refused
from tests.eval.test_solution import close, loaded, operands
from tests.library.made import FILES, GEMM


@pytest.fixture
def variant(tmp_path: Path) -> Path:
    write_library(tmp_path / "library", GEMM, FILES)
    assert main([str(tmp_path / "library"), str(tmp_path / "hub"), "--license", "MIT"]) == 0
    return tmp_path / "hub" / "build" / VARIANT


def test_it_runs_by_itself(variant: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, library = loaded(variant / "__init__.py", monkeypatch)
    a, b, right = operands(70)
    close(module.run(a, b), right)
    assert library.loaded == [b"cubin of a", b"cubin of b"]


def test_every_file_has_its_digest(variant: Path) -> None:
    metadata = json.loads((variant / METADATA).read_text())
    found = {
        path.name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in variant.iterdir()
        if path.name != METADATA
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": found}
    assert metadata["backend"] == {"type": "cuda", "archs": ["9.0a"]}
    assert metadata["python-depends"] == []  # torch and the standard library


def test_their_tools_take_it(variant: Path) -> None:
    """The package's own parser, digest and choice of a variant for a machine with CUDA."""
    rust = pytest.importorskip("kernels._rust", reason="Hugging Face's kernels not installed")
    from kernels import variants
    from kernels.backends import CUDA
    from packaging.version import Version

    held = rust.Metadata.read_from_file(variant / METADATA)
    held.digest.validate(rust.Digest.hash_variant(held.digest.algorithm, variant))
    (only,) = variants.get_variants_local(variant.parent)
    chosen, _ = variants._resolve_variant_for_system(
        [only], CUDA(Version("13.0")), "x86_64", "linux", Version("2.11"), True, None
    )
    assert [v.variant_str for v in chosen] == [VARIANT]
    (variant / "manifest.json").write_text("{}")
    with pytest.raises(rust.DigestValidationError, match=r"manifest\.json"):
        held.digest.validate(rust.Digest.hash_variant(held.digest.algorithm, variant))


def test_a_folder_that_is_no_library_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (tmp_path / "none", tmp_path / "hub", "--license", "MIT")
    assert "manifest.json" in refused(main, capsys, *argv)
    assert not (tmp_path / "hub").exists()
