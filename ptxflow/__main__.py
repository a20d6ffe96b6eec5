"""The installed command: `ptxflow COMMAND`, or `python -m ptxflow COMMAND` in a checkout.

Commands are modules with a `main(argv)` that returns an exit code; only the one that is asked for
is imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import ptxflow

COMMANDS = {
    "sample and train": {
        "sample": ("sample", "kernels for one workload: drawn, compiled, checked, ranked"),
        "train": ("train", "a policy, or tune a trained one to one workload"),
        "tune": ("eval.tune.session", "one workload in rounds: gaps, moves, branches, champion"),
        "definitions": ("env.tasks.definition_table", "what comes with ptxflow, and its axes"),
        "model-shapes": (
            "eval.sample.model_shapes",
            "definitions and libraries that a model needs",
        ),
        "solution": ("eval.sample.solution", "check a FlashInfer-Bench Solution on this GPU"),
        "export": ("eval.sample.export", "a library for Hugging Face kernels"),
    },
    "check, without a GPU": {
        "verify": ("eval.verify.strategies", "strategies by validator, ptxas, SASS and emulator"),
        "check-ptx": ("eval.verify.check_ptx", "any PTX kernel: races, barriers, fences, bounds"),
        "survey": ("eval.verify.survey", "compile many uniform strategies and count what holds"),
        "mutation": ("eval.verify.mutation", "how many mutants of kernels the validator kills"),
        "mutate-values": ("eval.verify.value_mutation", "how many mutants of values trials kill"),
        "verify-real": ("eval.verify.real", "a real row of each family in the emulator"),
        "plants": ("eval.verify.plants", "mutants that no trial kills, on the GPU at real sizes"),
        "mcp": ("eval.agents.server", "a server for coding agents: all of this as tools"),
    },
    "measure, on a GPU": {
        "campaign": ("eval.bench.campaign", "check and time strategies beside libraries"),
        "policy-draws": ("eval.sample.draws", "what a policy would try, for a campaign"),
        "harness": ("eval.sample.harness", "flashinfer-bench on Solutions and libraries"),
        "faults": ("eval.bench.faults", "a campaign on a simulated cluster while things go wrong"),
        "microbench": ("eval.bench.microbench", "latency and throughput of instructions"),
        "cache": ("eval.bench.kept", "what was compiled and proven before: size, clearing"),
        "agree": ("eval.verify.agreement", "the emulator against the hardware"),
    },
    "judge": {
        "report": ("eval.bench.report", "records as a table"),
        "records": ("eval.bench.records", "pack records into the small form"),
        "evaluate": ("eval.__main__", "policies beside searches, on brute-forced spaces"),
        "live": ("eval.sample.live", "the same on whole spaces of any size, on a GPU"),
        "ablation": ("eval.study.ablation", "what each decision of a strategy is worth"),
        "plots": ("eval.study.training_plots", "draw training runs"),
        "knowledge": ("eval.tune.knowledge", "what tuning sessions learned of moves"),
    },
    "fit": {
        "new-device": ("eval.study.new_device", "measure a device that nobody measured, and fit"),
        "fit-surrogate": ("eval.study.surrogate", "a surrogate, to measurements"),
        "ranking": ("eval.study.ranking", "how well model and surrogate rank what was measured"),
        "calibrate": ("eval.study.calibration", "the model's constants, to measurements"),
        "join-policies": ("eval.study.joint_policy", "one policy of several"),
    },
}
MODULES = {name: entry[0] for group in COMMANDS.values() for name, entry in group.items()}
EXAMPLES = (
    "ptxflow definitions",
    "ptxflow sample --definition gemm_n4096_k4096 --axes M=1024",
    "ptxflow sample --definition my_gemm.json --axes M=77 --device h200 --measure no",
    "ptxflow train --preset demo",
)


def data(name: str) -> Path:
    """Where a folder lies that comes with ptxflow: in the package, or at a checkout's root."""
    (found, *_) = (p for folder in ptxflow.__path__ if (p := Path(folder, name)).is_dir())
    return found.resolve()


def text() -> str:
    """What `ptxflow --help` prints."""
    lines = [
        "usage: ptxflow COMMAND ...   (--help after a command explains it)",
        "",
        "A generative autotuner for GPU kernels: a trained policy proposes strategies, and a",
        "checked compiler lowers them to PTX and machine code.",
    ]
    for title, group in COMMANDS.items():
        lines += ["", title, *(f"  {name:13}  {line}" for name, (_, line) in group.items())]
    lines += ["", "examples", *(f"  {example}" for example in EXAMPLES)]
    lines += ["", f"trained policies and surrogates: {data('checkpoints')}"]
    return "\n".join(lines)


def run(name: str, argv: Sequence[str]) -> int:
    """A command's exit code; 130 where Ctrl-C ends one that says nothing of it itself."""
    sys.argv[0] = f"ptxflow {name}"  # argparse takes its program's name from there
    try:
        code = importlib.import_module(f"ptxflow.{MODULES[name]}").main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # who reads has enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return int(code)


def main(argv: Sequence[str] | None = None) -> int:
    first, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if first in ("-h", "--help"):
        print(text())
    elif first in ("-V", "--version"):
        print(f"ptxflow {ptxflow.__version__}")
    elif first in MODULES:
        return run(first, rest)
    else:
        print(f"ptxflow: no command {first!r}; there are {', '.join(MODULES)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
