"""Each self-supervised method against an independent implementation of its paper, and against its known traps."""

from __future__ import annotations

import copy
import logging
import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ssl_ranks
import ssl_toys as toys
import torch
from lightly.loss import DINOLoss, KoLeoLoss, NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules.heads import DINOProjectionHead
from lightly.models.modules.masked_vision_transformer_timm import MaskedVisionTransformerTIMM
from lightly.models.utils import update_momentum
from pytorch_metric_learning.losses import NTXentLoss as PMLNTXentLoss
from pytorch_metric_learning.losses import SelfSupervisedLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ranks import on_ranks
from trainformer.core import BadArgument
from trainformer.run import run_of
from trainformer.tasks import SSL
from trainformer.tasks.vision.ssl.dino import DINO
from trainformer.tasks.vision.ssl.methods import Views
from trainformer.tasks.vision.ssl.moco import KeyQueue

# -- against independent implementations -------------------------------------------------------------------
# Each twin has copies of the networks, a loss of another library and momentum updates of its own. Both sides make the
# same four steps of SGD; losses and gradients of every step, and all state at the end, must agree. In float64, because
# BatchNorm over small batches amplifies rounding: by 200 within four steps of SimCLR.

STEPS, BATCH, RATE = 4, 8, 0.1


class Twin:
    """An independent implementation. `online` are the networks that are trained, `slow` those that follow."""

    def __init__(self, task: SSL) -> None:
        self.online = nn.ModuleDict({"tower": copy.deepcopy(task.model.online)})
        if hasattr(task.model, "predictor"):
            self.online["predictor"] = copy.deepcopy(task.model.predictor)
        self.slow = copy.deepcopy(task.model.online).requires_grad_(False)

    def follow(self, base: float, end: float, step: int) -> None:
        momentum = end - (end - base) * (math.cos(math.pi * step / STEPS) + 1) / 2
        update_momentum(self.online["tower"], self.slow, momentum)

    def both(self, images: Tensor) -> Tensor:
        """Projections of both views, which go through the networks together."""
        return self.online["tower"](torch.cat(toys.two_views(images)))[1]

    def state(self) -> dict[str, Tensor]:
        return {}


class SimCLRTwin(Twin):
    def loss(self, images: Tensor, step: int) -> Tensor:
        return NTXentLoss(temperature=0.1)(*self.both(images).chunk(2))

    def after(self, step: int) -> None: ...


class MoCoTwin(Twin):
    def __init__(self, task: SSL) -> None:
        super().__init__(task)
        queue = task.model.queue.keys
        self.criterion = NTXentLoss(temperature=0.2, memory_bank_size=tuple(queue.shape))
        self.criterion.memory_bank.bank = queue.clone()

    def loss(self, images: Tensor, step: int) -> Tensor:
        query, key = toys.two_views(images)
        with torch.no_grad():
            keys = self.slow(key)[1]
        return self.criterion(self.online["tower"](query)[1], keys)

    def after(self, step: int) -> None:
        self.follow(0.999, 0.999, step)

    def state(self) -> dict[str, Tensor]:
        return {"queue.keys": self.criterion.memory_bank.bank, "queue.position": self.criterion.memory_bank.bank_ptr[0]}


class MoCoV3Twin(Twin):
    def loss(self, images: Tensor, step: int) -> Tensor:
        q1, q2 = self.online["predictor"](self.both(images)).chunk(2)
        with torch.no_grad():
            k1, k2 = self.slow(torch.cat(toys.two_views(images)))[1].chunk(2)
        one_way = SelfSupervisedLoss(PMLNTXentLoss(1.0), symmetric=False)  # 1.0: the temperature for ResNets
        return 2 * 1.0 * (one_way(q1, k2) + one_way(q2, k1))

    def after(self, step: int) -> None:
        self.follow(0.99, 1.0, step)


class BYOLTwin(Twin):
    def loss(self, images: Tensor, step: int) -> Tensor:
        p1, p2 = self.online["predictor"](self.both(images)).chunk(2)
        with torch.no_grad():
            t1, t2 = self.slow(torch.cat(toys.two_views(images)))[1].chunk(2)
        cosine = NegativeCosineSimilarity()
        return (2 + 2 * cosine(p1, t2)) + (2 + 2 * cosine(p2, t1))  # the paper adds both

    def after(self, step: int) -> None:
        self.follow(0.996, 1.0, step)


class DINOTwin(Twin):
    """With lightly's head as well. Two steps make an epoch; the warm-up takes three epochs."""

    def __init__(self, task: SSL) -> None:
        super().__init__(task)
        head = task.model.online.head
        for tower in (self.online["tower"], self.slow):
            theirs = DINOProjectionHead(12, 16, 8, 24, freeze_last_layer=1).double()
            for mine, its in zip(_linears(head.mlp), _linears(theirs.layers), strict=True):
                its.load_state_dict(mine.state_dict())
            theirs.last_layer.weight_v.data.copy_(head.last_layer.parametrizations.weight.original1.data)
            tower.head = theirs
        self.slow.requires_grad_(False)
        loss = DINOLoss(24, teacher_temp=0.07, warmup_teacher_temp=0.04, warmup_teacher_temp_epochs=3)
        self.criterion = loss.double()

    def loss(self, images: Tensor, step: int) -> Tensor:
        views = toys.crops(images)
        student = [self.online["tower"](torch.cat(part))[1] for part in (views[:2], views[2:])]
        with torch.no_grad():
            teacher = self.slow(torch.cat(views[:2]))[1]
        outputs = torch.cat(student).split(len(images))
        return self.criterion(list(teacher.chunk(2)), list(outputs), epoch=step // 2)

    def after(self, step: int) -> None:
        self.follow(0.996, 1.0, step)

    def state(self) -> dict[str, Tensor]:
        return {"center.center": self.criterion.center[0]}


def _linears(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


TWINS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "simclr": (SimCLRTwin, {}),
    "moco": (MoCoTwin, {"queue_size": 2 * BATCH}),  # four steps go round twice
    "moco_v3": (MoCoV3Twin, {}),
    "byol": (BYOLTwin, {}),
    "dino": (DINOTwin, {"warmup_teacher_temp_epochs": 3, "num_local": 3}),
}


def trained(task: SSL) -> list[nn.Parameter]:
    return [p for p in task.parameters() if p.requires_grad]


def as_vector(tensors: list[Tensor | None], like: list[nn.Parameter]) -> Tensor:
    parts = [torch.zeros_like(p) if g is None else g for g, p in zip(tensors, like, strict=True)]
    return torch.cat([part.flatten() for part in parts]).double()


@pytest.mark.parametrize("method", TWINS)
def test_losses_gradients_and_memory_are_those_of_an_independent_implementation(method: str) -> None:
    kind, options = TWINS[method]
    task = toys.make(method, augment=toys.crops if method == "dino" else toys.two_views, **options)
    task.model.double().train()
    twin = kind(task)
    images = toys.pixels(STEPS * BATCH).double().div(255).split(BATCH)
    mine, its = trained(task), [p for p in twin.online.parameters() if p.requires_grad]
    assert [p.shape for p in mine] == [p.shape for p in its]
    for step in range(STEPS):
        task.on_epoch_begin(step // 2)
        total, weight, _ = task.train_step(images[step])
        expected = twin.loss(images[step], step)
        torch.testing.assert_close(total / weight, expected, rtol=1e-6, atol=0)
        (total / weight).backward()
        expected.backward()
        if method == "dino":
            twin.online["tower"].head.cancel_last_layer_gradients(step // 2)
        got, want = as_vector([p.grad for p in mine], mine), as_vector([p.grad for p in its], its)
        # Temperatures and centers pass through float32 in places: some tens of its rounding errors.
        assert (got - want).norm() < 1e-5 * want.norm(), (step, ((got - want).norm() / want.norm()).item())
        for p in (*mine, *its):
            if p.grad is not None:
                p.data.sub_(p.grad, alpha=RATE)
                p.grad = None
        task.on_step_end(step + 1, STEPS)
        twin.after(step)
    slow = getattr(task.model, "target", None)
    if slow is not None:
        for name, value in twin.slow.backbone.state_dict().items():  # with the statistics of BatchNorm
            torch.testing.assert_close(slow.module.backbone.state_dict()[name], value, rtol=1e-6, atol=1e-7, msg=name)
    for name, value in twin.state().items():
        torch.testing.assert_close(task.model.state_dict()[name], value, rtol=1e-6, atol=1e-7)


def test_dino_head_and_koleo_are_those_of_lightly() -> None:
    task = toys.make("dino", koleo=0.1, augment=toys.crops, num_local=3)
    plain = toys.make("dino", augment=toys.crops, num_local=3)
    images = toys.pixels(6).float().div(255)
    for each in (task, plain):
        each.model.train()
    with_it, without = task.train_step(images).sum / 6, plain.train_step(images).sum / 6
    features = task.model.online.backbone(torch.cat(toys.two_views(images)))
    extra = 0.1 * sum(KoLeoLoss()(part) for part in features.chunk(2))
    torch.testing.assert_close(with_it - without, extra, rtol=1e-4, atol=1e-6)
    assert extra.abs() > 1e-3


def test_mae_is_the_error_of_hidden_patches_by_an_encoder_that_sees_the_others() -> None:
    """Encoder by lightly, patches by unfold, the mask from its definition; the decoder is tested with its module."""
    task = toys.make("mae", augment=lambda images: [images - 0.5])
    task.model.eval()
    images = toys.pixels(5).float().div(255)
    views = task.get_train_transforms()(images, keys=list(range(5)))
    total, weight, _ = task.train_step(views)
    auto = task.model.autoencoder

    rank = views.noise.argsort(1).argsort(1)
    kept = views.noise.argsort(1)[:, :4]  # a quarter of 16
    skip = {"weight_initialization": "skip", "pos_embed_initialization": "skip"}
    encoder = MaskedVisionTransformerTIMM(copy.deepcopy(auto.backbone), **skip)
    tokens = encoder.encode(images - 0.5, idx_keep=torch.cat([torch.zeros(5, 1, dtype=torch.long), kept + 1], 1))
    torch.testing.assert_close(auto.encode(images - 0.5, kept), tokens, rtol=1e-5, atol=1e-5)

    predicted = auto.decoder(tokens, rank, (4, 4))
    patches = nn.functional.unfold(images - 0.5, 4, stride=4).reshape(5, 3, 16, 16).permute(0, 3, 2, 1).flatten(2)
    target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    hidden = rank >= 4
    expected = sum(((predicted - target) ** 2).mean(-1)[i][hidden[i]].mean() for i in range(5))
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert weight == 5


# -- views -------------------------------------------------------------------------------------------------


def views_of_a_run(task: SSL, data: Any, **settings: Any) -> list[Views]:
    """The views that reach the model in a run."""
    seen: list[Views] = []
    task.model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    toys.fit(task, data, **{"epochs": 2, "batch_size": 4, **settings})
    return seen


@pytest.mark.parametrize("method", toys.METHODS)
def test_identical_images_get_different_views_in_every_epoch(method: str) -> None:
    one = toys.pixels(1).expand(4, -1, -1, -1).contiguous()
    steps = views_of_a_run(toys.make(method), one)
    assert len(steps) == 2
    large = [row for views in steps for batch in views.images if batch.shape[-1] == toys.SIZE for row in batch]
    assert all(not torch.equal(a, b) for i, a in enumerate(large) for b in large[:i])
    if method == "mae":
        noise = torch.cat([views.noise for views in steps])
        assert noise.unique(dim=0).shape == (8, 16)


def test_views_are_functions_of_seed_epoch_and_image() -> None:
    """Not of the batch an image is in."""
    data = toys.pixels(8)
    whole = views_of_a_run(toys.make("simclr"), data, batch_size=8)
    pieces = views_of_a_run(toys.make("simclr"), data, batch_size=2)
    for epoch in range(2):
        for view in range(2):
            small = torch.cat([views.images[view] for views in pieces[4 * epoch : 4 * epoch + 4]])
            torch.testing.assert_close(whole[epoch].images[view], small, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "online", "target"),
    [("simclr", 1, 0), ("moco", 1, 1), ("moco_v3", 1, 1), ("byol", 1, 1), ("dino", 2, 1)],
)
def test_views_of_equal_size_are_batched(method: str, online: int, target: int) -> None:
    task = toys.make(method, **({"num_local": 5} if method == "dino" else {}))
    calls: list[bool] = []
    for part in task.model.modules():
        if isinstance(part, toys.Net):
            part.register_forward_hook(lambda module, *_: calls.append(next(module.parameters()).requires_grad))
    task.train_step(toys.pixels(4))
    assert (calls.count(True), calls.count(False)) == (online, target)


# -- networks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "backbone"),
    [
        (method, name)
        for method in toys.METHODS
        for name in ("resnet10t", "test_vit")
        if (method, name[0]) != ("mae", "r")
    ],
)
def test_every_part_of_the_backbone_gets_a_gradient(method: str, backbone: str) -> None:
    task = toys.make(method, backbone, **({"image_size": 32} if backbone == "resnet10t" else {}))
    for part in task.model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)  # timm begins with branches switched off
    task.on_epoch_begin(1)  # past the freeze of DINO's last layer
    total, _, _ = task.train_step(toys.pixels(4, 32 if backbone == "resnet10t" else toys.SIZE))
    total.backward()
    wanted = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    frozen = [name for name, p in task.model.backbone.named_parameters() if not p.requires_grad]
    may_rest = {"moco_v3": ["patch_embed.proj.weight", "patch_embed.proj.bias"], "mae": ["pos_embed"]}
    assert frozen == (may_rest.get(method, []) if backbone == "test_vit" else [])
    assert [name for name, p in wanted.items() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("method", toys.MOMENTUM)
def test_momentum_networks_are_never_optimized(method: str) -> None:
    task = toys.make(method)
    run = toys.fit(task, toys.pixels(8), max_steps=2, batch_size=4)
    optimized = {id(p) for group in run.active_optimizer.param_groups for p in group["params"]}
    followers = slow_network(task).parameters()
    own = [p for p in task.model.parameters() if p.requires_grad]
    assert optimized == {id(p) for p in own}
    assert all(not p.requires_grad and p.grad is None and id(p) not in optimized for p in followers)


def slow_network(task: SSL) -> nn.Module:
    return task.model.target.module


@pytest.mark.parametrize("method", toys.MOMENTUM)
def test_the_momentum_network_moves_once_per_optimizer_step_under_accumulation(method: str) -> None:
    task = toys.make(method, momentum=0.9, momentum_end=0.95)

    def look(trainer: Any) -> tuple[list[Tensor], list[Tensor]]:
        return [p.detach().clone() for p in task.model.online.parameters()], [
            p.clone() for p in slow_network(task).parameters()
        ]

    before = [p.clone() for p in slow_network(task).parameters()]
    watch = toys.Watch(look)
    toys.fit(task, toys.pixels(24), max_steps=4, batch_size=2, accumulation_steps=3, lr=0.05, callbacks=[watch])
    assert len(watch.seen) == 4
    slow = before
    for step, (online, found) in enumerate(watch.seen):
        momentum = 0.95 - 0.05 * (math.cos(math.pi * step / 4) + 1) / 2
        slow = [momentum * old + (1 - momentum) * new for old, new in zip(slow, online, strict=True)]
        for want, got in zip(slow, found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert max((a - b).abs().max().item() for a, b in zip(before, slow, strict=True)) > 1e-3


def test_batchnorm_of_the_slow_network_trains_on_its_own_batches() -> None:
    task = toys.make("byol")
    modes = toys.Watch(lambda _: [part.training for part in slow_network(task).modules()])
    toys.fit(task, toys.pixels(16), val_data=toys.pixels(8), epochs=2, batch_size=4, lr=0.05, callbacks=[modes])
    assert all(all(seen) for seen in modes.seen)  # also in the second epoch, after an evaluation
    mine, its = (tower.backbone.second[1] for tower in (task.model.online, slow_network(task)))
    assert its.num_batches_tracked == mine.num_batches_tracked == 8
    assert not torch.allclose(mine.running_mean, its.running_mean, rtol=1e-3)
    assert its.running_mean.abs().max() > 0.01


def test_the_teacher_drops_no_paths_and_the_student_does() -> None:
    task = toys.make("dino", "test_vit", drop_path_rate=0.9, num_local=0)
    task.model.train()
    images = torch.randn(8, 3, toys.SIZE, toys.SIZE)
    teacher, student = slow_network(task), task.model.online
    assert torch.equal(teacher(images)[0], teacher(images)[0])
    assert not torch.equal(student(images)[0], student(images)[0])
    assert SSL.dino("test_vit").drop_path_rate == 0.1  # the paper's for ViTs
    assert SSL.dino("resnet10t").drop_path_rate is None


def test_mae_predictions_of_hidden_patches_depend_on_visible_pixels_alone() -> None:
    task = toys.make("mae")
    task.model.eval()
    images, noise = torch.randn(1, 3, 16, 16), torch.linspace(0, 1, 16).view(1, -1)  # the first four patches are seen
    predict = lambda batch: task.model.autoencoder(batch, noise).prediction[:, 4:]  # noqa: E731
    seen, unseen = images.clone(), images.clone()
    seen[..., :4, :4] += 1
    unseen[..., 4:, :] += 1
    assert torch.equal(predict(images), predict(unseen))
    changed = (predict(images) - predict(seen)).abs().amax(-1)
    assert (changed > 1e-6).all()


# -- one step, however it is sliced ------------------------------------------------------------------------


def alone(method: str) -> SSL:
    """A task in which images do not see each other."""
    return toys.make(method, "test_vit" if method == "mae" else toys.groups)


def final_state(task: SSL, pieces: int = 1, **settings: Any) -> dict[str, Tensor]:
    sgd = {"lr": 0.05, "optimizer": {"name": "sgd", "momentum": 0.0}, "scheduler": None}
    run = toys.trainer(task, toys.pixels(24), max_steps=4, **sgd, **settings)
    run_of(run).backend.splitter.pieces = pieces
    run.fit()
    return toys.copied(task.model)


@pytest.mark.parametrize("method", ["moco", "dino", "mae"])
@pytest.mark.parametrize(
    "sliced", [{"batch_size": 4, "accumulation_steps": 3}, {"batch_size": 12, "pieces": 3}], ids=["micro", "split"]
)
def test_one_batch_equals_micro_batches_and_pieces(method: str, sliced: dict[str, int]) -> None:
    whole, parts = final_state(alone(method), batch_size=12), final_state(alone(method), **sliced)
    begun = toys.copied(alone(method).model)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=2e-6, msg=name)
    memory = [name for name in whole if name.startswith(("queue", "center"))]
    assert memory or method == "mae"
    assert all(not torch.equal(whole[name], begun[name]) for name in memory if not name.endswith("position"))
    if method == "moco":
        assert int(whole["queue.position"]) == 4 * 12 % 32


# -- steps that are given up -------------------------------------------------------------------------------


def loader_with_a_bad_image() -> DataLoader:
    images = toys.pixels(16).float().div(255)
    images[5] = torch.nan
    return DataLoader(TensorDataset(images, toys.labels(16)), batch_size=4)


@pytest.mark.parametrize(("method", "batch_norm"), [("moco", True), ("moco", False), ("dino", True)])
def test_a_skipped_step_leaves_queue_centre_and_weights_finite(
    method: str, batch_norm: bool, caplog: pytest.LogCaptureFixture
) -> None:
    task = toys.make(method, partial(toys.Net, batch_norm), augment=toys.crops if method == "dino" else toys.two_views)
    with caplog.at_level(logging.WARNING, "trainformer"):
        toys.fit(task, loader_with_a_bad_image(), epochs=1, nonfinite="skip", lr=0.05)
    assert "1 steps with a non-finite loss" in caplog.text
    state = task.model.state_dict()
    running = [name for name in state if "running_" in name]  # BatchNorm itself has seen the image
    assert [name for name, value in state.items() if not value.isfinite().all() and name not in running] == []
    if method == "moco":
        assert torch.allclose(task.model.queue.keys.norm(dim=1), torch.ones(32), atol=1e-5)
    else:
        assert task.model.center.center.abs().max() > 1e-4  # the other steps count


class Flaky(toys.Net):
    """Gives NaN once, at the forward pass with this number (from 1; 0: never)."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.fails_at, self.calls = 0, 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images) * (torch.nan if self.calls == self.fails_at else 1.0)


@pytest.mark.parametrize("method", ["moco", "dino"])
def test_a_repeated_step_counts_once(method: str) -> None:
    ends = []
    for fails_at in (0, 3):
        task = toys.make(method, Flaky, **({"num_local": 0} if method == "dino" else {}))
        task.model.online.backbone.fails_at = fails_at
        toys.fit(task, toys.pixels(12), max_steps=3, batch_size=4, accumulation_steps=1, nonfinite="retry", lr=0.05)
        ends.append(toys.copied(task.model))
    assert task.model.online.backbone.calls == 4
    assert toys.apart(*ends) == []


# -- MoCo's queue ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"batch_size": 8}, {"batch_size": 4, "accumulation_steps": 2}])
def test_a_queue_smaller_than_a_step_is_refused(settings: dict[str, int]) -> None:
    task = toys.make("moco", queue_size=6)
    with pytest.raises(BadArgument, match=r"queue_size to hold at least .* queue of 6 for 8 keys.*larger queue"):
        toys.fit(task, toys.pixels(16), max_steps=2, **settings)


def test_the_queue_is_a_ring() -> None:
    queue = KeyQueue(5, 2)
    start = queue.keys.clone()
    queue.add(torch.full((3, 2), 1.0))
    assert torch.equal(queue.keys, start)  # not before the end of the step
    queue.commit()
    queue.add(torch.full((2, 2), 2.0))
    queue.add(torch.full((1, 2), 3.0))
    queue.commit()
    assert queue.keys[:, 0].tolist() == [3.0, 1.0, 1.0, 2.0, 2.0]
    assert int(queue.position) == 1
    queue.add(torch.full((2, 2), 9.0))
    queue.discard()
    queue.commit()
    assert queue.keys[:, 0].tolist() == [3.0, 1.0, 1.0, 2.0, 2.0]


def test_the_loss_may_be_differentiated_after_the_queue_has_moved() -> None:
    gradients = []
    for early in (False, True):
        task = toys.make("moco", toys.groups, augment=toys.two_views)
        total = task.train_step(toys.pixels(4).float().div(255)).sum
        if early:
            task.model.queue.commit()
        total.backward()
        gradients.append(task.model.online.backbone.first[0].weight.grad)
    assert torch.equal(*gradients)


# -- the last batch, and precision -------------------------------------------------------------------------


@pytest.mark.parametrize("method", toys.METHODS)
def test_a_last_batch_of_one_does_no_harm(method: str) -> None:
    task = toys.make(method)
    run = toys.fit(task, toys.pixels(9), val_data=toys.pixels(5), epochs=2, batch_size=4, log_every=1, lr=1e-3)
    assert run.state.step == 6
    assert all(math.isfinite(value) for record in run.state.log_history for value in record.values())
    assert all(value.isfinite().all() for value in task.model.state_dict().values())
    assert all(part.training for part in task.model.modules())


@pytest.mark.parametrize("method", ["simclr", *toys.MOMENTUM])
def test_batchnorm_takes_no_statistics_of_a_single_image(method: str) -> None:
    """Images of 4 pixels, of which one is left before the last BatchNorm: MoCo's query alone would raise an error."""
    task = toys.make(method, augment=toys.two_views)
    task.model.train()
    images = toys.pixels(5, 4).float().div(255)
    task.train_step(images[:4])
    before = toys.copied(task.model)
    total, weight, _ = task.train_step(images[4:])
    total.backward()
    assert total.isfinite()
    assert weight == 1
    assert any("running_mean" in name for name in before)
    assert toys.apart(before, toys.copied(task.model)) == []
    assert all(part.training for part in task.model.modules())


@pytest.mark.parametrize("method", toys.METHODS)
def test_bf16_applies_to_the_networks_and_gradients_are_finite(method: str) -> None:
    task = toys.make(method, "test_vit" if method == "mae" else None)
    kinds: set[torch.dtype] = set()
    for part in task.model.modules():
        if isinstance(part, nn.Conv2d | nn.Linear):
            part.register_forward_hook(lambda module, args, output: kinds.add(output.dtype))
    norms = toys.Watch(lambda trainer: trainer.grad_norm)
    run = toys.fit(task, toys.pixels(8), max_steps=3, batch_size=4, precision="bf16", callbacks=[norms], log_every=1)
    assert kinds == {torch.bfloat16}
    assert all(norm.isfinite() and norm > 0 for norm in norms.seen)
    full = toys.fit(toys.make(method), toys.pixels(8), max_steps=3, batch_size=4, log_every=1)
    first, exact = (r.state.log_history[0]["train/loss"] for r in (run, full))
    assert first == pytest.approx(exact, rel=0.1)


# -- DINO's schedules --------------------------------------------------------------------------------------


def test_dino_schedules() -> None:
    """Temperature and last layer by epochs, weight decay by steps, the last all the way to its end."""
    task = toys.make("dino", warmup_teacher_temp_epochs=3)
    last = task.model.head.last_layer.parametrizations.weight

    def look(trainer: Any) -> tuple[float, Tensor, list[float]]:
        decays = [group["weight_decay"] for group in trainer.active_optimizer.param_groups]
        return float(task.model.teacher_temp), last.original1.detach().clone(), decays

    begun = last.original1.detach().clone()
    watch = toys.Watch(look)
    run = toys.fit(task, toys.pixels(8), epochs=5, batch_size=4, warmup_ratio=0.0, callbacks=[watch])
    temperatures, layers, decays = zip(*watch.seen, strict=True)
    reference = np.concatenate([np.linspace(0.04, 0.07, 3), [0.07] * 2])  # as in the authors' code
    np.testing.assert_allclose(temperatures[::2], reference, rtol=1e-6)
    assert temperatures[::2] == temperatures[1::2]
    assert torch.equal(layers[0], begun)
    assert torch.equal(layers[1], begun)
    assert all(not torch.equal(a, b) for a, b in pairwise(layers[1:]))
    assert torch.equal(last.original0, torch.ones(24, 1))  # norm_last_layer
    assert sorted(decays[0]) == pytest.approx([0.0, 0.04])
    assert sorted(decays[-1]) == pytest.approx([0.0, 0.4])
    cosine = [0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * i / 9)) for i in range(10)]
    assert [max(decay) for decay in decays] == pytest.approx(cosine)
    assert run.gradient_clip == 3.0


def test_dino_cuts_small_crops_for_a_vit() -> None:
    task = toys.make("dino", "test_vit", num_local=3, local_size=None)
    views = task.get_train_transforms()(toys.pixels(2), keys=[1, 2])
    # 3/7 of 16 pixels in whole patches of 4
    assert [tuple(view.shape) for view in views.images] == [(2, 3, 16, 16)] * 2 + [(2, 3, 8, 8)] * 3
    task.train_step(toys.pixels(2)).sum.backward()
    large = SSL.dino("vit_tiny_patch16_224", out_dim=8, hidden_dim=8, bottleneck_dim=4, model_kwargs={"depth": 1})
    assert [view.size for view in large.get_train_transforms().augment.views] == [(224, 224)] * 2 + [(96, 96)] * 8


def test_the_dino_encoder_is_the_teacher() -> None:
    task = toys.make("dino")
    with torch.no_grad():
        task.model.online.backbone.first[0].weight.add_(1.0)
    assert isinstance(task.model, DINO)
    assert task.model.encoder is slow_network(task).backbone
    images = toys.pixels(3)
    before = task.embed(images)
    task.model.target.update(task.model.online, 0.0)
    assert not torch.allclose(before, task.embed(images))


# -- torch.compile -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", toys.METHODS)
def test_a_compiled_step_is_the_same(method: str) -> None:
    """The whole step traced, differentiated and run without the code generator, which takes seconds per method."""
    results = []
    for compiled in (False, True):
        task = toys.make(method)
        task.model.train()
        if compiled:
            task.model.compile(backend="aot_eager")
        views = task.get_train_transforms()(toys.pixels(4), keys=[1, 2, 3, 4])
        total = task.train_step(views).sum
        total.backward()
        task.on_step_end(1, 10)
        results.append((total.detach(), [p.grad for p in trained(task)], toys.copied(task.model)))
    (loss, gradients, state), (same_loss, same_gradients, same_state) = results
    torch.testing.assert_close(same_loss, loss, rtol=1e-5, atol=0)
    for a, b in zip(gradients, same_gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(same_state[name], value, rtol=1e-4, atol=1e-6, msg=name)


# -- two processes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What both ranks have after three steps with their shares of each batch."""
    return on_ranks(ssl_ranks.results, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one() -> dict[str, Tensor]:
    """What one process has after the same steps with the whole batches."""
    return ssl_ranks.results(0, 1)


@pytest.mark.slow
def test_shuffling_deals_out_all_rows_and_unshuffling_brings_them_back(together: list[dict[str, Tensor]]) -> None:
    dealt = torch.cat([found["dealt"] for found in together])
    assert dealt.sort().values.tolist() == list(range(12))
    assert any(sorted(found["dealt"].tolist()) != found["rows"].tolist() for found in together)  # some changed place
    for found in together:
        assert torch.equal(found["back"], found["rows"])
    assert torch.equal(together[0]["permutation"], together[1]["permutation"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simclr", "moco", "moco_v3", "byol", "dino"])
def test_two_ranks_have_the_state_of_one_process(
    together: list[dict[str, Tensor]], one: dict[str, Tensor], method: str
) -> None:
    """Losses, weights, statistics, queue and centre; keys lie in the order in which one process has them."""
    names = [name for name in one if name.startswith(f"{method}.")]
    assert f"{method}.loss" in names
    assert any(name.endswith("running_var") for name in names)
    # The head of DINO and its centre are computed in float32.
    close = {"rtol": 1e-4, "atol": 2e-6} if method == "dino" else {"rtol": 1e-8, "atol": 1e-9}
    for name in names:
        assert torch.equal(together[0][name], together[1][name]), name
        torch.testing.assert_close(together[0][name], one[name], msg=name, **close)
