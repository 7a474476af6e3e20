"""Names of options in other programs, and what to suggest for an option that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trainformer.core.synonyms import SETTINGS

#: The same option under other names: settings of other trainers, and options of HF's scripts, timm and torchrun.
ELSEWHERE = {
    **{other: ours.partition("=")[0] for other, ours in SETTINGS.items() if ours.partition("=")[0].isidentifier()},
    "steps": "max_steps",
    "batch": "batch_size",
    "eval_interval": "eval_every",
    **dict.fromkeys(("wd", "l2"), "weight_decay"),
    **dict.fromkeys(("data_dir", "train_file"), "data"),
    **dict.fromkeys(("val", "eval_data", "validation_file"), "val_data"),
    **dict.fromkeys(("model_name", "model_name_or_path", "arch", "backbone"), "model"),
    **dict.fromkeys(("nproc_per_node", "num_processes", "gpus", "devices", "n_gpus"), "nproc"),
    **dict.fromkeys(("output", "output_file", "o"), "out"),
    **dict.fromkeys(("trials", "num_trials"), "n_trials"),
    "max_seq_length": "max_length",
    "lora_r": "r",
    "lora_alpha": "alpha",
}  # fmt: skip


def suggest_option(name: str, known: Iterable[str]) -> str:
    """A sentence with the options that may be meant; empty if none is close. Names are without leading dashes.

    >>> suggest_option("lerning-rate", ["lr", "drop-rate"])
    'Did you mean --lr?'
    >>> suggest_option("num_train_epochs", ["epochs"]), suggest_option("epohs", ["epochs"])
    ('Here it is --epochs.', 'Did you mean --epochs?')
    """
    flags = {each.replace("-", "_"): f"--{each.replace('_', '-')}" for each in known}
    plain = name.lower().replace("-", "_")
    same = ELSEWHERE.get(plain)
    if same in flags:
        return f"Here it is {flags[same]}."
    names = dict(flags)
    names |= {other: flags[ours] for other, ours in ELSEWHERE.items() if ours in flags and other not in flags}
    close = difflib.get_close_matches(plain, names, cutoff=0.6)
    best = close[:1] if close and difflib.SequenceMatcher(None, plain, close[0]).ratio() > 0.85 else close
    meant = dict.fromkeys(names[each] for each in best)
    return f"Did you mean {' or '.join(meant)}?" if meant else ""
