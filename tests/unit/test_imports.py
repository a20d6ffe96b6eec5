"""The dependencies between folders, read from the source of every module, and torchgfn's name."""

import importlib.metadata
from pathlib import Path

import pytest

from tests.builders import ROOT, python
from tests.house import FOLDERS, named

MAY_IMPORT = {
    "compiler": {"compiler"},
    "env": {"env", "compiler"},
    "gfn": {"gfn", "env", "compiler"},
    "eval": {"eval", "gfn", "env", "compiler"},
}
NEEDS_A_GPU = {
    "compiler/backend/runtime.py",
    *(f"compiler/library/{n}.py" for n in ("call", "device", "native", "plan", "signature")),
    "compiler/library/torch_op.py",
}
NO_TORCH = ("torch", "gfn", "triton", "cuda")
PURE = ("cuda.pathfinder",)  # finds files, and needs no CUDA


def offences(folder: str, path: str, source: str) -> list[str]:
    """What a module of a folder imports and should not."""
    out = []
    for line, name in named(source):
        top, _, rest = name.partition(".")
        where = f"{path}:{line}: {name}"
        if name.startswith("."):
            out.append(f"{where}: relative")
        elif top in FOLDERS and not (top == "gfn" and folder == "gfn"):
            out.append(f"{where}: bare name; write ptxflow.{top}")
        elif top == "ptxflow" and rest.split(".")[0] in set(FOLDERS) - MAY_IMPORT[folder]:
            out.append(f"{where}: {folder} may import {sorted(MAY_IMPORT[folder])} only")
        elif (
            folder in ("compiler", "env")
            and path not in NEEDS_A_GPU
            and top in NO_TORCH
            and not name.startswith(PURE)
        ):
            out.append(f"{where}: {folder} works without torch and CUDA")
    return out


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_they_may(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ has no modules"
    found = []
    for file in files:
        found += offences(folder, str(file.relative_to(ROOT)), file.read_text())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("compiler", "from ptxflow.env.space import Space"),
        ("compiler", "from ptxflow import env"),
        ("compiler", "def f():\n    import torch"),
        ("compiler", "from cuda.bindings import driver"),
        ("env", "import ptxflow.gfn.policy"),
        ("env", "from torch import nn"),
        ("gfn", "import ptxflow.eval.bench.timing"),
        ("gfn", "from env.space import Space"),
        ("eval", "import gfn"),
        ("env", "from . import space"),
    ],
)
def test_the_walk_sees_offences(folder: str, source: str) -> None:
    assert offences(folder, f"{folder}/planted.py", source)


def test_the_walk_lets_the_legal_pass() -> None:
    assert not offences("gfn", "gfn/x.py", "import torch, gfn\nfrom ptxflow.env import space")
    assert not offences("compiler", "compiler/x.py", "from cuda.pathfinder import find")
    runtime = "compiler/backend/runtime.py"
    assert not offences("compiler", runtime, "from cuda.bindings import driver")


def test_compiler_and_env_import_without_torch_and_cuda() -> None:
    names = [
        "ptxflow." + str(file.relative_to(ROOT).with_suffix("")).replace("/", ".")
        for folder in ("compiler", "env")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if str(file.relative_to(ROOT)) not in NEEDS_A_GPU
    ]
    program = (
        "import importlib, sys\n"
        "for blocked in ('torch', 'gfn', 'triton', 'cuda.bindings', 'cuda.core'):\n"
        "    sys.modules[blocked] = None\n"
        f"for name in {[n.removesuffix('.__init__') for n in names]}:\n"
        "    importlib.import_module(name)\n"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr


def test_gfn_is_torchgfn_even_from_the_root() -> None:
    found = Path(python("-c", "import gfn; print(gfn.__file__)").stdout.strip()).resolve()
    assert found.parent.parent.name == "site-packages"


def test_top_level_folders_are_no_packages() -> None:
    for folder in FOLDERS:
        assert not (ROOT / folder / "__init__.py").exists(), (
            f"{folder}/ would shadow or be shadowed"
        )
        assert (ROOT / "ptxflow" / folder).resolve() == ROOT / folder


def test_no_module_of_gfn_has_a_name_of_torchgfn() -> None:
    theirs = {
        Path(str(file)).parts[1].removesuffix(".py")
        for file in importlib.metadata.files("torchgfn") or []
        if Path(str(file)).parts[0] == "gfn" and len(Path(str(file)).parts) > 1
    }
    assert {"env", "actions", "samplers"} <= theirs
    ours = {p.stem for p in (ROOT / "gfn").iterdir() if p.suffix == ".py" or p.is_dir()}
    assert not (ours & theirs) - {"__pycache__", "__init__"}
