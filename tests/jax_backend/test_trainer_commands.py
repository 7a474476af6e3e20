"""Runs of every text trainer: loaded, predicted with, evaluated, exported and finalized, compared with the trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers as hf
from encoder_toys import randomised
from peft import AutoPeftModelForCausalLM
from text_trainer_toys import batch_of, make_folder, pairs, trainer_of

import text_toys as toys
import trainformer
from trainformer import jax as tj
from trainformer.callbacks import EMA
from trainformer.cli import main
from trainformer.core.errors import BadArgument, DataError
from trainformer.models.jax import BertConfig, T5Config
from trainformer.run import run_of

TEXTS = toys.sentences()
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_batch_size": 8, "total_batch_size": 8, "max_steps": 2}


def labelled(kind: str) -> list[dict[str, Any]]:
    first = sorted({text.split()[0] for text in TEXTS})[:3]
    found = [(text, first.index(text.split()[0])) for text in TEXTS if text.split()[0] in first]
    if kind == "single":
        return [{"text": text, "label": "abc"[label]} for text, label in found]
    if kind == "regression":
        return [{"text": text, "label": label - 0.75} for text, label in found]
    several = [["a"], ["a", "c"], ["b"]]
    return [{"sentence1": text, "sentence2": TEXTS[i], "label": several[c]} for i, (text, c) in enumerate(found)]


def judged() -> list[dict[str, Any]]:
    kinds = (("chosen", True), ("rejected", False))
    found = [(pair, kind, label) for pair in toys.preferences()[:8] for kind, label in kinds]
    return [{"prompt": pair["prompt"], "completion": pair[kind], "label": label} for pair, kind, label in found]


def length(completions):
    return [float(len(text)) for text in completions]


@dataclass
class Case:
    kind: str
    data: Any
    auto: Any  # the class of transformers that opens what is exported
    inputs: Any  # to predict for
    fields: dict[str, Any]
    options: dict[str, Any]
    evaluates: bool = True


def case(kind, data, auto, inputs, fields=None, evaluates=True, **options):
    return Case(kind, data, auto, inputs, fields or {}, options, evaluates)


def model_of(name: str, root: Path) -> Any:
    if name in ("single", "multi", "regression", "masked"):
        return BertConfig(vocab_size=96, max_position_embeddings=40, **SMALL)
    if name == "seq2seq":
        return T5Config(vocab_size=320, head_dim=8, eos_token_id=toys.chat_tokenizer().eos_token_id, **SMALL)
    return str(root / ("moe" if name == "moe" else "llama"))


PROMPTS = [text[:12] for text in TEXTS[:3]]
TOKENS = 6
LABELLED = {kind: labelled(kind) for kind in ("single", "multi", "regression")}
LORA = {"r": 2, "targets": "all-linear", "dropout": 0.0}
CLASSIFIER = hf.AutoModelForSequenceClassification
CAUSAL = hf.AutoModelForCausalLM
CASES = {
    **{
        kind: case("SequenceClassification", data, CLASSIFIER, [{**row, "label": None} for row in data[:11]])
        for kind, data in LABELLED.items()
    },
    "masked": case("MaskedLM", TEXTS, hf.AutoModelForMaskedLM, None),
    "seq2seq": case(
        "Seq2Seq",
        pairs(),
        hf.AutoModelForSeq2SeqLM,
        [{"prompt": text} for text in PROMPTS],
        {"max_target_length": 8, "max_sequence_length": None, "max_source_length": 32},
    ),
    "reward": case("Reward", toys.preferences(), CLASSIFIER, PROMPTS),
    "kto": case("KTO", judged(), CAUSAL, PROMPTS),
    "kto_lora": case("KTO", judged(), None, PROMPTS, lora=LORA),
    "grpo": case(
        "GRPO",
        [{"prompt": text} for text in PROMPTS * 3],
        CAUSAL,
        PROMPTS,
        {"num_generations": 2, "max_completion_length": 4, "max_sequence_length": None, "total_batch_size": 4},
        evaluates=False,
        reward_funcs=length,
    ),
    "distillation": case("Distillation", pairs(), CAUSAL, PROMPTS, {"alpha": 0.5}, teacher_model="base"),
    "moe": case("SFT", pairs(), CAUSAL, PROMPTS),
    "nf4": case("SFT", pairs(), None, PROMPTS, {"quantization": "nf4"}, lora=LORA),
    "ema": case("SFT", pairs(), CAUSAL, PROMPTS, callbacks=EMA),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the models and the runs are."""
    where = tmp_path_factory.mktemp("trainers")
    make_folder(where / "llama")
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = hf.MixtralConfig(vocab_size=320, **{**SMALL, **sizes}, max_position_embeddings=64)
    randomised(hf.MixtralForCausalLM(config)).save_pretrained(where / "moe")
    toys.chat_tokenizer().save_pretrained(where / "moe")
    return where


def built(name: str, root: Path, **changes: Any) -> Any:
    made, where = CASES[name], root / name
    options = {"eval_dataset": made.data, **made.options}
    if "callbacks" in options:
        options["callbacks"] = [EMA(decay=0.5, warmup=False)]
    encoder = name in ("masked", *LABELLED)
    options["processing_class"] = toys.masking_tokenizer(TEXTS) if encoder else str(root / "llama")
    kind = getattr(tj, f"{made.kind}Trainer")
    fields = {**SAVING, **made.fields, **changes.pop("fields", {})}
    given = {"options": {**options, **changes}, **fields}
    data = given["options"].pop("train_dataset", made.data)
    return trainer_of(kind, kind.arguments_type, model_of(name, root), data, where, **given)


SLOW = ("multi", "regression", "kto_lora", "distillation", "moe")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
def trained(request, root):
    """A run of two steps."""
    trainer = built(request.param, root)
    trainer.train()
    return request.param, CASES[request.param], trainer, root / request.param


def answer(capsys, *words):
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_lines(path, records):
    lines = [{"text": each} if isinstance(each, str) else each for each in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def wanted_columns(name: str, made: Case, trainer: Any) -> dict[str, Any]:
    """What the trainer itself says about the inputs."""
    if name in LABELLED:
        found = trainer.predict(made.inputs)
        if name == "regression":
            return {"value": found[:, 0]}
        names = np.array(["a", "b", "c"])
        if name == "multi":
            return {"prediction": found > 0.5, "probabilities": found, "classes": [names[row > 0.5] for row in found]}
        best = found.argmax(-1)
        named = {"class": names[best], "prediction": best, "probability": found.max(-1)}
        return {**named, "probabilities": found}
    if name == "reward":
        return {"reward": trainer.score(made.inputs)}
    if name == "seq2seq":
        return {"prompt": PROMPTS, "text": trainer.generate(PROMPTS)}
    return {"prompt": PROMPTS, "text": tj.SFTTrainer.generate(trainer, PROMPTS, TOKENS)}


def test_predictions(trained, tmp_path, capsys):
    """Of a run that is opened without its training data, and of the command: those of the trainer itself."""
    name, made, trainer, where = trained
    opened = trainformer.load(where / "run")
    if name == "masked":
        with pytest.raises(BadArgument, match="fills masked tokens"):
            opened.predict("the quick")
        assert main(["predict", str(where / "run"), write_lines(tmp_path / "in.jsonl", TEXTS[:2])]) == 1
        return
    generates = name not in (*LABELLED, "reward", "seq2seq")
    options = {"max_new_tokens": TOKENS} if generates else {}
    rows, wanted = opened.predict(made.inputs, **options), wanted_columns(name, made, trainer)
    assert len(rows) == len(made.inputs)
    for column, values in wanted.items():
        for row, value in zip(rows, values, strict=True):
            assert same(row[column], value), column
    if not generates:
        assert opened.predict(made.inputs[0]).keys() == rows[0].keys()
    lines = made.inputs if name in (*LABELLED, "reward", "seq2seq") else [{"prompt": text} for text in made.inputs]
    words = ["--batch-size", "4", "--max-new-tokens", str(TOKENS)]
    assert main(["predict", str(where / "run"), write_lines(tmp_path / "in.jsonl", lines), *words]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed[0].keys() - {"index", "id"} == wanted.keys()
    for column, values in wanted.items():
        assert all(same(row[column], value) for row, value in zip(printed, values, strict=True)), column
    if not generates:
        assert main(["generate", str(where / "run"), "--prompt", PROMPTS[0]]) == 1


def same(found: Any, wanted: Any) -> bool:
    found, wanted = np.asarray(found), np.asarray(wanted)
    if wanted.dtype.kind == "f":
        return bool(np.allclose(found, wanted, rtol=1e-4, atol=1e-5))
    return bool(np.array_equal(found, wanted))


def test_evaluation(trained, tmp_path, capsys):
    name, made, trainer, where = trained
    file = write_lines(tmp_path / "data.jsonl", made.data)
    if not made.evaluates:
        assert main(["evaluate", str(where / "run"), "--data", file]) == 1
        assert "reward_funcs" in capsys.readouterr().err
        return
    found = answer(capsys, "evaluate", where / "run", "--data", file)["metrics"]
    if name == "distillation":  # whose step has the teacher as an argument
        assert run_of(trainer).backend.count_flops(batch_of(trainer)) > 0
    wanted = {metric.replace("eval_", "val/"): value for metric, value in trainer.eval().items()}
    assert found == pytest.approx(wanted, rel=2e-4, abs=2e-5)


def outputs_of(trainer: Any, ids: np.ndarray) -> np.ndarray:
    """What the model says that evaluations use."""
    with trainer.eval_mode():
        model: Any = trainer.model_state.model
        options = {}
        if isinstance(trainer, tj.Seq2SeqTrainer):
            options["decoder_input_ids"] = ids
        if isinstance(trainer, tj.RewardTrainer):
            options["last"] = np.full(len(ids), ids.shape[1] - 1)
        return np.asarray(jax.jit(lambda: model(ids, **options))())


def torch_outputs(model: Any, ids: np.ndarray) -> np.ndarray:
    given = torch.tensor(ids)
    options = {"decoder_input_ids": given} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found = model.eval()(input_ids=given, attention_mask=torch.ones_like(given), **options).logits
    return found.float().numpy()


def test_exported_and_finalized_folders_open_in_transformers(trained, tmp_path, capsys):
    name, made, trainer, where = trained
    ids = np.random.default_rng(0).integers(4, 90, (2, 12))
    wanted = outputs_of(trainer, ids)
    if name == "reward":
        wanted = wanted[:, None]
    folder = answer(capsys, "export", where / "run", tmp_path / "export")["path"]
    if made.auto is None:
        assert (Path(folder) / "adapter_config.json").is_file()
        if name != "nf4":  # peft would load the base without rounding it
            opened = AutoPeftModelForCausalLM.from_pretrained(folder)
            np.testing.assert_allclose(torch_outputs(opened, ids), wanted, atol=2e-4)
    else:
        np.testing.assert_allclose(torch_outputs(made.auto.from_pretrained(folder), ids), wanted, atol=2e-4)
    done = answer(capsys, "finalize", where / "run", tmp_path / "final")
    assert done["adapter"] == (None if "lora" not in made.options else "LoRA")
    assert done["ema"] == ("callback.EMA" if name == "ema" else None)
    opened = (made.auto or CAUSAL).from_pretrained(tmp_path / "final")
    np.testing.assert_allclose(torch_outputs(opened, ids), wanted, atol=2e-4)
    if name == "single":
        assert opened.config.id2label == {0: "a", 1: "b", 2: "c"}


def test_a_run_with_other_classes_is_not_resumed(root):
    trainer = built("single", root, fields={"output_dir": str(root / "classes")})
    trainer.train()
    renamed = [{**row, "label": row["label"].upper()} for row in LABELLED["single"]]
    changes = {"train_dataset": renamed, "eval_dataset": None}
    again = built("single", root, **changes, fields={"output_dir": str(root / "classes"), "max_steps": 4})
    with pytest.raises(DataError, match=r"Pass class_names=\['a', 'b', 'c'\]"):
        again.train(ckpt_path=root / "classes")
    same = built("single", root, fields={"output_dir": str(root / "classes"), "max_steps": 4})
    assert int(same.train(ckpt_path=root / "classes").step) == 4
