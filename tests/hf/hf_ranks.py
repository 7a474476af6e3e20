"""Runs of `trainformer.hf` on several ranks with their results, and the same runs in one process."""

import contextlib
import io
import os

import torch
import torch.distributed as dist
from hf_toys import Classifier, examples, llama, losses, make, make_theirs, padded, parameters, sequences
from transformers import GPT2LMHeadModel

from ranks import set_rank_variables
from text_toys import chat_tokenizer, gpt2, sentences
from trainformer import hf

WIDE = torch.float64
SAMPLES, TESTED = 43, 13  # neither is divisible by anything


def small(folder, share, trainer=hf.Trainer, callbacks=(), **arguments):
    """Two epochs with gradient accumulation and an uneven last batch; `share` is the batch size per process."""
    return make(
        folder, Classifier(dtype=WIDE), train=examples(SAMPLES, dtype=WIDE), evaluation=examples(TESTED, 5, WIDE),
        trainer=trainer, callbacks=callbacks,
        **{
            "per_device_train_batch_size": share, "per_device_eval_batch_size": share, "num_train_epochs": 2,
            "gradient_accumulation_steps": 2, "learning_rate": 0.03, "logging_steps": 1, "eval_strategy": "epoch",
            "max_grad_norm": 0.5, "warmup_steps": 2, **arguments,
        },
        more={"compute_metrics": lambda p: {"right": float((p.predictions.argmax(-1) == p.label_ids).sum())}},
    )  # fmt: skip


def written(folder, share, trainer=hf.Trainer, callbacks=()):
    """A small Llama, whose loss averages over tokens of texts of different lengths."""
    return make(
        folder, llama().double(), train=sequences(22), trainer=trainer, callbacks=callbacks, learning_rate=0.01,
        per_device_train_batch_size=share, num_train_epochs=1, logging_steps=1, lr_scheduler_type="constant",
        more={"data_collator": padded},
    )  # fmt: skip


def curve(trainer):
    """Losses, gradient norms and learning rates of every step, mean loss, weights, and metrics."""
    out = trainer.train()
    history = trainer.state.log_history
    return {
        "losses": losses(trainer),
        "norms": [r["grad_norm"] for r in history if "grad_norm" in r],
        "rates": [r["learning_rate"] for r in history if "learning_rate" in r],
        "mean": out.training_loss,
        "steps": [out.global_step, trainer.state.max_steps, trainer.state.epoch],
        "evaluated": [r[n] for r in history for n in ("eval_loss", "eval_right") if n in r],
        "weights": dict(trainer.unsharded_model().state_dict()),
    }


class Witness(hf.TrainerCallback):
    """Records what callbacks see of ranks and gradients."""

    def __init__(self):
        self.rank_info, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.norms += [logs["grad_norm_max"]] if "grad_norm_max" in logs else []

    def on_step_end(self, args, state, control, **kwargs):
        self.rank_info = [state.is_world_process_zero, state.is_local_process_zero]


def data_parallel(rank, world):
    """Data parallelism against one process, and against transformers."""
    set_rank_variables(rank, world)
    witness, shown = Witness(), io.StringIO()
    with contextlib.redirect_stdout(shown):
        watchers = [witness, hf.JsonLogger(path="ddp/log.jsonl"), hf.TBLogger("ddp/board"), hf.PeakMemory("ddp/peaks")]
        watchers += [hf.GradLogger("ddp/grads", log_frequency=1)]
        quick = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "disable_tqdm": False}
        trainer = small("ddp", 4, hf.DDPTrainer, watchers, load_best_model_at_end=True, **quick)
        found = curve(trainer)
        metrics, predicted = trainer.evaluate(), trainer.predict(examples(TESTED, 6, WIDE))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
        trainer.save_state()
    trainer.save_model("ddp/final")
    saved = trainer.save_checkpoint("ddp/by_hand")
    again = small("again", 4, max_steps=8)  # DDP by default: there are two processes
    again.load_checkpoint(saved)
    resumed = small("ddp", 4, hf.DDPTrainer, resume_from_checkpoint=True, max_steps=8, num_train_epochs=3)
    args = trainer.args
    order = _in_turn(args, rank)
    return found | {
        "facts": [args.world_size, args.process_index, args.local_process_index, args.local_rank, args.should_save],
        "words": [args.parallel_mode.value, type(trainer.unwrapped_model()).__name__, *trainer.get_process_groups()],
        "rank_info": [*witness.rank_info, trainer.is_world_process_zero(), trainer.num_processes, args.logging_dir],
        "best": os.path.basename(str(trainer.state.best_model_checkpoint)),
        "shown": shown.getvalue(),
        "metrics": {k: v for k, v in metrics.items() if "second" not in k and "runtime" not in k},
        "predicted": torch.from_numpy(predicted.predictions),
        "loaded": parameters(again.model),
        "by_itself": curve(small("auto", 4, dispatch_batches=True)),
        "resumed": curve(resumed),
        "order": order,
        "llama": curve(written("llama", 3, hf.DDPTrainer)),
        "accelerated": curve(small("accelerated", 4, hf.AccelTrainer)),
        "theirs": _theirs("theirs"),
        "ours": curve(divisible(make, "ours", train_sampling_strategy="sequential")),
    }


def divisible(maker, folder, **arguments):
    """A run that transformers computes exactly on several ranks: all have equal batches."""
    return maker(
        folder, Classifier(dtype=WIDE), train=examples(48, dtype=WIDE), per_device_train_batch_size=4,
        max_grad_norm=0.5, gradient_accumulation_steps=2, learning_rate=0.03, logging_steps=1, num_train_epochs=2,
        **arguments,
    )  # fmt: skip


def _theirs(folder):
    # In dataset order, as ours.
    trainer = divisible(make_theirs, folder, train_sampling_strategy="sequential")
    out = trainer.train()
    mean = {"mean": out.training_loss, "steps": [out.global_step, trainer.state.max_steps, trainer.state.epoch]}
    return {"losses": losses(trainer), "weights": parameters(trainer.model), **mean}


def _in_turn(args, rank):
    """The order of main_process_first."""
    if os.path.exists(f"seen{rank}"):
        os.remove(f"seen{rank}")
    dist.barrier()
    with args.main_process_first(desc="a map"):
        found = os.path.exists("seen0")
        open(f"seen{rank}", "w").close()
    return found


def model_parallel(rank, world):
    """Strategies that shard the model, with callbacks that run it."""
    set_rank_variables(rank, world)
    watchers = [hf.GradLogger(log_frequency=1), Witness()]
    fsdp = small("fsdp", 4, hf.FSDPTrainer, watchers, save_strategy="steps", save_steps=4, save_total_limit=1)
    found = curve(fsdp)
    found["per_layer"] = watchers[1].norms
    fsdp.save_model("fsdp/final")
    predicted = fsdp.predict(examples(TESTED, 6, WIDE)).predictions
    try:
        fsdp.train()
        error_text = ""
    except ValueError as error:
        error_text = str(error)
    resumed = small("fsdp", 4, hf.FSDPTrainer, resume_from_checkpoint=True)
    resumed_steps = resumed.train().global_step
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    texts = hf.TextgenCallback("fsdp/texts", ["one two", "three"], {"max_new_tokens": 3}, generation_steps=1)
    ids = [tokenizer(text)["input_ids"][:4] for text in sentences()]
    talking = make(
        "talking", GPT2LMHeadModel(gpt2()), train=[{"input_ids": row, "labels": row} for row in ids if len(row) == 4],
        max_steps=2, trainer=hf.FSDPTrainer, callbacks=[texts], more={"processing_class": tokenizer},
        per_device_train_batch_size=1,
    )  # fmt: skip
    talking.train()
    return found | {
        "predicted": torch.from_numpy(predicted),
        "error": error_text,
        "resumed": resumed_steps,
        "generations": talking.state.global_step,
        "pipeline": curve(written("pipeline", 6, hf.PipelineTrainer)),
    }
