"""A Dask cluster of this machine's GPUs and cores: `--cluster local:N`."""

import asyncio
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ptxflow.command import LOCAL, BadInput
from ptxflow.env.tasks.spaces import cores
from ptxflow.eval.bench import cluster

QUIET = {  # of Dask's own looks at each process, 50 a second; here many share a few cores
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "10s",
    "distributed.worker.memory.monitor-interval": "5s",
    "distributed.worker.profile.enabled": False,
}


def of_this_machine(count: str, gpus: Sequence[str], jobs: int | None) -> Any:
    """`local` for so many of the visible GPUs, and `jobs` compilers, else the other cores; BadInput
    where there are not so many."""
    if not count.isdecimal() or not 0 < int(count) <= len(gpus):
        raise BadInput(f"--cluster {LOCAL}{count}: N is from 1 to {len(gpus)}, the visible GPUs")
    chosen = gpus[: int(count)]
    compilers = jobs or max(1, cores() - len(chosen))
    return local([{"CUDA_VISIBLE_DEVICES": token} for token in chosen], compilers)


def local(gpus: Sequence[Mapping[str, str]], compilers: int) -> Any:
    """A Dask cluster here: a scheduler, a worker for each of `gpus` (its environment) and
    `compilers` more, each a process, the workers' restarted by nannies. To be closed."""
    try:
        from dask import config
        from distributed import Client, Nanny, SpecCluster
        from distributed.deploy.spec import ProcessInterface
    except ImportError:
        raise BadInput("--cluster needs Dask: pip install 'ptxflow[cluster]'") from None

    class Scheduler(ProcessInterface):
        """Dask's own, apart: in this process it would wait for whatever else this does."""

        async def start(self) -> None:
            command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard"]
            inherited = {"DASK_INTERNAL_INHERIT_CONFIG": config.serialize(config.global_config)}
            with tempfile.TemporaryDirectory(prefix="ptxflow-") as folder:
                told = Path(folder, "scheduler.json")
                more = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(told)]
                self.process = subprocess.Popen(
                    [*command, *more], env=os.environ | inherited, stderr=subprocess.DEVNULL
                )
                end = time.monotonic() + cluster.ANSWER
                while not self.address:
                    if self.process.poll() is not None or time.monotonic() > end:
                        raise BadInput(f"Dask's scheduler did not start: {shlex.join(command)}")
                    await asyncio.sleep(0.1)
                    with suppress(OSError, ValueError):  # not there yet, or half written
                        self.address = json.loads(told.read_text())["address"]
            await super().start()

        async def close(self) -> None:
            self.process.kill()
            self.process.wait()
            await super().close()

    def worker(resources: Mapping[str, int], environment: Mapping[str, str]) -> dict[str, Any]:
        options = {"nthreads": 1, "resources": resources, "env": dict(environment)}
        return {"cls": Nanny, "options": options | {"silence_logs": 50}}

    logging.getLogger("distributed.nanny").setLevel(logging.CRITICAL)
    context = get_context("forkserver")  # a process that is restarted has its imports
    context.set_forkserver_preload(["distributed", cluster.__name__])
    config.set({"distributed.worker.multiprocessing-method": "forkserver"} | QUIET)
    workers = {f"gpu-{i}": worker(cluster.GPU, env) for i, env in enumerate(gpus)}
    workers |= {f"compiler-{i}": worker(cluster.COMPILE, {}) for i in range(compilers)}
    made = SpecCluster(workers=workers, scheduler={"cls": Scheduler}, silence_logs=50)
    with Client(made, set_as_default=False) as client:
        client.wait_for_workers(len(workers), timeout=cluster.ANSWER)
    return made
