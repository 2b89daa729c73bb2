"""Indicators by gradients, where torch runs the model: of random combinations of the outputs, so that no labels are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ....runtime.errors import OptionError
from ...frontend.pytree import flatten
from .local import unit_of_products
from .roundings import Array, rounded_activations, rounding_of
from .study import Batch, Range, Study, TorchModule, changes

if TYPE_CHECKING:
    import torch

PROBES = 8


@dataclass(frozen=True, slots=True)
class ProbedGradients:
    """E (g . dY)^2, with g the gradient of a random combination of the outputs by a product's output Y, and dY its error.

    For outputs o = f(Y) a small dY changes them by J dY, and with r standard normal E (r . J dY)^2 = |J dY|^2: so each probe r
    estimates the squared error of the outputs, at one backward pass for all units and formats together. Samples do not mix, so
    each is an estimate of its own. The default where torch runs the model. As Fisher information with probes for labels: compare
    AutoQuantize of NVIDIA's ModelOpt, which sums g^2 dY^2 over elements and so takes their errors for independent.
    """

    name: ClassVar[str] = "gradients"
    probes: int = PROBES
    seed: int = 0

    def damages(self, study: Study) -> Array:
        found = study.empty()
        probing = _Probing(study, self.probes, self.seed)
        sums = np.zeros((len(probing.squares), *found.shape))
        for batch in study.batches:
            with probing.recorded(batch) as record:
                errors = {(unit, column): record.errors(unit, form) for unit, column, form in probing.wanted(found)}
                for output, gradients in record.gradients():
                    for (unit, column), error in errors.items():
                        sums[output, unit, column] += record.squared_product(gradients, error) / self.probes
        found += sums.max(axis=0, initial=0.0)
        return found


@dataclass(frozen=True, slots=True)
class HutchinsonTrace:
    """The mean trace of the Hessian by a product's weights times their squared error: HAWQ's sensitivity, without labels.

    The Hessian is Gauss-Newton's of the squared error, J^T J, whose trace is E |J^T r|^2 (Hutchinson's estimator). Of weights
    alone: what is rounded of activations does not count (Dong et al., HAWQ-V2, NeurIPS 2020).
    """

    name: ClassVar[str] = "hutchinson"
    probes: int = PROBES
    seed: int = 0

    def damages(self, study: Study) -> Array:
        found = study.empty()
        probing = _Probing(study, self.probes, self.seed)
        traces = {name: np.zeros(len(probing.squares)) for name in probing.modules}
        for batch in study.batches:
            with probing.recorded(batch) as record:
                for output, squares in record.weight_squares():
                    for name, square in squares.items():
                        traces[name][output] += square / self.probes
        units = unit_of_products(study)
        for name, trace in ((name, float(one.max(initial=0.0))) for name, one in traces.items()):
            w, axis = probing.weights(name), probing.axis(name)
            for column, form in enumerate(study.formats):
                error = rounding_of(form, study.keeps_pairs).weights(w, axis).astype(np.float64) - w
                found[units[name], column] += trace / w.size * float((error**2).sum())
        return found


class _Probing:
    """The torch module of a study: its products' submodules, the ranges of their inputs, and the sizes of its outputs."""

    def __init__(self, study: Study, probes: int, seed: int) -> None:
        import torch

        self.study = study
        self.probes = probes
        self.torch = _torch_of(study)
        self.generator = torch.Generator().manual_seed(seed)
        named = dict(self.torch.module.named_modules())
        self.modules = {name: named[self.torch.modules[name]] for name in unit_of_products(study)}
        self.squares: list[float] = []
        self.ranges: dict[str, Range] = {}
        for batch in study.batches:
            self._look(batch)
        given = {name: study.ranges.get(str(study.products[name].activations.name)) for name in self.modules}
        self.ranges |= {name: span for name, span in given.items() if span is not None}

    def _look(self, batch: Batch) -> None:
        """Take in the ranges of inputs and the squares of outputs of a batch."""
        import torch

        with self.recorded(batch, has_gradients=False) as record, torch.no_grad():
            for name, calls in record.inputs.items():
                low, high = self.ranges.get(name, (0.0, 0.0))
                self.ranges[name] = (
                    min(low, *(float(x.min()) for x in calls)),
                    max(high, *(float(x.max()) for x in calls)),
                )
            squares = [float((one.double() ** 2).sum()) for one in record.outputs]
        self.squares = [one + more for one, more in zip(self.squares or [0.0] * len(squares), squares, strict=True)]

    def wanted(self, found: Array) -> list[tuple[int, int, str]]:
        """Number of the unit, of the format, and the format, where there is something to predict."""
        places = np.argwhere(np.isfinite(found))
        formats = self.study.formats
        return [(int(unit), int(column), formats[column]) for unit, column in places if changes(formats[column])]

    def weights(self, name: str) -> Array:
        """Those of a product's module."""
        array: Array = self.parameter(name).detach().numpy()
        return array

    def parameter(self, name: str) -> torch.Tensor:
        """The weights of a product's module, as torch has them."""
        weight: torch.Tensor = self.modules[name].get_parameter("weight")
        return weight

    def axis(self, name: str) -> int:
        """The dimension of a module's weights that is output channels."""
        import torch

        known = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
        return 0 if isinstance(self.modules[name], known) else self.study.products[name].channel_axis

    @contextmanager
    def recorded(self, batch: Batch, *, has_gradients: bool = True) -> Iterator[_Record]:
        """A run of the module, with what its products read and made. Nothing of the module is changed after it."""
        import torch

        module = self.torch.module
        inputs: dict[str, list[torch.Tensor]] = {name: [] for name in self.modules}
        made: dict[str, list[torch.Tensor]] = {name: [] for name in self.modules}

        def keeper(name: str) -> Callable[[object, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
            def keep(_module: object, read: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
                inputs[name].append(read[0].detach().clone())  # what follows may change it in place
                made[name].append(result)
                return result.clone()

            return keep

        hooks = [one.register_forward_hook(keeper(name)) for name, one in self.modules.items()]
        modes = [(one, one.training) for one in module.modules()]
        needed = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        try:
            module.eval()
            for parameter, _ in needed:
                parameter.requires_grad_(has_gradients)
            with torch.set_grad_enabled(has_gradients):
                _, leaves = flatten(module(**{name: torch.from_numpy(array) for name, array in batch.items()}), "output")
            for hook in hooks:
                hook.remove()
            outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
            yield _Record(self, inputs, made, outputs, len(next(iter(batch.values()))))
        finally:
            for hook in hooks:
                hook.remove()
            for parameter, flag in needed:
                parameter.requires_grad_(flag)
            for one, mode in modes:
                one.training = mode


@dataclass(frozen=True)
class _Record:
    """What products read and made in one run, of each call of their modules, and the outputs."""

    probing: _Probing
    inputs: Mapping[str, Sequence[torch.Tensor]]
    made: Mapping[str, Sequence[torch.Tensor]]
    outputs: Sequence[torch.Tensor]
    size: int

    def samples(self, tensor: torch.Tensor) -> int:
        """Into how many estimates a tensor can be divided: the samples of the batch, if it has its elements in their order."""
        return self.size if tensor.dim() and self.size and tensor.shape[0] % self.size == 0 else 1

    def errors(self, unit: int, form: str) -> dict[str, list[torch.Tensor]]:
        """By how much a format changes what the products of a unit make of what they read, by the names of their nodes."""
        import torch

        study = self.probing.study
        found: dict[str, list[torch.Tensor]] = {}
        for name in list(study.units.values())[unit]:
            module, rounding = self.probing.modules[name], rounding_of(form, study.keeps_pairs)
            weights = torch.from_numpy(
                np.ascontiguousarray(rounding.weights(self.probing.weights(name), self.probing.axis(name)))
            )
            found[name] = []
            for x, y in zip(self.inputs[name], self.made[name], strict=True):
                rounded = rounded_activations(x.numpy(), rounding.activations, self.probing.ranges[name])
                with torch.no_grad():
                    result = torch.func.functional_call(module, {"weight": weights}, (torch.from_numpy(rounded),))
                    found[name].append(result - y)
        return found

    def squared_product(
        self, gradients: Mapping[str, Sequence[torch.Tensor]], errors: Mapping[str, Sequence[torch.Tensor]]
    ) -> float:
        """(g . dY)^2 of each sample, summed over the samples, with the products and calls of a unit in one g . dY."""
        import torch

        pairs = [(g, dy) for name, calls in errors.items() for g, dy in zip(gradients[name], calls, strict=True)]
        samples = min((self.samples(dy) for _, dy in pairs), default=1)
        total = torch.stack([(g * dy).reshape(samples, -1).sum(1) for g, dy in pairs]).double().sum(0)
        return float((total**2).sum())

    def gradients(self) -> Iterator[tuple[int, dict[str, list[torch.Tensor]]]]:
        """The number of an output and the gradients of its probes by what the products made."""
        calls = [(name, one) for name, results in self.made.items() for one in results]
        for output, values in self._backward([one for _, one in calls]):
            found: dict[str, list[torch.Tensor]] = {name: [] for name in self.made}
            for (name, _), value in zip(calls, values, strict=True):
                found[name].append(value)
            yield output, found

    def weight_squares(self) -> Iterator[tuple[int, dict[str, float]]]:
        """The number of an output and the squared norms of the gradients of its probes by the weights of products."""
        modules = self.probing.modules
        for output, values in self._backward([self.probing.parameter(name) for name in modules]):
            yield output, {name: float((value**2).sum()) for name, value in zip(modules, values, strict=True)}

    def _backward(self, by: Sequence[torch.Tensor]) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
        """Gradients of random combinations of each output's elements, divided by the output's norm over all batches."""
        import torch

        probing = self.probing
        for number, (output, square) in enumerate(zip(self.outputs, probing.squares, strict=True)):
            if not output.requires_grad:
                continue
            for _ in range(probing.probes):
                probe = torch.randn(output.shape, generator=probing.generator, dtype=output.dtype) / (square or 1.0) ** 0.5
                yield number, torch.autograd.grad(output, by, probe, retain_graph=True, allow_unused=True, materialize_grads=True)


def _torch_of(study: Study) -> TorchModule:
    """The torch module of a study, with a submodule for each product that is asked for."""
    if study.torch is None:
        raise OptionError("indicator 'gradients'", "there is no torch module", "give one, or take 'measured'")
    if missing := [name for name in unit_of_products(study) if name not in study.torch.modules]:
        raise OptionError("indicator 'gradients'", f"no torch module is known to be {missing[0]!r}", "take 'measured'")
    return study.torch
