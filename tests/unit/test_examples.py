"""The decoder of examples/: its ways to make a step agree, references standing for kernels.

Files for SLURM and Kubernetes: parsed by the tools that they are for, where those are.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptxflow.env.tasks.definition import load
from ptxflow.eval.bench import campaign

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import decoder  # type: ignore[import-not-found]

    yield decoder
    for name in ("decoder", "decoder_timing", "decoder_libraries"):
        sys.modules.pop(name, None)


def reference(name: str) -> Any:
    space: dict[str, Any] = {}
    exec(load(name).source, space)
    return space["run"]


def flashinfer(attend: Any, slots: torch.Tensor) -> Any:
    """What the decoder calls of FlashInfer, by its documentation."""

    class Wrapper:
        def __init__(self, room: torch.Tensor, layout: str, use_tensor_cores: bool):
            assert layout == "NHD"

        def plan(self, indptr: Any, indices: Any, last: Any, *sizes: int, **how: Any) -> None:
            assert sizes == (8, 2, 32, 64)

        def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            out: torch.Tensor = attend(q, *cache)[0]
            return out

    def add_norm(x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float) -> None:
        residual += x
        x.copy_(torch.rms_norm(residual, (256,), w, eps))

    def append(k: Any, v: Any, rows: Any, at: Any, cache: Any, *pages: Any) -> None:
        for held, new in zip(cache, (k, v), strict=True):
            held.view(-1, *new.shape[1:])[slots] = new

    def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Wrapper, silu_and_mul=silu_and_mul,
        fused_add_rmsnorm=add_norm, append_paged_kv_cache=append,
        rmsnorm=lambda x, w, eps: torch.rms_norm(x, (256,), w, eps),
    )  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor, residual: Any = 0) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight) + residual


def test_a_step_by_libraries_is_torchs(decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = decoder.Model(decoder.Shape(256, 8, 2, 32, 512, 500), 2, 3, 128, "cpu")
    hidden = torch.randn(3, 256).bfloat16()
    before = [cache.clone() for i in range(2) for cache in model.caches(i)]
    exact = decoder.Torch(model, torch.float32).step(hidden)[0]
    ours = object.__new__(decoder.Ptxflow)
    ours.model, ours.scale = model, 32**-0.5
    ours.products = dict.fromkeys(model.shape.products, product)
    ours.normed = reference("rmsnorm_h4096")
    ours.attended = reference("gqa_paged_decode_h32_kv8_d128_ps64")
    given = model.index
    attend = partial(reference("gqa_paged_decode_h32_kv8_d128_ps64"), kv_indptr=given["indptr"],
                     kv_indices=given["indices"], kv_last_page_len=given["last_len"],
                     sm_scale=32**-0.5)  # fmt: skip
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(attend, given["slot"]))
    for ops in (decoder.Torch(model), ours, decoder.FlashInfer(model)):
        logits, probs = ops.step(hidden)
        assert float((logits - exact).norm() / exact.norm()) < 0.02
        torch.testing.assert_close(probs.sum(-1), torch.ones(3))
    after = [cache for i in range(2) for cache in model.caches(i)]
    written = [int((a != b).flatten(2).any(-1).sum()) for a, b in zip(before, after, strict=True)]
    assert written == [3, 3, 3, 3]  # the newest of each sequence


def test_the_libraries_that_it_asks_for_can_be_made(decoder: Any, tmp_path: Path) -> None:
    import decoder_libraries  # type: ignore[import-not-found]

    from ptxflow.eval.sample.ranges import find_ranges

    wanted = decoder_libraries.wanted(decoder.Shape(), tmp_path)
    assert wanted.keys() == {
        "norm", "sampling", "attention", "n6144_k4096", "n4096_k4096_residual", "n28672_k4096",
        "n4096_k14336_residual", "n128256_k4096",
    }  # fmt: skip
    for definition, *asked in wanted.values():
        at = asked.index("--chain")
        found = load(definition)
        assert {*asked[at + 1 :]} <= found.inputs.keys()
        ranges, remark = find_ranges(found, asked[:at])
        assert not remark and max(high for _, high in ranges.free.values()) >= 64


# Files for clusters ------------------------------------------------------------------------------

SCRIPT, MANIFEST = (EXAMPLES / "cluster" / n for n in ("slurm.sbatch", "kubernetes.yaml"))
CONTROLLER = """ClusterName=none
SlurmctldHost=localhost
NodeName=localhost
PartitionName=all Nodes=ALL Default=YES
GresTypes=gpu
MessageTimeout=2
"""


def takes(arguments: list[str]) -> None:
    """Dask's own command line takes these, or our own."""
    if arguments[0] == "ptxflow":
        campaign.arguments(arguments[2:])
        return
    cli = pytest.importorskip(f"distributed.cli.dask_{arguments[1]}")
    cli.main.make_context(f"dask {arguments[1]}", arguments[2:])


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What our command sets goes with the test."""
    monkeypatch.setenv(campaign.CLUSTER, "")


def test_dask_takes_what_the_batch_script_gives_it() -> None:
    text = SCRIPT.read_text()
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    places = {"ADDRESS": "tls://here:8786", "ADDRESS##*:": "8786", "compilers": "3"}
    text = re.sub(r"\$\{?([\w#*:]+)\}?", lambda found: places.get(found[1], found[0]), text)
    lines = re.findall(r"dask (?:scheduler|worker) [^&]*(?= &)", text)
    assert len(lines) == 3
    for line in lines:
        takes(shlex.split(line))
    takes([*shlex.split(re.findall(r"ptxflow campaign .*", text)[0]), "--cluster", "tls://a:1"])


def test_slurm_takes_the_options_of_the_batch_script(tmp_path: Path) -> None:
    """By sbatch, to its look for a controller; without one on this machine, as far as can be."""
    text = SCRIPT.read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.M))
    assert len(options) == text.count("\n#SBATCH ") == 7
    assert all(int(options[n]) > 0 for n in ("nodes", "gpus-per-node", "cpus-per-task"))
    if shutil.which("sbatch") is None:
        pytest.skip("no SLURM")
    (tmp_path / "slurm.conf").write_text(CONTROLLER)
    env = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text(text.replace("--cpus-per-task", "--cpus-for-task", 1))
    said = [
        subprocess.run(
            ["sbatch", "--test-only", f, "true"], env=env, capture_output=True, text=True
        )
        for f in (SCRIPT, wrong)
    ]
    assert "Unable to contact slurm controller" in said[0].stderr
    assert "unrecognized option '--cpus-for-task=64'" in said[1].stderr


def test_kubernetes_takes_the_manifest() -> None:
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    named = {(m["kind"], m["metadata"]["name"]) for m in found}
    pods = {}
    for one in found:
        if one["kind"] in ("Deployment", "Job"):
            pod = one["spec"]["template"]
            pods[one["metadata"]["name"]] = pod["metadata"]["labels"]
            (container,), volumes = pod["spec"]["containers"], pod["spec"]["volumes"]
            takes(container["args"])
            assert {v["name"] for v in volumes} == {m["name"] for m in container["volumeMounts"]}
            claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes[1:]}
            maps = {e["configMapRef"]["name"] for e in container["envFrom"]}
            assert {("PersistentVolumeClaim", n) for n in claims} <= named
            assert {("ConfigMap", n) for n in maps} <= named
            selector = one["spec"].get("selector", {"matchLabels": {}})["matchLabels"]
            assert selector.items() <= pods[one["metadata"]["name"]].items()
    (service,) = (m for m in found if m["kind"] == "Service")
    assert service["spec"]["selector"] == pods[service["metadata"]["name"]]
    assert f"tls://{service['metadata']['name']}:8786" in MANIFEST.read_text()
    kubernetes = pytest.importorskip("kubernetes_validate")
    for one in found:
        kubernetes.validate(one, kubernetes.latest_version(), strict=True)
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(found[-1] | {"spek": 1}, kubernetes.latest_version(), strict=True)
