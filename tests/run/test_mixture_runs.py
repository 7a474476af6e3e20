"""Training on mixtures: the loss of each source in the log, resuming, what is recorded, and what is refused."""

import json
import logging
import random
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only
from torch.utils.data import IterableDataset, TensorDataset

from text_toys import chat_tokenizer, llama
from toys import MeanTask, classes, mlp, same, weights
from trainformer import Loss, Mixture, Trainer
from trainformer.backends.torch import accumulation
from trainformer.core.errors import BadArgument, DataError
from trainformer.run import run_of
from trainformer.tasks import CausalLM, ImageClassification

QUIET = {"log": "none", "device": "cpu", "precision": "no", "num_workers": 0, "save_best": 0}


class SampleTask(MeanTask):
    """Returns the losses of its samples, weighted by their label. Remembers which it has seen."""

    def __init__(self):
        super().__init__(mlp())
        self.seen = []

    def train_step(self, batch):
        x, y, number = batch
        losses = F.cross_entropy(self.model(x), y, reduction="none") * (y + 1)
        self.seen += zip(number.tolist(), losses.tolist(), (y + 1).tolist(), strict=True)
        return Loss(losses.sum(), (y + 1).sum(), per_sample=(losses, y + 1))

    def eval_step(self, batch):
        return super().eval_step(batch[:2])


def source(number, size):
    """Samples that say which source they belong to."""
    return TensorDataset(*classes(size, seed=number), torch.full((size,), number))


class Stream(IterableDataset):
    """The same as a stream without a state."""

    def __init__(self, number, size):
        self.data = source(number, size)

    def __iter__(self):
        return iter([self.data[index] for index in range(len(self.data))])


def mixture(kind=source, **options):
    given = {"weights": {"few": 0.3, "many": 0.5, "other": 0.2}, "epoch": 50, **options}
    return Mixture({"few": source(0, 7), "many": kind(1, 40), "other": source(2, 13)}, **given)


def trainer_of(data, task=None, **options):
    defaults = {"batch_size": 4, "accumulation_steps": 3, "epochs": 2, "lr": 0.05, "log_every": 2, "resume": None}
    return Trainer(task or SampleTask(), data, **{**QUIET, **defaults, **options})


def train_records(trainer):
    timed = ("second", "memory")
    records = [r for r in trainer.state.log_history if "train/loss" in r]
    return [{name: v for name, v in r.items() if not any(word in name for word in timed)} for r in records]


def test_the_log_has_the_loss_share_and_passes_of_each_source_as_a_hand_written_loop_finds_them(tmp_path):
    trainer = trainer_of(mixture(), run_dir=tmp_path / "run").fit()
    seen, names, sizes = trainer.task.seen, ("few", "many", "other"), (7, 40, 13)
    assert len(seen) == 100
    ends = np.cumsum([12, 12, 12, 12, 2] * 2)  # samples after each optimizer step
    records = train_records(trainer)
    assert [r["step"] for r in records] == [1, 2, 4, 6, 8, 10]
    for before, record in zip([None, *records], records, strict=False):
        begin = 0 if before is None else int(ends[before["step"] - 1])
        end = int(ends[record["step"] - 1])
        for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
            mine = [(loss, weight) for source, loss, weight in seen[begin:end] if source == number]
            assert record[f"train/share/{name}"] == pytest.approx(len(mine) / (end - begin))
            assert record[f"train/passes/{name}"] == pytest.approx(sum(s == number for s, *_ in seen[:end]) / size)
            wanted = sum(loss for loss, _ in mine) / sum(weight for _, weight in mine) if mine else None
            assert record.get(f"train/loss/{name}") == (None if wanted is None else pytest.approx(wanted))
    weighted = [sum(part) for part in zip(*((loss, weight) for _, loss, weight in seen[: ends[0]]), strict=True)]
    assert records[0]["train/loss"] == pytest.approx(weighted[0] / weighted[1])


@pytest.mark.parametrize("kind", [source, Stream], ids=["datasets", "streams"])
def test_resuming_at_any_step_gives_the_same_weights_and_records(tmp_path, kind):
    changing = [(0, {"few": 1, "many": 0, "other": 1}), (7, {"few": 0, "many": 1, "other": 1})]
    make = partial(mixture, kind, weights=changing)
    whole = trainer_of(make(), run_dir=tmp_path / "whole").fit()
    assert whole.state.step == 10
    for step in random.Random(3).sample(range(1, 10), 3):
        folder = tmp_path / f"{step}"
        cut = trainer_of(make(), run_dir=folder, max_steps=step, scheduler="constant", warmup_ratio=0).fit()
        resumed = trainer_of(make(), run_dir=folder, resume=str(folder), scheduler="constant", warmup_ratio=0).fit()
        plain = trainer_of(make(), run_dir=tmp_path / f"plain{step}", scheduler="constant", warmup_ratio=0).fit()
        assert cut.task.seen + resumed.task.seen == plain.task.seen
        assert same(weights(resumed.task), weights(plain.task))
        assert train_records(resumed)[-1] == train_records(plain)[-1]
    shares = [record["train/weight/many"] for record in train_records(whole)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert shares[-1] == 0.5


def test_stopping_and_fitting_again_in_one_process_continues_a_stream(tmp_path):
    class Stop:
        def on_step_end(self, trainer, step, loss):
            if step == 3:
                trainer.stop("enough")

    plain = trainer_of(mixture(Stream), run_dir=tmp_path / "plain").fit()
    trainer = trainer_of(mixture(Stream), run_dir=tmp_path / "run", callbacks=[stop := Stop()])
    trainer.check()
    with run_of(trainer).sandbox() as probe:  # into the third epoch
        assert sum(1 for _ in islice(probe.batches(), 30)) == 30
    trainer.task.seen = []
    trainer.fit()
    run_of(trainer).remove_callback(stop)
    trainer.fit()
    assert [number for number, *_ in trainer.task.seen] == [number for number, *_ in plain.task.seen]
    assert same(weights(trainer.task), weights(plain.task))


def test_a_mean_loss_is_attributed_only_where_a_batch_has_one_source(tmp_path, caplog):
    class Plain(MeanTask):
        def train_step(self, batch):
            return super().train_step(batch[:2])

    accumulation._warn_about_sources.cache_clear()
    with caplog.at_level(logging.WARNING, "trainformer"):
        mixed = trainer_of(mixture(), Plain(), run_dir=tmp_path / "mixed").fit()
    assert sum("are not logged" in record.getMessage() for record in caplog.records) == 1
    assert "per_sample=losses" in caplog.text
    assert "mix='batch'" in caplog.text
    assert "train/share/few" in train_records(mixed)[-1]
    apart = trainer_of(mixture(mix="batch"), Plain(), run_dir=tmp_path / "apart", log_every=1).fit()
    assert {len([name for name in record if "loss/" in name]) for record in train_records(apart)} == {1}
    for record in train_records(apart):
        (name,) = [name for name in record if "loss/" in name]
        assert record[name] == pytest.approx(record["train/loss"])
        assert record[f"train/share/{name.removeprefix('train/loss/')}"] == 1.0


@pytest.mark.parametrize("kind", [source, Stream], ids=["datasets", "streams"])
def test_unreadable_samples_are_skipped(tmp_path, kind, caplog):
    class Broken(TensorDataset):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("damaged")
            return super().__getitem__(index)

    data = Mixture({"broken": Broken(*source(0, 7).tensors), "many": kind(1, 40)}, "equal", epoch=48)
    trainer = trainer_of(data, run_dir=tmp_path / "run", bad_samples="skip").fit()
    assert "sample 3" in caplog.text
    assert "of the source 'broken' cannot be read and is skipped: OSError: damaged" in caplog.text or kind is Stream
    numbers = [number for number, *_ in trainer.task.seen]
    assert len(numbers) + trainer.state.bad_samples == 96
    assert numbers.count(0) in (48 - trainer.state.bad_samples, 48)
    with pytest.raises(OSError, match="damaged"):
        trainer_of(data, run_dir=tmp_path / "raises").fit()


def test_losses_per_sample_survive_what_ddp_does_to_outputs():
    loss = Loss(torch.tensor(3.0), 2, {"accuracy": (1, 2)}, per_sample=torch.tensor([1.0, 2.0]))
    doubled = tree_map_only(torch.Tensor, lambda tensor: 2 * tensor, loss)
    assert (type(doubled), doubled.sum.item(), doubled.weight) == (Loss, 6.0, 2)
    assert doubled.per_sample.tolist() == [2.0, 4.0]


def test_wrong_losses_per_sample_are_refused(tmp_path):
    class Wrong(SampleTask):
        def train_step(self, batch):
            loss = super().train_step(batch)
            return Loss(loss.sum, loss.weight, per_sample=loss.per_sample[0].mean())

    with pytest.raises(BadArgument, match=r"a tensor of 4 losses, or a pair with their weights, received \(\)"):
        trainer_of(mixture(), Wrong(), run_dir=tmp_path).fit()


# -- built-in tasks --------------------------------------------------------------------------------------------


def documents(row):
    """The tokens and labels of each document in a row."""
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist() if "position_ids" in row else [0]
    for begin, end in pairwise([*starts, len(row["input_ids"])]):
        yield row["input_ids"][begin:end], row["labels"][begin:end]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_language_models_log_the_loss_per_token_of_each_source(tmp_path, packing):
    texts = {"web": ["the cat sat on the mat " * count for count in range(1, 9)], "code": ["x = x + 1"] * 20}
    tokenizer = chat_tokenizer()
    options = {"tokenizer": tokenizer, "packing": packing, "cache_dir": tmp_path / "tokens"}
    task = CausalLM(llama(vocab_size=len(tokenizer)), max_length=32, **options)
    frozen = {"optimizer": "sgd", "lr": 0.0, "weight_decay": 0.0, "accumulation_steps": 1, "epochs": 1}
    data = Mixture(texts, {"web": 1, "code": 2})
    trainer = trainer_of(data, task, run_dir=tmp_path / "run", log_every=1000, **frozen).fit()
    sums = {name: [0.0, 0] for name in texts}
    for batch in list(run_of(trainer).train_source.batches(0))[1:]:  # the first step has a record of its own
        for row, number in enumerate(batch.sources.numbers):
            for ids, labels in documents({name: value[row] for name, value in batch.data.items()}):
                logits = task.model(ids[None]).logits[0, :-1]
                loss = F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
                sums[batch.sources.names[number]][0] += loss.item()
                sums[batch.sources.names[number]][1] += int((labels[1:] != -100).sum())
    record = train_records(trainer)[-1]
    for name, (total, count) in sums.items():
        assert record[f"train/loss/{name}"] == pytest.approx(total / count, rel=1e-5)


def images(folder, size, side):
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(size):
            pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return str(folder)


def test_images_in_folders_and_in_memory_are_mixed_at_one_size(tmp_path):
    pixels = torch.randint(0, 256, (12, 3, 40, 40), dtype=torch.uint8)
    memory = TensorDataset(pixels, torch.arange(12) % 2)
    data = Mixture({"folder": images(tmp_path / "images", 4, 24), "tensors": memory}, "equal", epoch=24)
    task = ImageClassification("resnet10t", pretrained=False, image_size=32)
    trainer = trainer_of(data, task, run_dir=tmp_path / "run", epochs=1, accumulation_steps=1)
    assert not task._augments_on_device  # not for the images of one source alone
    for batch in run_of(trainer).train_source.batches(0):
        assert (batch.data[0].shape[1:], batch.data[0].dtype) == ((3, 32, 32), torch.uint8)
    for record in train_records(trainer.fit()):
        parts = [(record.get(f"train/loss/{name}", 0), record[f"train/share/{name}"]) for name in ("folder", "tensors")]
        assert sum(loss * share for loss, share in parts) == pytest.approx(record["train/loss"], rel=1e-5)
    tensors = Mixture({"a": memory, "b": TensorDataset(pixels[:4], torch.arange(4) % 2)}, "equal")
    task = ImageClassification("resnet10t", pretrained=False, image_size=32)
    trainer_of(tensors, task, run_dir=tmp_path / "tensors")
    assert task._augments_on_device


# -- records and mistakes --------------------------------------------------------------------------------------


def test_the_mixture_is_recorded_and_other_weights_are_another_run(tmp_path):
    trainer_of(mixture(), run_dir=tmp_path / "run", max_steps=3).fit()
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())["mixture"]["value"]
    assert (recorded["weights"], recorded["epoch"]) == ({"few": 0.3, "many": 0.5, "other": 0.2}, 50)
    other = trainer_of(
        mixture(weights={"few": 0.9, "many": 0.5, "other": 0.2}), run_dir=tmp_path / "run", resume="auto"
    )
    with pytest.raises(BadArgument, match=r"mixture .*'few': 0.3.* -> .*'few': 0.9"):
        other.fit()


def test_check_reports_sources_that_repeat_often_or_never_come(tmp_path):
    data = Mixture({"one": source(0, 1), "many": source(1, 40), "off": source(2, 9)}, {"one": 1, "many": 1, "off": 0})
    report = trainer_of(data, run_dir=tmp_path, epochs=8).check()
    (finding,) = [finding for finding in report.findings if finding.question == "arguments"]
    assert "repeats 'one' 320 times" in finding.message
    assert "nothing from 'off'" in finding.message


def test_other_uses_of_a_mixture_are_refused(tmp_path):
    make = partial(trainer_of, run_dir=tmp_path)
    with pytest.raises(BadArgument, match=r"a dict with 'a', 'b'\". To train on several of them, pass Mixture"):
        make({"a": source(0, 9), "b": source(1, 9)})
    with pytest.raises(BadArgument, match="Expected no sampler, received 'balanced'"):
        make(mixture(), sampler="balanced")
    with pytest.raises(BadArgument, match="data to evaluate, received 'a Mixture'"):
        make(source(0, 9), val_data=mixture())
    with pytest.raises(BadArgument, match=r"val_data with a mixture, received 'val_split=0.2'"):
        make(mixture(), val_split=0.2)
    with pytest.raises(BadArgument, match=r"'a' of the mixture: .* cannot load data by path"):
        make(Mixture({"a": "somewhere", "b": source(0, 9)}))
    task = ImageClassification("resnet10t", pretrained=False, image_size=32)
    with pytest.raises(DataError, match="'folder' of the mixture"):
        make(Mixture({"folder": str(tmp_path / "missing"), "digits": "digits"}), task)


def test_a_mixture_can_be_a_dict_with_sources_as_in_a_config(tmp_path):
    given = {"sources": {"a": source(0, 8), "b": source(1, 8)}, "weights": {"a": 3, "b": 1}, "epoch": 40}
    trainer = trainer_of(given, run_dir=tmp_path).fit()
    assert sum(number == 0 for number, *_ in trainer.task.seen) == 60
    assert all(a["train/passes/a"] < b["train/passes/a"] for a, b in pairwise(train_records(trainer)))
