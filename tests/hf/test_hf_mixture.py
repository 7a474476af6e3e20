"""`trainformer.hf` trains on mixtures, too."""

import pytest
from hf_toys import Classifier, examples

from trainformer import Mixture, hf
from trainformer.core.errors import BadArgument


def trainer_of(data, folder, **options):
    defaults = {"num_train_epochs": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    arguments = hf.TrainingArguments(output_dir=str(folder), **{**defaults, **quiet, **options})
    return hf.Trainer(Classifier(), arguments, train_dataset=data)


def test_a_mixture_has_its_own_length_and_losses_by_source(tmp_path):
    data = Mixture({"few": examples(10), "many": examples(30, seed=1)}, "equal", mix="batch")
    trainer = trainer_of(data, tmp_path)
    trainer.train()
    records = [record for record in trainer.state.log_history if "loss" in record]
    assert trainer.state.max_steps == len(records) == 2 * 8  # 8 steps of 8 samples: each sample at least once
    for record in records:
        (name,) = [name for name in record if name.startswith("loss/")]
        assert record[name] == pytest.approx(record["loss"])
    assert records[-1]["passes/many"] * 30 + records[-1]["passes/few"] * 10 == pytest.approx(128)
    with pytest.raises(BadArgument, match="a dataset to make a dataloader of, received 'a Mixture'"):
        trainer.get_train_dataloader()
