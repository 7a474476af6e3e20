"""Several optimizers on two ranks: the same numbers as in one process, with DDP and FSDP."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ranks import named, on_ranks
from several_optimizers import FILES, on_rank
from trainformer import OptimizerConfig, Trainer
from trainformer.core.errors import BadArgument

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {world: on_ranks(on_rank, world, tmp_path_factory.mktemp(f"several{world}")) for world in (1, 2)}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_two_processes_train_like_one(results, name, strategy, accumulation):
    run = f"{name},{strategy},{accumulation} "
    alone = named(results[1][0], run)
    assert len(alone) > 8
    for rank in results[2]:
        there = named(rank, run)
        assert there.keys() == alone.keys()
        for key, value in alone.items():
            assert (there[key] - value).abs().max() < 1e-8, (key, rank)


class Penalty:
    """A gradient penalty, which FSDP cannot compute through a block that it gathers and frees on its own."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_optimizers(self):
        return {"critic": OptimizerConfig(params=self.model)}

    def critic_step(self, batch):
        x = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def eval_step(self, batch):
        return {"loss": self.model(batch[0]).mean()}


def penalty_on_blocks(rank, world):
    strategy = {"name": "fsdp", "blocks": "Linear"}
    data = TensorDataset(torch.ones(4, 4))
    trainer = Trainer(
        Penalty(), data, max_steps=1, batch_size=4, strategy=strategy, device="cpu", log="none", resume=None
    )
    try:
        trainer.fit()
    except BadArgument as error:
        return {"refused": torch.tensor("gradient penalty" in str(error))}
    return {"refused": torch.tensor(False)}


def test_a_backward_pass_inside_a_sharded_block_is_refused(tmp_path):
    assert all(found["refused"] for found in on_ranks(penalty_on_blocks, 2, tmp_path))
