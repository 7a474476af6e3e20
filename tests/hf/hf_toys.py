"""Models, data and recorders for tests of `trainformer.hf` that also run in the Trainer of transformers."""

import multiprocessing
import os
import signal

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from forking import SERVER
from toys import MeanTask, classes
from trainformer import Trainer, hf


class Classifier(nn.Module):
    """Returns the outputs of a transformers model, without being one."""

    def __init__(self, dropout=0.0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).to(dtype)

    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def examples(n=40, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=dtype)
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


def llama(seed=3):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=23, max_position_embeddings=32, use_cache=False, **sizes))


def sequences(n=24, seed=0):
    """Texts of different lengths, with some unsupervised tokens."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        ids = torch.randint(1, 23, (4 + i % 7,), generator=g)
        labels = ids.clone()
        labels[: 1 + i % 3] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def padded(made):
    """Right-padded, as a collator would."""
    longest = max(len(example["input_ids"]) for example in made)

    def pad(name, value):
        return torch.stack([F.pad(e[name], (0, longest - len(e[name])), value=value) for e in made])

    mask = torch.stack([torch.arange(longest) < len(e["input_ids"]) for e in made]).long()
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


EVENTS = (
    "on_init_end", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin",
    "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end", "on_evaluate", "on_predict",
    "on_save", "on_log", "on_prediction_step",
)  # fmt: skip


def recorder(base=hf.TrainerCallback):
    """A callback that records every event and the state of the run."""

    class Recorder(base):
        def __init__(self):
            self.seen = []

        def names(self):
            return [name for name, *_ in self.seen]

    def note(name):
        def method(self, args, state, control, **kwargs):
            self.seen.append((name, state.global_step, round(float(state.epoch or 0), 6)))

        return method

    for name in EVENTS:
        setattr(Recorder, name, note(name))
    return Recorder()


def make(folder, model=None, *, train=None, evaluation=None, callbacks=(), trainer=hf.Trainer, more=None, **arguments):
    """A trainer of ours with quiet defaults."""
    defaults = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "per_device_train_batch_size": 8}
    args = hf.TrainingArguments(str(folder), **{**defaults, **arguments})
    return trainer(
        model=model if model is not None else Classifier(),
        args=args,
        train_dataset=train if train is not None else examples(),
        eval_dataset=evaluation,
        callbacks=list(callbacks) or None,  # an empty list means none at all
        **(more or {}),
    )


def make_theirs(folder, model=None, *, train=None, evaluation=None, callbacks=(), trainer=None, more=None, **arguments):
    """The same for transformers, with data in order, as ours with train_sampling_strategy."""
    defaults = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    options = {**defaults, "per_device_train_batch_size": 8, "dataloader_pin_memory": False, **arguments}
    made = (trainer or transformers.Trainer)(
        model=model if model is not None else Classifier(),
        args=transformers.TrainingArguments(str(folder), **options),
        train_dataset=train if train is not None else examples(),
        eval_dataset=evaluation,
        callbacks=list(callbacks),
        **(more or {}),
    )
    made.remove_callback(transformers.PrinterCallback)
    return made


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def parameters(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_in_process(folder, step=None, number=None):
    """A process that trains with DataLoader workers and optionally sends itself a signal after a step."""

    class Signal(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                os.kill(os.getpid(), number)

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    trainer = make(
        folder, Classifier(dropout=0.3), train=examples(43), callbacks=[Signal()], max_steps=12, learning_rate=1e-2,
        save_strategy="steps", save_steps=4, dataloader_num_workers=2, dataloader_prefetch_factor=2,
        resume_from_checkpoint="auto",
    )  # fmt: skip
    trainer.train()
    trainer.save_model(f"{folder}/final")


def train_with_json_logger(folder, kill_at=None):
    """A process that trains with a `JsonLogger` and optionally kills itself after a step."""

    class Kill:
        def on_step_end(self, trainer, step, loss):
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    options = {"batch_size": 8, "epochs": 2, "log": "none", "log_every": 1, "save_every": 3, "run_dir": folder}
    Trainer(MeanTask(), classes(), callbacks=[hf.JsonLogger(name="x"), Kill()], **options).fit()


def exit_code(target, *args):
    """Run a function in a process of its own."""
    process = SERVER.Process(target=target, args=args)
    process.start()
    process.join(240)
    return process.exitcode
