"""NEFTune: what the noise is, what it depends on, and that only training has any."""

import copy
import math

import pytest
import torch

from text_toys import batches_of, causal_maker, chat_tokenizer, check_resuming, llama, sentences, trainer_for
from trainformer.adapters import LoRA
from trainformer.core.errors import BadArgument
from trainformer.data.text.collate import pad
from trainformer.models.neftune import EmbeddingNoise, document_lengths

TEXTS = [" ".join(sentences()[i : i + 1 + i % 3]) for i in range(12)]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    return causal_maker(tokenizer, tmp_path)


def noise_of(ids, lengths, *, step=0, seed=0, alpha=5.0, width=64):
    """The noise that rows of tokens get."""
    hook = EmbeddingNoise(alpha, seed)
    hook.step = step
    with hook.rows(ids, lengths):
        return hook(torch.nn.Embedding(1, 1), (), torch.zeros(*ids.shape, width, dtype=torch.float64))


def test_the_noise_is_uniform_with_the_bound_of_the_paper():
    ids = torch.randint(0, 1000, (4, 128), generator=torch.Generator().manual_seed(0))
    lengths = torch.full((4, 128), 128)
    noise = noise_of(ids, lengths)
    bound = 5.0 / math.sqrt(128 * 64)
    assert noise.abs().max() <= bound
    scaled = (noise / bound).flatten()
    count = len(scaled)
    assert abs(scaled.mean()) < 5 / math.sqrt(3 * count)
    assert scaled.var().item() == pytest.approx(1 / 3, rel=0.02)
    cells = torch.histc(scaled.float(), 16, -1, 1)
    assert (((cells - count / 16) ** 2) / (count / 16)).sum() < 60  # chi squared with 15 degrees of freedom: p < 1e-6
    flat = scaled.view(4, 128, 64)
    for first, second in ((flat[:, 1:], flat[:, :-1]), (flat[..., 1:], flat[..., :-1]), (flat[1:], flat[:-1])):
        assert abs((first * second).mean() * 3) < 5 / math.sqrt(first.numel())


def test_it_depends_on_seed_step_and_tokens_but_neither_on_padding_nor_on_other_rows():
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11, 12]}]
    together = pad(rows, 0, multiple_of=16)
    alone = pad(rows[:1], 0, multiple_of=1)
    first = noise_of(together["input_ids"], document_lengths(together))
    second = noise_of(alone["input_ids"], document_lengths(alone))
    assert torch.equal(first[0, :3], second[0])
    assert not first[0, 3:].any()
    assert first[0, 0].abs().max() <= 5.0 / math.sqrt(3 * 64)  # its own length, not that of the batch
    for options in ({"step": 1}, {"seed": 1}):
        assert (noise_of(alone["input_ids"], document_lengths(alone), **options) != second).float().mean() > 0.99
    other = alone["input_ids"].flip(1)
    assert not torch.equal(noise_of(other, document_lengths(alone)), second)


def test_documents_of_a_packed_row_have_their_own_lengths(task):
    trainer = trainer_for(task(packing=True, neftune_noise_alpha=5.0), TEXTS, batch_size=64)
    (batch,) = batches_of(trainer)
    lengths = document_lengths(batch)
    assert (lengths == 0).any()
    documents = (batch["position_ids"] == 0).cumsum(-1)
    for row, sizes, labels in zip(documents, lengths, batch["labels"], strict=True):
        for document in row.unique():
            inside = row == document
            real = bool((labels[inside] != -100).any())
            assert (sizes[inside] == (int(inside.sum()) if real else 0)).all()
    assert torch.isfinite(trainer.task.train_step(batch).sum)


def test_only_training_has_noise_and_nothing_of_it_is_saved(task, tmp_path):
    plain = task()
    torch.manual_seed(0)
    noisy = task(copy.deepcopy(plain.model), neftune_noise_alpha=5.0)
    run = trainer_for(noisy, TEXTS, val_data=TEXTS[:5], batch_size=len(TEXTS), run_dir=tmp_path / "run")
    same = trainer_for(plain, TEXTS, val_data=TEXTS[:5], batch_size=len(TEXTS))
    (batch,) = batches_of(run)
    assert run.evaluate() == same.evaluate()
    assert noisy.generate("red", max_new_tokens=4) == plain.generate("red", max_new_tokens=4)
    noisy.model.train()
    plain.model.train()
    assert noisy.train_step(batch).sum != plain.train_step(batch).sum
    assert noisy.train_step(batch).sum == noisy.train_step(batch).sum  # the same step, the same noise
    noisy.model.eval()
    assert noisy.train_step(batch).sum == plain.train_step(batch).sum
    assert noisy.model.state_dict().keys() == plain.model.state_dict().keys()
    # By hand: the embeddings of the batch plus the noise.
    noisy.model.train()
    wanted = noisy.model.get_input_embeddings().weight[batch["input_ids"]]
    hook = EmbeddingNoise(5.0, seed=run.seed)
    with hook.rows(batch["input_ids"], document_lengths(batch)):
        wanted = hook(noisy.model, (), wanted)
    with torch.no_grad():
        logits = plain.model.train()(inputs_embeds=wanted, attention_mask=batch["attention_mask"]).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        torch.testing.assert_close(noisy.train_step(batch).sum, losses, rtol=1e-5, atol=1e-5)


def test_a_run_with_an_adapter_resumes_bitwise_and_zero_is_none(task, tmp_path):
    def run(name, alpha=5.0, **options):
        torch.manual_seed(0)
        own = task(llama(), adapter=LoRA(r=2, dropout=0, target_modules=["q_proj"]), neftune_noise_alpha=alpha)
        return trainer_for(own, TEXTS, run_dir=tmp_path / name, save_every=1, **options)

    whole, _ = check_resuming(run)

    def weights(trainer):
        return torch.cat([p.detach().flatten() for p in trainer.task.model.parameters() if p.requires_grad])

    zero, without = run("zero", 0.0).fit(), run("without", None).fit()
    assert torch.equal(weights(zero), weights(without))
    assert not torch.equal(weights(whole), weights(without))


@pytest.mark.parametrize("alpha", [-1, math.inf, "5", True])
def test_a_wrong_alpha_is_refused(task, alpha):
    with pytest.raises(BadArgument, match="neftune_noise_alpha to be a number of at least 0"):
        task(neftune_noise_alpha=alpha)


def test_a_pipeline_is_refused(task):
    with pytest.raises(BadArgument, match="embeddings on each rank for NEFTune"):
        trainer_for(task(neftune_noise_alpha=5.0), TEXTS, strategy="pipeline")
