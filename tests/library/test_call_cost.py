"""The benchmark's kernels, compiled and written as libraries that load."""

from pathlib import Path

import pytest

from ptxflow.compiler.device import H200
from ptxflow.compiler.library.call import Kernel
from ptxflow.compiler.library.manifest import read_manifest
from ptxflow.eval.bench.call_cost import ROWS, Row, kernel_for, library_of
from tests.library.fake import FakeDevice, FakeLibrary


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=[row.definition for row in ROWS])
def test_its_libraries_load(row: Row, tmp_path: Path) -> None:
    definition, compiled = kernel_for(row, H200)
    assert len(compiled.launch.steps) == row.launches
    folder = library_of(definition, compiled, tmp_path / "x")
    assert read_manifest(folder).members[0].launch == compiled.launch
    assert Kernel(folder, FakeDevice(FakeLibrary({})), "ctypes").name == row.definition
