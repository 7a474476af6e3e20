"""From a run to a folder to deploy: the same model, opened by others; all of it or nothing; and the command for it."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from text_toys import (
    bart,
    bert,
    chat_tokenizer,
    checkpoint_of,
    digit_pairs,
    gpt2,
    llama,
    masking_tokenizer,
    reading_tokenizer,
    sentences,
    t5,
    trainer_for,
)
from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.adapters import LoRA, PrefixTuning, QLoRA
from trainformer.backends.torch.quantize import RECIPES, recipe_named, restore_linear
from trainformer.checkpoint import InvalidCheckpoint, finalize, list_checkpoints
from trainformer.checkpointing.manifest import FileRecord, Manifest
from trainformer.cli import main
from trainformer.cli.trained import QUANTIZATION_RECIPES
from trainformer.core.errors import BadArgument, DataError
from trainformer.models.language import load_model
from trainformer.run import run_of
from trainformer.tasks import CausalLM, MaskedLM, Seq2Seq

pytest.importorskip("torchao")
transformers = pytest.importorskip("transformers")

QAT = "int8-dynamic-act-int4-weight"
IDS = torch.randint(2, 300, (2, 12), generator=torch.Generator().manual_seed(4))


def short_run(folder, config=None, adapter=None, **options):
    """A short run of a causal model in ``folder/run``."""
    task = CausalLM(config or llama(), adapter, 32, tokenizer=chat_tokenizer(), cache_dir=folder / "tokens")
    return trainer_for(task, sentences(), **{"run_dir": folder / "run", "max_steps": 4, **options}).fit()


@torch.no_grad()
def logits(model, ids=IDS):
    return model.eval()(input_ids=ids).logits


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def nothing_left(folder):
    """Neither the result nor a draft of it."""
    return not (folder / "out").exists() and not list(folder.glob(".finalizing-*"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without anything special, with an average and evaluations. Nobody changes it."""
    folder = tmp_path_factory.mktemp("plain")
    options = {
        "ema": 0.5,
        "val_data": sentences(),
        "eval_every": "1steps",
        "save_best": 4,
        "gradient_checkpointing": True,
    }
    return short_run(folder, **options)


# -- the same model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_trained_for_quantisation_becomes_the_quantised_model(tmp_path, tied):
    trainer = short_run(tmp_path, llama(tie_word_embeddings=tied), qat_recipe=QAT)
    result = finalize(tmp_path / "run", tmp_path / "out")
    model = opened(tmp_path / "out")
    torch.testing.assert_close(logits(model), logits(trainer.task.model))  # rounded while training = rounded for good
    assert result.trained_difference < 1e-5  # rounding of an output layers alone
    assert (result.recipe, result.layers, result.left) == (QAT, 14, {"an output layer": 1})
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    restore_linear(trainer.task.model)
    in_full = (logits(model) - logits(trainer.task.model)).abs().max().item()
    assert 0.2 * result.difference < in_full < 5 * result.difference  # other tokens, the same size
    assert result.size < 0.9 * result.size_before
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    made = model.generate(**tokenizer("the quick", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert made.shape[1] > 2
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 1
    assert json.loads((tmp_path / "out" / "finalized.json").read_text()) == result.as_dict()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(result.files)
    assert result.difference == pytest.approx(finalize(tmp_path / "run", tmp_path / "again").difference)


def test_the_average_is_taken_unless_the_trained_weights_are_asked_for(plain, tmp_path):
    average, trained = run_of(plain).inference_model(), plain.task.model
    assert average is not trained
    for name, ema, wanted in (("a", None, average), ("t", False, trained), ("k", "callback.EMA", average)):
        result = finalize(plain.run_folder, tmp_path / name, ema=ema)
        model = opened(tmp_path / name)
        assert same(dict(model.state_dict()), dict(wanted.state_dict()))
        assert result.ema == (None if ema is False else "callback.EMA")
        assert model.config.use_cache  # gradient checkpointing had turned it off


def test_best_and_last(plain, tmp_path):
    best = min(list_checkpoints(plain.run_folder), key=lambda c: c.manifest.metrics["val/loss"])
    assert finalize(plain.run_folder, tmp_path / "best", which="best").step == best.step
    last = finalize(plain.run_folder, tmp_path / "last")
    assert last.step == 4
    assert bool(last.notes) == (best.step != 4)
    first = list_checkpoints(plain.run_folder)[0]
    assert finalize(first.path, tmp_path / "first").step == first.step < 4


@pytest.mark.parametrize("recipe", [None, "int8-weight-only"])
def test_an_adapter_is_merged_into_its_model(tmp_path, recipe):
    base = transformers.LlamaForCausalLM(llama())
    base.save_pretrained(tmp_path / "base")
    trainer = short_run(tmp_path, str(tmp_path / "base"), LoRA(r=4, target_modules="all-linear"), ema=0.5)
    result = finalize(tmp_path / "run", tmp_path / "out", quantize=recipe, ema=False)
    merged, adapted = logits(opened(tmp_path / "out")), logits(trainer.task.model)
    assert (adapted - logits(base)).abs().max() > 0.1  # it has learned something
    torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-5 if recipe is None else 0.1)
    assert result.adapter == "LoRA"
    if recipe is None:
        average = finalize(tmp_path / "run", tmp_path / "average")
        found = logits(opened(tmp_path / "average"))
        torch.testing.assert_close(found, logits(run_of(trainer).inference_model()), rtol=0, atol=1e-5)
        assert not torch.allclose(found, merged, atol=1e-5)
        assert average.ema == "callback.EMA"


def test_an_adapter_finds_the_model_it_is_told(tmp_path):
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(llama())
    base.save_pretrained(tmp_path / "base")
    trainer = short_run(tmp_path, base, LoRA(r=4))
    trainer.task.model.get_base_model().name_or_path = ""
    with pytest.raises(BadArgument, match=r"the model that the adapter belongs to, received none.*Pass base= .--base"):
        finalize(tmp_path / "run", tmp_path / "out")
    assert nothing_left(tmp_path)
    finalize(tmp_path / "run", tmp_path / "out", base=tmp_path / "base")
    torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(trainer.task.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("adapter", [None, LoRA(r=4)])
def test_what_differs_from_the_trained_model_is_not_published(tmp_path, monkeypatch, adapter):
    """One tensor that is written wrongly is seen in the outputs, whatever the adapter."""
    transformers.LlamaForCausalLM(llama()).save_pretrained(tmp_path / "base")
    short_run(tmp_path, str(tmp_path / "base"), adapter, max_steps=1)
    write = transformers.PreTrainedModel.save_pretrained

    def wrongly(model, folder, **options):
        write(model, folder, **options)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.mlp.down_proj.weight"][3] += 0.1
        save_file(tensors, file, {"format": "pt"})

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", wrongly)
    with pytest.raises(
        DataError, match="the outputs of the trained model when it is read back, received 'a difference"
    ):
        finalize(tmp_path / "run", tmp_path / "out")
    assert nothing_left(tmp_path)
    monkeypatch.undo()
    finalize(tmp_path / "run", tmp_path / "out")


def test_weights_that_are_missing_or_left_over_are_an_error(tmp_path):
    """Neither is a model filled up with random weights, nor is a weight left out in silence."""
    short_run(tmp_path, max_steps=1)
    folder = checkpoint_of_folder(tmp_path)
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for odd in ({k: v for k, v in whole.items() if k != name}, {**whole, "model.other": torch.ones(2)}):
        save_file(odd, folder / "model.safetensors", {"format": "pt"})
        manifest = Manifest.read(folder)
        record = [FileRecord.of(folder, "model.safetensors")]
        again = dataclasses.replace(manifest, components={**manifest.components, "model": record})
        (folder / "manifest.json").write_bytes(again.to_bytes())
        word = "up_proj" if name not in odd else "model.other"
        with pytest.raises(DataError, match=rf"exactly the weights of LlamaForCausalLM.*{word}"):
            finalize(tmp_path / "run", tmp_path / "out")
        assert nothing_left(tmp_path)
        with pytest.raises(BadArgument, match=rf"with exactly the weights of LlamaForCausalLM.*{word}"):
            load_model(folder, "causal_lm")
    # The head of a classifier is new, unless the folder is that of a classifier.
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    classifier = load_model(folder, "sequence_classification")
    assert classifier.new_weights == ["score.weight"]
    classifier.save_pretrained(tmp_path / "classifier")
    file = tmp_path / "classifier" / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "score" not in k}, file, {"format": "pt"})
    with pytest.raises(BadArgument, match=r"1 missing .score.weight."):
        load_model(tmp_path / "classifier", "sequence_classification")


def test_a_model_in_4_bits_is_merged_as_it_was_trained(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers.LlamaForCausalLM(llama(hidden_size=64)).save_pretrained(tmp_path / "base")
    adapter = QLoRA(r=4, target_modules="all-linear", quant_type="fp4", double_quant=False)
    trainer = short_run(tmp_path, str(tmp_path / "base"), adapter, optimizer="adamw")
    result = finalize(tmp_path / "run", tmp_path / "out")
    assert result.adapter == "QLoRA"
    torch.testing.assert_close(logits(opened(tmp_path / "out")), logits(trainer.task.model), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["t5", "bart", "bert"])
def test_other_language_models(tmp_path, kind):
    """BART has a weight at the top of the model, which torchao's list of names cannot take."""
    if kind != "bert":
        task = Seq2Seq(t5() if kind == "t5" else bart(), tokenizer=reading_tokenizer(), cache_dir=tmp_path / "tokens")
        data, auto = digit_pairs(16), transformers.AutoModelForSeq2SeqLM
    else:
        task = MaskedLM(bert(), tokenizer=masking_tokenizer(sentences()), cache_dir=tmp_path / "tokens", max_length=32)
        data, auto = sentences(), transformers.AutoModelForMaskedLM
    trainer_for(task, data, run_dir=tmp_path / "run", max_steps=2, qat_recipe="int8-weight-only").fit()
    result = finalize(tmp_path / "run", tmp_path / "out")
    inputs = {"input_ids": IDS % 90}
    inputs |= {"decoder_input_ids": IDS % 80} if kind != "bert" else {}
    with torch.no_grad():
        found, wanted = (m.eval()(**inputs).logits for m in (auto.from_pretrained(tmp_path / "out"), task.model))
    torch.testing.assert_close(found, wanted)
    assert result.layers > 8


def test_of_other_models_the_weights_are_written(tmp_path):
    trainer = Trainer(MeanTask(mlp()), classes(), max_steps=3, log="none", run_dir=tmp_path / "run").fit()
    result = finalize(tmp_path / "run", tmp_path / "out")
    model = mlp(hidden=8)
    model.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    assert same(weights(MeanTask(model)), weights(trainer.task))
    assert result.compared == "weights"
    with pytest.raises(BadArgument, match="how to build the model again"):
        finalize(tmp_path / "run", tmp_path / "quantised", quantize=QAT)


# -- all or nothing ----------------------------------------------------------------------------------------


def test_what_is_wrong_is_said_and_nothing_is_left(plain, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    run, out = plain.run_folder, tmp_path / "out"
    (tmp_path / "empty").mkdir()
    cases = [
        ({"run": tmp_path / "none"}, DataError, "There is nothing at this path"),
        ({"run": tmp_path / "empty"}, DataError, "no complete checkpoint"),
        ({"run": checkpoint_of(plain) / "model.safetensors"}, BadArgument, "the folder of a run or of one of its"),
        ({"out": tmp_path / "full"}, BadArgument, "empty or not there"),
        ({"quantize": "int8-weight"}, BadArgument, "Did you mean 'int8-weight-only'"),
        ({"quantize": "int4-weight-only"}, BadArgument, "a machine that can quantise to 'int4-weight-only'"),
        ({"base": "gpt2"}, BadArgument, "a base for an adapter's run alone"),
        ({"which": "first"}, BadArgument, "which to be 'last' or 'best'"),
        ({"ema": "callback.EMA-2"}, BadArgument, "which average to take"),
    ]
    if torch.cuda.is_available():
        del cases[5]
    for options, kind, words in cases:
        with pytest.raises(kind, match=words):
            finalize(**{"run": run, "out": out, **options})
        assert nothing_left(tmp_path), options


def test_a_recipe_other_than_the_one_trained_for_is_refused(tmp_path):
    short_run(tmp_path, qat_recipe=QAT, max_steps=1)
    with pytest.raises(BadArgument, match=f"quantize to be '{QAT}', for which the run was trained"):
        finalize(tmp_path / "run", tmp_path / "out", quantize="int8-weight-only")
    assert finalize(tmp_path / "run", tmp_path / "out", quantize="none").recipe is None
    assert type(opened(tmp_path / "out").model.layers[0].mlp.up_proj.weight.data) is torch.Tensor


def test_a_failure_halfway_leaves_nothing(tmp_path):
    short_run(tmp_path, gpt2(), max_steps=1)  # its layers are no linear layers, which is seen when they are looked for
    with pytest.raises(BadArgument, match="Expected linear layers to quantise"):
        finalize(tmp_path / "run", tmp_path / "out", quantize="int8-weight-only")
    assert nothing_left(tmp_path)
    (tmp_path / "prefix").mkdir()
    short_run(tmp_path / "prefix", str(checkpoint_of_folder(tmp_path)), PrefixTuning(2), max_steps=1)
    with pytest.raises(BadArgument, match="a prefix is an input"):
        finalize(tmp_path / "prefix" / "run", tmp_path / "prefix" / "out")
    assert nothing_left(tmp_path / "prefix")


def checkpoint_of_folder(folder):
    return max((folder / "run" / "checkpoints").glob("step_*"))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    short_run(tmp_path, max_steps=1)
    file = checkpoint_of_folder(tmp_path) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match="does not match its digest"):
        finalize(tmp_path / "run", tmp_path / "out")
    assert nothing_left(tmp_path)


@pytest.mark.slow
def test_who_is_killed_before_the_end_leaves_no_half_result(plain, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from trainformer.checkpointing.tools import finalized, finalizing\n"
        "finalizing.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "finalized.finalize(*sys.argv[1:])\n"
    )
    words = [sys.executable, "-c", program, str(plain.run_folder), str(tmp_path / "out")]
    assert subprocess.run(words, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert len(list(tmp_path.glob(".finalizing-out-*"))) == 1
    (tmp_path / "out").mkdir()  # empty, which is allowed
    finalize(plain.run_folder, tmp_path / "out")
    assert opened(tmp_path / "out") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_says_what_it_did(plain, tmp_path, capsys):
    run = str(plain.run_folder)
    assert main(["finalize", run, str(tmp_path / "a"), "--quantize", "int8-weight-only", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["ema"], Path(said["out"])) == (14, "callback.EMA", tmp_path / "a")
    assert 0 < said["difference"] < 0.1
    assert main(["finalize", run, str(tmp_path / "b"), "--no-ema", "--which", "best"]) == 0
    text = capsys.readouterr().out
    assert "the files give the very same outputs" in text
    assert "model.safetensors" in text


def test_errors_are_a_paragraph_and_an_exit_code(tmp_path, capsys):
    assert main(["finalize", str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: Expected a checkpoint, the folder of a run")
    assert "Traceback" not in captured.err
    assert captured.err.count("\n\n") == 0
    with pytest.raises(DataError):
        main(["finalize", str(tmp_path / "none"), str(tmp_path / "out"), "--debug"])
    assert main([]) == main(["finalise"]) == 2
    for words in (["finalize", "one"], ["finalize", "a", "b", "--which", "first"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0


def test_the_command_knows_the_recipes():
    assert tuple(RECIPES) == QUANTIZATION_RECIPES
    assert recipe_named(QAT, "quantize").group == 32


def test_help_is_fast():
    """Nothing that takes seconds is imported to say what there is."""
    code = (
        "import sys\nfrom trainformer.cli import main\n"
        "try: main(['finalize', '--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--quantize RECIPE" in out
    assert out.strip().endswith("[]")
