"""The wheel: one import package, with every module and every data file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("compiler", "env", "gfn", "eval")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ptxflow", *FOLDERS)
DATA = (".json", ".jsonl", ".jsonl.xz", ".safetensors")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout gets no build folder."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, tree / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, tree / name)
    try:  # the build needs setuptools 77; where the environment has less, pip fetches its own
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        major = 0
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", "."]
    if major >= 77:
        command.insert(-1, "--no-build-isolation")
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return built


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_it_installs_ptxflow_alone(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in names(wheel)}
    assert tops == {"ptxflow", next(t for t in tops if t.endswith(".dist-info"))}


def test_it_has_every_module_and_data_file(wheel: Path) -> None:
    wanted = {
        "ptxflow/" + str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.name.endswith((".py", *DATA)) and "__pycache__" not in file.parts
    }
    assert "ptxflow/compiler/data/sass_signatures.json" in wanted
    assert len([w for w in wanted if w.startswith("ptxflow/eval/definitions/")]) >= 8
    assert sorted(wanted - names(wheel)) == []


def test_it_works_unpacked_elsewhere(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = (
        "import json, ptxflow, ptxflow.compiler.sass as sass, ptxflow.compiler.device as device\n"
        "print(json.dumps([ptxflow.__file__, len(sass.signatures()), list(device.DEVICES)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, signatures, devices = json.loads(done.stdout)
    assert Path(file).is_relative_to(tmp_path)
    assert signatures == 99 and "b200" in devices
