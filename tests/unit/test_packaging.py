"""The wheel: one import package, with every module and every data file, and a command that works
where there is no checkout."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("compiler", "env", "gfn", "eval", "checkpoints")
SCRIPTS = ("sample.py", "train.py")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ptxflow", *FOLDERS, *SCRIPTS)
DATA = (".json", ".jsonl", ".jsonl.xz", ".safetensors")


def ended(
    command: Sequence[str | Path], cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Of a command; nothing of a checkout is on its path."""
    clean = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "PTXFLOW_CACHE")}
    env = clean | {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What a command prints."""
    done = ended(command, cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(tree: Path) -> Path:
    """The wheel of a source tree."""
    try:  # the build needs setuptools 77; where the environment has less, pip fetches its own
        major = int(importlib.metadata.version("setuptools").split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        major = 0
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "wheels", "."]
    if major >= 77:
        command.insert(-1, "--no-build-isolation")
    run(command, tree)
    (built,) = (tree / "wheels").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that the checkout gets no build folder."""
    folder = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, folder / name, symlinks=True, ignore=skip)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return build(tree)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into; what it depends on is the environment's."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
    run([*command, "--target", target, wheel], target)
    return target


def installed(site: Path, cwd: Path, *argv: str) -> str:
    """What `ptxflow ARGV` prints, of the installed one."""
    return run(
        [site / "bin" / "ptxflow", *argv], cwd, PYTHONPATH=str(site), OMP_NUM_THREADS="1",
        PTXFLOW_CACHE=str(cwd / "cache"),
    )  # fmt: skip


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of the import package, by name."""
    with zipfile.ZipFile(wheel) as archive:
        names = (n for n in archive.namelist() if n.startswith("ptxflow/"))
        return {name: archive.read(name) for name in names}


def test_it_installs_ptxflow_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"ptxflow", next(t for t in tops if t.endswith(".dist-info"))}


def test_it_has_every_module_and_data_file(wheel: Path) -> None:
    wanted = {"ptxflow/__main__.py", *(f"ptxflow/{script}" for script in SCRIPTS)} | {
        "ptxflow/" + str(file.relative_to(ROOT))
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.name.endswith((".py", *DATA)) and "__pycache__" not in file.parts
    }
    assert "ptxflow/compiler/backend/sass_signatures.json" in wanted
    assert "ptxflow/checkpoints/b200.safetensors" in wanted
    assert len([w for w in wanted if w.startswith("ptxflow/env/tasks/definitions/")]) >= 8
    assert sorted(wanted - contents(wheel).keys()) == []


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(wheel: Path, tree: Path, tmp_path: Path) -> None:
    program = "import setuptools.build_meta as b; print(b.build_sdist('dist'))"
    name = run([sys.executable, "-c", program], tree).splitlines()[-1]
    with tarfile.open(tree / "dist" / name) as archive:
        assert not [m.name for m in archive if m.issym() or m.islnk()]
        archive.extractall(tmp_path)
    assert contents(build(tmp_path / name.removesuffix(".tar.gz"))) == contents(wheel)


def test_it_works_installed_elsewhere(site: Path, tmp_path: Path) -> None:
    program = (
        "import json, ptxflow, ptxflow.compiler.device as device\n"
        "import ptxflow.compiler.backend.sass as sass\n"
        "print(json.dumps([ptxflow.__file__, len(sass.signatures()), list(device.DEVICES)]))"
    )
    told = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(site))
    file, signatures, devices = json.loads(told)
    assert Path(file).is_relative_to(site)
    assert signatures == 99 and "b200" in devices


@pytest.mark.slow
def test_the_command_samples_and_trains_where_there_is_no_checkout(
    site: Path, tmp_path: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in site.rglob("*")}
    assert str(site / "ptxflow" / "checkpoints") in installed(site, tmp_path, "--help")
    assert "gemm_n4096_k4096" in installed(site, tmp_path, "definitions")
    told = installed(
        site, tmp_path, "sample", "--definition", "rmsnorm_h4096", "--axes", "batch_size=8",
        "-k", "2", "--measure", "no", "--no-emulate",
    )  # fmt: skip
    assert "2 kernels" in told
    (solution,) = (tmp_path / "out").glob("*/solution.json")
    assert json.loads(solution.read_text())["definition"] == "rmsnorm_h4096"
    installed(
        site, tmp_path, "train", "--preset", "demo", "--definitions", "gemm_n128_k2048",
        "--steps", "1", "--out", "run",
    )  # fmt: skip
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 1
    assert {p: p.stat().st_mtime_ns for p in site.rglob("*")} == before  # it writes nothing there


@pytest.mark.parametrize(
    "module",
    [
        "bench.reference_text",
        *(
            pytest.param(m, marks=pytest.mark.slow)
            for m in ("bench.attention_workloads", "study.definitions_page")
        ),
    ],
)
def test_what_renews_the_repository_says_that_it_needs_one(
    module: str, site: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", f"ptxflow.eval.{module}"]
    done = ended(command, tmp_path, PYTHONPATH=str(site))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith(f"{module.split('.')[1]}: ") and len(done.stderr.splitlines()) == 1
    )


@pytest.fixture
def without_links(tree: Path, tmp_path: Path) -> Path:
    """A checkout where git wrote each link as a text file that holds the path."""
    folder = tmp_path / "checkout"
    skip = shutil.ignore_patterns("dist", "wheels", "build", "*.egg-info", "*.safetensors")
    shutil.copytree(tree, folder, symlinks=True, ignore=skip)
    links = [p for p in (folder / "ptxflow").iterdir() if p.is_symlink()]
    assert len(links) == len(FOLDERS) + len(SCRIPTS)
    for link in links:
        text = os.readlink(link)
        link.unlink()
        link.write_text(text)
    return folder


def test_a_checkout_without_links_works(without_links: Path) -> None:
    program = "import ptxflow.sample, ptxflow.train, ptxflow.eval.__main__ as e; print(e.__file__)"
    told = run([sys.executable, "-c", program], without_links)
    assert told.strip() == str(without_links / "eval" / "__main__.py")
    command = [sys.executable, "-m", "ptxflow"]
    assert "gemm_n4096_k4096" in run([*command, "definitions"], without_links)
    assert str(without_links / "checkpoints") in run([*command, "--help"], without_links)


def test_what_was_built_without_links_says_so(without_links: Path, tmp_path: Path) -> None:
    alone = tmp_path / "site"
    alone.mkdir()
    shutil.move(without_links / "ptxflow", alone)
    program = "try:\n    import ptxflow\nexcept ImportError as error:\n    print(error)"
    told = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(alone))
    assert "symbolic links" in told and len(told.splitlines()) == 1
