"""records.jsonl of a run on JAX: events and user records."""

import json
from pathlib import Path

import jax
from jax_toys import mlp_trainer, samples

from trainformer.loggers import read_jsonl


class Notes:
    def on_epoch_end(self, trainer, epoch, metrics):
        trainer.record("note", epoch=epoch)


def test_events_of_a_run():
    trainer = mlp_trainer(
        dataset_eval=samples(8, 1), callbacks=[Notes()], save_steps=3, logging_steps=2, evaluation_steps=4
    )
    trainer.train()
    records = [json.loads(line) for line in Path("run/records.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert (kinds[0], kinds[-1]) == ("began", "ended")
    assert [record["step"] for record in records if record["kind"] == "evaluated"] == [4, 8]
    assert [r["epoch"] for r in records if r["kind"] == "note"] == [0, 1]
    saved = [r["checkpoint"] for r in records if r["kind"] == "saved"]
    assert len(saved) == len(set(saved)) >= 2
    assert records[0]["versions"]["jax"] == jax.__version__
    assert records[0]["device"].startswith("1 x ")
    assert records[-1]["status"] == "finished"
    assert all(r["train/memory_gb"] > 0 for r in read_jsonl("run/metrics.jsonl") if "train/loss" in r)
