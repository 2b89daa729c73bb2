"""Indicators against damage on held-out data, of small nets that are trained here."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from prefuse.benchmarks.sensitivity import Verdict, study_of, verdicts
from prefuse.benchmarks.trained_nets import TrainedNet, digits_lenet, digits_mlp
from prefuse.compiler.bits.indicators.choice import default_indicator
from prefuse.compiler.bits.indicators.gradients import ProbedGradients
from prefuse.compiler.bits.indicators.measured import MeasuredPerturbation
from prefuse.compiler.bits.indicators.study import Study
from prefuse.tests.sample import every

ALL = ("measured", "gradients", "sqnr", "hutchinson", "qsync")
DEFAULTS = ("measured", "gradients")
TODAY = every(2, ["mlp", "lenet"])  # tomorrow the other one


@cache
def trained(name: str) -> TrainedNet:
    return {"mlp": digits_mlp, "lenet": digits_lenet}[name](epochs=12)


@cache
def judged(name: str) -> dict[str, Verdict]:
    net = trained(name)
    found, _ = verdicts(net, study_of(net), ALL, 40, with_units=False)
    return {one.name: one for one in found}


@pytest.mark.parametrize("name", TODAY)
def test_defaults_predict_held_out_damage(name: str) -> None:
    """Of 40 random assignments: they are ranked rightly, and 80% are predicted within a factor of 2."""
    for indicator in DEFAULTS:
        verdict = judged(name)[indicator]
        assert verdict.assignments >= 0.9
        assert verdict.near >= 0.8


@pytest.mark.parametrize("name", TODAY)
def test_baselines_are_worse(name: str) -> None:
    """Those that do not follow errors to the outputs predict less than the defaults: what makes the latter worth their time."""
    found = judged(name)
    for baseline in ("sqnr", "qsync"):
        assert found[baseline].near < min(found[one].near for one in DEFAULTS)


def test_gradients_find_what_is_measured() -> None:
    """Of a linear net the probes estimate the very damage: with many probes both are equal, for units of two products, too."""
    net = trained("mlp")
    linear = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.Linear(24, 12, bias=False), torch.nn.Linear(12, 10)).eval()
    study = study_of(linear_net(linear, net))
    names = list(study.units)
    joined = Study(
        study.model, study.batches, {"both": (names[0], names[2]), "one": (names[1],)}, study.formats, torch=study.torch
    )
    measured, probed = MeasuredPerturbation().damages(joined), ProbedGradients(probes=64).damages(joined)
    narrow = [study.formats.index(form) for form in ("bfloat16", "int8", "int8-rows", "w8", "w4")]
    assert probed[:, narrow] == pytest.approx(measured[:, narrow], rel=0.25)
    assert (probed[:, 0] == 0).all()


def linear_net(module: torch.nn.Module, like: TrainedNet) -> TrainedNet:
    from prefuse.compiler.frontend.importer import import_model
    from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
    from prefuse.compiler.pipeline.pass_table import PASSES
    from prefuse.runtime.target import Target

    batches = [{"input": batch["image"].reshape(-1, 64)} for batch in like.calibration]
    model = import_model(torch.export.export(module, (torch.from_numpy(batches[0]["input"]),), strict=False))
    run_pipeline(model, parse_pipeline("canonicalize,eliminate-dead", PASSES), Context(Target.parse("cpu")))
    return TrainedNet("linear", module, model, batches, batches)


def test_the_module_stays_as_it_is() -> None:
    """Modes, gradients' flags, hooks and weights are those of before."""
    net = trained("lenet")
    module = net.module
    module.train()
    last = list(module.parameters())[-1]
    last.requires_grad_(False)
    before = [parameter.clone() for parameter in module.parameters()]
    study = study_of(net, ("float32", "int8"))
    assert isinstance(default_indicator(study), ProbedGradients)
    ProbedGradients(probes=1).damages(study)
    assert module.training
    assert not last.requires_grad
    assert all(parameter.requires_grad for parameter in list(module.parameters())[:-1])
    assert all((old == new).all() for old, new in zip(before, module.parameters(), strict=True))
    assert not any(one._forward_hooks for one in module.modules())
    last.requires_grad_(True)
    module.eval()


def test_probes_are_repeatable() -> None:
    study = study_of(trained("lenet"))
    first, again = ProbedGradients(probes=2).damages(study), ProbedGradients(probes=2).damages(study)
    assert (first == again).all()
    assert np.isinf(first).sum() == 2  # convolutions have no rows
