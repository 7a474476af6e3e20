"""Language models on a GPU: steps that never wait for the device, packing, and exact resume."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from toys import same, weights
from trainformer import Trainer
from trainformer.run import run_of
from trainformer.tasks import CausalLM

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def tokenizer():
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i + 2 for i in range(300)}
    plain = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")


def make(tokenizer, folder, **options):
    config = LlamaConfig(
        vocab_size=302, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    packing = options.pop("packing", False)
    task = CausalLM(config, max_length=64, tokenizer=tokenizer, cache_dir=folder, packing=packing)
    texts = [" ".join(f"w{(i * k) % 300}" for k in range(1, 8 + i % 40)) for i in range(1, 200)]
    defaults = {"batch_size": 4, "max_steps": 12, "lr": 1e-3, "log": "none", "save_best": 0, "log_every": 10}
    return Trainer(task, texts, **{**defaults, "num_workers": 0, **options})


class NoSync:
    """Makes CUDA raise on any synchronisation in the middle of the run."""

    def on_step_begin(self, trainer, step):
        torch.cuda.set_sync_debug_mode("error" if 2 < step < 8 else "default")

    on_train_end = on_error = on_log = lambda self, trainer, *rest: torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_steps_never_wait_for_the_device(tokenizer, tmp_path, precision, packing):
    trainer = make(tokenizer, tmp_path, precision=precision, packing=packing, callbacks=[NoSync()]).fit()
    assert trainer.state.step == 12
    assert all(torch.isfinite(p).all() for p in trainer.task.model.parameters())


def test_packed_and_padded_documents_have_one_loss(tokenizer, tmp_path):
    losses = []
    for packing in (False, True):
        trainer = make(tokenizer, tmp_path, packing=packing, precision="no", batch_size=199)
        task = trainer.task
        total, count = 0.0, 0.0
        with torch.no_grad():
            for batch in run_of(trainer).backend.feed(run_of(trainer).train_source.batches(0), train=True):
                loss = task.train_step(batch.data)
                total, count = total + float(loss.sum), count + float(loss.weight)
        losses.append((total, count))
    assert losses[0][1] == losses[1][1]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_resume_is_bitwise_equal(tokenizer, tmp_path, packing):
    options = {"packing": packing, "precision": "bf16"}
    whole = make(tokenizer, tmp_path, **options).fit().task

    class SaveAt:
        def on_step_end(self, trainer, step, loss):
            if step == 5:
                trainer.save(tmp_path / "five.pt")

    make(tokenizer, tmp_path, callbacks=[SaveAt()], **options).fit()
    torch.manual_seed(7)
    resumed = make(tokenizer, tmp_path, **options).load(tmp_path / "five.pt").fit().task
    assert same(weights(whole), weights(resumed))


def test_generating(tokenizer, tmp_path):
    task = make(tokenizer, tmp_path).fit().task
    assert len(task.generate(["w1 w2", "w3"], max_new_tokens=4)) == 2
