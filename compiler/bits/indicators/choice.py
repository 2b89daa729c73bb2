"""The indicators by name, and which of them a study gets."""

from __future__ import annotations

from collections.abc import Mapping

from .gradients import HutchinsonTrace, ProbedGradients
from .local import LocalError, RoundingVariance, unit_of_products
from .measured import MeasuredPerturbation
from .study import Indicator, Study

INDICATORS: Mapping[str, type[Indicator]] = {
    one.name: one for one in (MeasuredPerturbation, ProbedGradients, LocalError, HutchinsonTrace, RoundingVariance)
}


def default_indicator(study: Study) -> Indicator:
    """Gradients of probes where torch runs the model and all products are known there; else what is measured."""
    if study.torch is not None and all(name in study.torch.modules for name in unit_of_products(study)):
        return ProbedGradients()
    return MeasuredPerturbation()
