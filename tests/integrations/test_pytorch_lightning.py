"""The plugins on the classes of pytorch_lightning and lightning_fabric; test_lightning.py has the rest."""

import inspect

import lightning_fabric
import pytest
import pytorch_lightning
import torch
from lightning_runs import QUIET, batches, fit, module_class, weights, with_fabric, with_stepper
from pytorch_lightning.plugins import MixedPrecision, Precision

from narrowcast.integrations import lightning as other
from narrowcast.integrations.pytorch_lightning import FabricPrecision, NarrowcastPrecision

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"),
]
Regression = module_class(pytorch_lightning)


def test_equals_the_hosts_own_to_the_bit():
    for host, policy in (("bf16-mixed", "bf16"), ("16-mixed", "fp16")):
        models = Regression(), Regression()
        fit(pytorch_lightning, models[0], batches(), MixedPrecision(host, "cpu"), gradient_clip_val=0.1)
        fit(pytorch_lightning, models[1], batches(), NarrowcastPrecision(policy), gradient_clip_val=0.1)
        assert torch.equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_equals_a_loop_with_a_stepper_after_a_skip(policy):
    data, model = batches(bad=(3,)), Regression()
    net, stepper, scheduler = with_stepper(policy, data, accumulate=2)
    plugin = NarrowcastPrecision(policy)
    trainer = fit(pytorch_lightning, model, data, plugin, accumulate_grad_batches=2)
    assert torch.equal(weights(model), weights(net))
    assert plugin.scaler.state_dict() == stepper.scaler.state_dict()
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == scheduler.last_epoch == 2


def test_a_run_resumes_to_the_bit_after_a_skip(tmp_path):
    data = batches(3, bad=(2,))
    whole, begun, resumed = Regression(), Regression(), Regression()
    for model in (whole, begun, resumed):
        model.net[2].p = 0.0
    fit(pytorch_lightning, whole, data, NarrowcastPrecision("fp16"), max_epochs=2)
    trainer = fit(pytorch_lightning, begun, data, NarrowcastPrecision("fp16"))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = NarrowcastPrecision("fp16")
    fit(pytorch_lightning, resumed, data, again, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(weights(resumed), weights(whole))


def test_fabric_equals_a_loop_with_a_stepper_after_a_skip():
    data, plugin = batches(bad=(3,)), FabricPrecision("fp16")
    net, _, _ = with_stepper("fp16", data)
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    ours, _ = with_fabric(fabric, data, plugin)
    assert torch.equal(weights(ours), weights(net))


def test_each_package_refuses_the_plugin_of_the_other():
    with pytest.raises(
        pytorch_lightning.utilities.exceptions.MisconfigurationException, match="invalid type"
    ):
        pytorch_lightning.Trainer(**QUIET, plugins=[other.NarrowcastPrecision("bf16")])
    with pytest.raises(TypeError, match="invalid type"):
        lightning_fabric.Fabric(accelerator="cpu", plugins=[other.FabricPrecision("bf16")])


def test_the_private_name_of_the_host_is_there():
    """Runs the hooks before the step and clips; there is no public name for it."""
    assert list(inspect.signature(Precision._after_closure).parameters) == ["self", "model", "optimizer"]
