"""Compare what runs under several seeds do to the same tensors."""

from __future__ import annotations

import cutlass  # noqa: F401  (as a whole first: tests/test_layers.py)
import torch
from cutlass.cute.runtime import TensorAdapter

from warpspec.sim.errors import ScheduleDependence
from warpspec.sim.host_tensor import SOURCE
from warpspec.sim.memory import put_back
from warpspec.sim.order.stores import Stores

ROUNDING = 1e-2  # relative difference of floats that the order of atomic sums may cause


class Outcomes:
    """The tensors among the arguments of a run, before the first run and after it."""

    def __init__(self, arguments: dict[str, object]):
        self._tensors = dict(_tensors(arguments))
        self._before = self.now()
        # All that the first run overwrote, also what it reached through pointers: (address, bytes).
        self.originals: list[tuple[int, bytes]] = []
        self._first: dict[str, torch.Tensor] | None = None
        self._first_seed = 0

    def restore(self) -> None:
        """Restore the tensors, and what else the first run overwrote, to their values before it."""
        put_back(self.originals)
        self.put(self._before)

    def now(self) -> dict[str, torch.Tensor]:
        """The current contents of the tensors' storages."""
        return {name: _bytes(tensor) for name, tensor in self._tensors.items()}

    def put(self, contents: dict[str, torch.Tensor]) -> None:
        """Set the tensors to what `now` returned."""
        for name, tensor in self._tensors.items():
            _bytes_of_storage(tensor)[:] = contents[name]

    def compare(self, seed: int) -> None:
        """Raise ScheduleDependence if the tensors differ from those after the first compared run.

        Floats may differ as far as the order of atomic sums explains; everything else must be equal.
        """
        if self._first is None:
            self._first = {name: tensor.clone() for name, tensor in self._tensors.items()}
            self._first_seed = seed
            return
        for name, tensor in self._tensors.items():
            first = self._first[name]
            differing = _differing(first, tensor)
            if differing is not None:
                index = tuple(int(i) for i in torch.nonzero(differing)[0])
                count = int(differing.sum())
                raise ScheduleDependence(
                    f"results depend on the schedule: argument `{name}` differs under seeds {self._first_seed} and "
                    f"{seed} in {count} of {tensor.numel()} elements, the first at {index}: {_shown(first[index])} "
                    f"and {_shown(tensor[index])}"
                )

    def against_first(self, stores: Stores) -> None:
        """Raise WrongResult for the first tensor that differs from the first run's, naming the store at fault."""
        for name, tensor in self._tensors.items():
            stores.compare(tensor, self._first[name], rtol=0.0, atol=0.0)


def _tensors(arguments: dict[str, object]):
    """(name, CPU tensor) of the arguments and of lists and tuples among them; of a CuTe tensor that one that it was
    made from, if that is known."""
    for name, value in arguments.items():
        value = getattr(value, "_arg", value) if type(value) is TensorAdapter else value
        value = getattr(value, SOURCE, value)
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list | tuple):
            fields = getattr(value, "_fields", range(len(value)))
            yield from _tensors({f"{name}[{at}]": item for at, item in zip(fields, value, strict=True)})


def _bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's whole storage, in place."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _bytes_of_storage(tensor).clone()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers."""
    size = tensor.element_size()
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _differing(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """The elements that differ, or None if rounding explains all differences."""
    differing = _words(first) != _words(second)
    if not differing.any():
        return None
    if first.is_floating_point() and first.element_size() > 1:
        a, b = first.double(), second.double()
        finite = a.isfinite() & b.isfinite()
        same_elsewhere = bool(((a == b) | (a.isnan() & b.isnan()) | finite).all())
        distance, size = (a - b)[finite].norm(), a[finite].norm()
        if same_elsewhere and distance <= ROUNDING * size:
            return None
    return differing


def _shown(element: torch.Tensor) -> str:
    try:
        return str(element.item())
    except (RuntimeError, NotImplementedError):  # packed formats of 4 bits
        return hex(int(_words(element.reshape(1))[0]))
