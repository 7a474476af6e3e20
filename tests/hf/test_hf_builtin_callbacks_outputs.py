"""Extracting loss and logits from the outputs of models."""

from types import SimpleNamespace

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from trainformer.core.errors import BadArgument
from trainformer.hf.outputs import logits_from_outputs, loss_and_logits_from_outputs, loss_from_outputs

LOSS, LOGITS, STATES = torch.tensor(0.5), torch.ones(2, 3), torch.zeros(4)

BOTH = {
    "tuple": (LOSS, LOGITS),
    "longer tuple": (LOSS, LOGITS, STATES),
    "list": [LOSS, LOGITS],
    "dict": {"logits": LOGITS, "loss": LOSS},
    "object": SimpleNamespace(loss=LOSS, logits=LOGITS),
    "ModelOutput": CausalLMOutput(loss=LOSS, logits=LOGITS),
}


@pytest.mark.parametrize("kind", BOTH)
def test_loss_and_logits_are_found_together_and_separately(kind):
    outputs = BOTH[kind]
    loss, logits = loss_and_logits_from_outputs(outputs)
    assert loss is LOSS
    assert logits is LOGITS
    assert loss_from_outputs(outputs) is LOSS
    assert logits_from_outputs(outputs) is LOGITS


@pytest.mark.parametrize(
    "outputs", [LOGITS, (LOGITS,), (LOGITS, STATES), {"logits": LOGITS}, CausalLMOutput(logits=LOGITS)]
)
def test_logits_without_a_loss(outputs):
    assert logits_from_outputs(outputs) is LOGITS


def test_a_scalar_tensor_is_a_loss():
    assert loss_from_outputs(LOSS) is LOSS


@pytest.mark.parametrize(
    ("function", "outputs", "message"),
    [
        (loss_from_outputs, LOGITS, r"a loss, received 'a tensor of shape \(2, 3\)'.*labels"),
        (loss_from_outputs, (), r"none in a tuple of 0"),
        (loss_from_outputs, (0.5, LOGITS), r"a float in a tuple of 2"),
        (loss_from_outputs, CausalLMOutput(logits=LOGITS), r"none in a CausalLMOutput with logits.*labels"),
        (loss_from_outputs, SimpleNamespace(logits=LOGITS), r"none in a SimpleNamespace.*labels"),
        (logits_from_outputs, {"loss": LOSS, "states": 1}, r"none in a dict with loss, states"),
        (logits_from_outputs, None, r"none in a NoneType"),
        (logits_from_outputs, (), r"none in a tuple of 0"),
        (loss_and_logits_from_outputs, (LOSS,), r"logits as a tensor, received 'none in a tuple of 1'"),
        (loss_and_logits_from_outputs, (None, LOGITS), r"loss as a tensor, received 'none in a tuple of 2'"),
        (loss_and_logits_from_outputs, LOGITS, r"received 'one tensor'"),
        (loss_and_logits_from_outputs, {"loss": LOSS}, r"logits as a tensor"),
    ],
)
def test_missing_outputs_are_explained(function, outputs, message):
    with pytest.raises(BadArgument, match=message) as caught:
        function(outputs)
    assert isinstance(caught.value, ValueError)
