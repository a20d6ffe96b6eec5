"""Kernels of one problem at random places in the GPU's memory."""

import random
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ptxflow.compiler.backend.runtime import LoadedKernel
from ptxflow.compiler.launch import Arguments
from ptxflow.eval.bench.checking import Bench

SPREAD = 64 << 20  # bytes: 32 large pages
ALIGNMENT = 256  # bytes, as torch's own blocks have
SEED = 20_261_121  # of the generator that kernels which draw are given; its offset is 0


def bind(
    loaded: LoadedKernel, bench: Bench, tensors: Mapping[str, Tensor], bound: Mapping[str, int]
) -> Callable[[], None]:
    """The kernel's call over these tensors and the bench's scalars."""
    addresses: dict[str, int | None] = dict.fromkeys(bench.scalars)  # tensors not given, too
    addresses |= {name: t.data_ptr() for name, t in tensors.items()}
    call = loaded.bind(addresses, bound, Arguments(bench.scalars, SEED))
    stream = torch.cuda.current_stream().cuda_stream

    def again(kept: object = tensors) -> None:
        call(stream)

    return again


class Places:
    """Makes calls of kernels whose code was loaded anew, in another order, over copies of a bench's
    tensors that lie elsewhere. Until `close` it holds memory for these, and the last kernels."""

    def __init__(
        self, load: Mapping[str, Callable[[], LoadedKernel]], bench: Bench, bound: Mapping[str, int]
    ):
        self._load, self._bench, self._bound = load, bench, bound
        self._rooms = {n: -(-t.nbytes // ALIGNMENT) * ALIGNMENT for n, t in bench.tensors.items()}
        self._memory = next(iter(bench.tensors.values())).new_empty(
            sum(self._rooms.values()) + SPREAD, dtype=torch.uint8
        )
        self._loaded: list[LoadedKernel] = []

    def __call__(self, names: Sequence[str]) -> dict[str, Callable[[], None]]:
        loaded = {name: self._load[name]() for name in random.sample(names, len(names))}
        tensors = self._moved()
        calls = {n: bind(loaded[n], self._bench, tensors, self._bound) for n in names}
        self.close()  # the kernels before, now that they cannot leave their places to these
        self._loaded = [*loaded.values()]
        return calls

    def _moved(self) -> dict[str, Tensor]:
        """The bench's tensors, one after the other from a random place on."""
        at, moved = ALIGNMENT * random.randrange(SPREAD // ALIGNMENT), dict[str, Tensor]()
        for name, tensor in self._bench.tensors.items():
            place = self._memory[at : at + tensor.nbytes]
            moved[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            at += self._rooms[name]
        return moved

    def close(self) -> None:
        while self._loaded:
            self._loaded.pop().unload()
