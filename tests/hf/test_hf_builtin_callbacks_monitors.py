"""TextgenCallback, GradLogger, DivergenceDetector and PeakMemory."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from text_toys import chat_tokenizer, gpt2, reading_tokenizer, sentences, t5, trainer_for
from toys import MeanTask, classes, mlp, same, weights
from trainformer import Trainer
from trainformer.callbacks.compat.huggingface_types import TrainerControl, TrainerState
from trainformer.core.errors import BadArgument
from trainformer.hf.callbacks import DivergenceDetector, GradLogger, PeakMemory, TextgenCallback
from trainformer.loggers import BaseLogger, read_jsonl
from trainformer.tasks import CausalLM


def fit(*callbacks, task=None, **options):
    """By default full-batch steps on 64 samples."""
    defaults = {"batch_size": 64, "max_steps": 4, "lr": 1e-2, "log": "none", "log_every": 1, "run_dir": "run"}
    return Trainer(task or MeanTask(), classes(), callbacks=list(callbacks), **{**defaults, **options}).fit()


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


class Shown(BaseLogger):
    """Keeps the logged values."""

    def __init__(self):
        self.texts, self.numbers = [], []

    def init(self, config):
        pass

    def log(self, metrics, step):
        self.numbers.append((step, metrics))

    def log_text(self, key, text, step):
        self.texts.append((key, text, step))

    def finish(self, status="finished"):
        pass


# -- texts -------------------------------------------------------------------------------------------------

PROMPTS = ["the quick", "a lazy dog jumps over"]


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


def language_run(tokenizer, *callbacks, model=None, **options):
    torch.manual_seed(3)
    task = CausalLM(model or gpt2(), tokenizer=tokenizer, max_length=32, cache_dir="tokens")
    return task, trainer_for(task, sentences(), val_data=sentences()[:4], callbacks=list(callbacks), **options)


def test_texts_match_generating_each_prompt_separately(tokenizer):
    """Greedy, with the weights of that step: left padding changes nothing."""
    shown = Shown()
    copies = {}

    class Keep:
        def on_step_end(self, trainer, step, loss):
            copies[step] = copy.deepcopy(trainer.task.model).eval()

    callback = TextgenCallback("tb", PROMPTS, {"max_new_tokens": 6}, generation_steps=3)
    language_run(tokenizer, Keep(), callback, log=[shown])[1].fit()
    expected = []
    for step in (3, 6):
        for number, prompt in enumerate(PROMPTS, start=1):
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            made = copies[step].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, pad_token_id=1
            )
            text = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            expected.append((f"generated/{number}", f"{prompt}⟶{text}", step))
    assert shown.texts == expected
    assert texts_of("tb", "generated/2") == [(step, text) for key, text, step in expected if key == "generated/2"]


def test_left_padding_does_not_affect_other_prompts(tokenizer):
    """With weights large enough that each token depends on all previous ones."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(gpt2(initializer_range=0.5)).eval()
    options = {"max_new_tokens": 8}
    together = TextgenCallback(PROMPTS, generation_config=options).generate(model, tokenizer)
    alone = [TextgenCallback([prompt], generation_config=options).generate(model, tokenizer)[0] for prompt in PROMPTS]
    assert together == alone
    assert alone[0] != alone[1]


def texts_of(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    found = reader.Tensors(f"{name}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


@pytest.mark.parametrize("steps", [1, None])
def test_training_is_bitwise_the_same_with_textgen(tokenizer, steps):
    """With dropout and sampling: random state and train mode are restored."""
    plain, without = language_run(tokenizer, run_dir="plain")
    without.fit()
    sampled = TextgenCallback(PROMPTS, generation_config={"temperature": 0.7, "top_p": 0.9}, generation_steps=steps)
    watched, with_texts = language_run(tokenizer, sampled, log=[shown := Shown()], run_dir="watched")
    with_texts.fit()
    assert shown.texts
    assert watched.model.training == plain.model.training
    assert same(weights(plain), weights(watched))


def test_generation_after_each_evaluation(tokenizer):
    callback = TextgenCallback(prompts=PROMPTS[:1], generation_config={"max_new_tokens": 2}, generation_steps=None)
    language_run(tokenizer, callback, log=[shown := Shown()], eval_every="2steps")[1].fit()
    assert [step for _, _, step in shown.texts] == [2, 4, 6]


def test_sampling_options_enable_sampling():
    assert TextgenCallback(["a"], generation_config={"temperature": 0.7}).generate_kwargs(0)["do_sample"]
    assert not TextgenCallback(["a"]).generate_kwargs(0)["do_sample"]
    greedy = TextgenCallback(["a"], generation_config={"temperature": 0.7, "do_sample": False}).generate_kwargs(0)
    assert not greedy["do_sample"]


def test_generation_config_of_transformers(tokenizer):
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=3, do_sample=False)
    model = language_run(tokenizer)[0].model.eval()
    mine = TextgenCallback(PROMPTS, generation_config=config).generate(model, tokenizer)
    assert mine == TextgenCallback(PROMPTS, generation_config={"max_new_tokens": 3}).generate(model, tokenizer)


def test_all_tokens_of_an_encoder_decoder_are_shown():
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(0)
    model, reader = T5ForConditionalGeneration(t5(initializer_factor=8.0)).eval(), reading_tokenizer()
    (text,) = TextgenCallback(["1 2 3"], generation_config={"max_new_tokens": 5, "min_new_tokens": 5}).generate(
        model, reader
    )
    made = model.generate(torch.tensor([reader("1 2 3")["input_ids"]]), max_new_tokens=5, min_new_tokens=5)
    assert text
    assert text == reader.decode(made[0], skip_special_tokens=True)


def test_a_run_that_cannot_generate_fails_before_the_first_step(tokenizer):
    steps = []

    class Count:
        def on_step_begin(self, trainer, step):
            steps.append(step)

    with pytest.raises(BadArgument, match=r"a tokenizer for TextgenCallback.*processing_class"):
        fit(TextgenCallback(PROMPTS), Count())
    task = MeanTask()
    task.tokenizer = tokenizer
    with pytest.raises(BadArgument, match="a model that can generate"):
        fit(TextgenCallback(PROMPTS), Count(), task=task)
    _, trainer = language_run(tokenizer, TextgenCallback(PROMPTS, generation_config={"max_new_tokens": 80}), Count())
    with pytest.raises(BadArgument, match="positions"):
        trainer.fit()
    assert steps == []


def test_unknown_options_of_generation_are_left_out_with_a_warning(tokenizer, caplog):
    callback = TextgenCallback(PROMPTS, generation_config={"temprature": 1.0, "max_new_tokens": 2})
    _, trainer = language_run(tokenizer, callback)
    trainer.fit()
    assert (
        "'temprature' is no option of transformers' generate, and is left out. Did you mean 'temperature'"
        in caplog.text
    )
    assert callback.generation_config == {"max_new_tokens": 2}


@pytest.mark.parametrize("options", [{}, {"prompts": [""]}, {"prompts": "a", "generation_steps": 0}])
def test_textgen_rejects_invalid_arguments(options):
    with pytest.raises(BadArgument, match="TextgenCallback's"):
        TextgenCallback(**options)


# -- gradients ---------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Layers with similar names, and a parameter outside of submodules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layer = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("0", "1", "01", "10")})
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for layer in self.layer.values():
            x = torch.tanh(layer(x))
        return self.head(x) * self.scale


def norms_by_hand(task):
    """Gradient norms of the full-batch loss per module, by autograd."""
    x, y = classes()
    named = dict(task.model.named_parameters())
    grads = torch.autograd.grad(F.cross_entropy(task.model(x), y), list(named.values()))
    squares = {}
    for name, grad in zip(named, grads, strict=True):
        owner = name.rsplit(".", 1)[0] if "." in name else "(model)"
        squares[owner] = squares.get(owner, 0.0) + float((grad**2).sum())
    return {name: math.sqrt(value) for name, value in squares.items()}


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_grad_logger_norms_are_those_before_clipping(clip):
    task = MeanTask(Deep().double())
    layers = norms_by_hand(task)
    trainer = fit(
        GradLogger("tb", log_frequency=1, track_layers=["layer.0", "layer"]), task=task,
        max_steps=1, gradient_clip=clip,
    )  # fmt: skip
    record = trainer.state.log_history[0]
    wanted = {
        "grad_norm_total": math.hypot(*layers.values()),
        "grad_norm_max": max(layers.values()),
        "grad_norm_min": min(layers.values()),
        "grad_norm_mean": sum(layers.values()) / 6,
        "grad_norm/layer.0": layers["layer.0"],
        "grad_norm/layer": math.hypot(*(v for k, v in layers.items() if k.startswith("layer."))),
    }
    found = {name: value for name, value in record.items() if name.startswith("grad_norm")}
    assert found == pytest.approx(wanted, rel=1e-5)
    assert len(set(layers.values())) == 6
    assert scalars("tb", "grad_norm/layer.0") == [(1, pytest.approx(layers["layer.0"], rel=1e-5))]


def test_without_a_norm_before_clipping_norms_are_those_after():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = classes()
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    logs = {"loss": 1.0}
    callback = GradLogger(log_frequency=1, track_layers="all")
    callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)
    callback.on_log(None, TrainerState(), TrainerControl(), logs=logs)
    assert logs["grad_norm_total"] == pytest.approx(0.01, rel=1e-3)
    assert {"grad_norm/0", "grad_norm/2"} < logs.keys()


def test_grad_logger_syncs_once_per_record(monkeypatch):
    looks = []
    for name in ("tolist", "item", "__float__", "cpu", "numpy", "__bool__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, plain=plain, name=name: (looks.append(name), plain(self, *a))[1]
        )
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    callback = GradLogger(log_frequency=3, track_layers="all")
    seen = []
    for step in range(6):
        looks.clear()
        state = TrainerState(global_step=step)
        callback.on_pre_optimizer_step(None, state, TrainerControl(), model=model, optimizer=optimizer)
        seen.append(list(looks))
    assert seen == [[], [], ["tolist"], [], [], ["tolist"]]


def test_a_step_without_a_log_record_gets_a_separate_one():
    trainer = fit(GradLogger(log_frequency=3), max_steps=7, log_every=4)
    found = {r["step"]: r["grad_norm_total"] for r in read_jsonl("run/metrics.jsonl") if "grad_norm_total" in r}
    assert sorted(found) == [3, 6]
    assert [r["step"] for r in trainer.state.log_history] == [1, 4, 7]


def test_warnings_about_vanishing_and_exploding_layers_become_rarer(caplog):
    model = mlp()
    model[2].weight.data.zero_()  # no gradient flows back through it
    callback = GradLogger(log_frequency=1, exploding_threshold=0.2)
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        fit(callback, task=MeanTask(model), max_steps=9, lr=1e-12)
    warnings = [r.getMessage() for r in caplog.records if "GradLogger" in r.getMessage()]
    vanishing = [m for m in warnings if "vanishing" in m]
    assert "vanishing gradients at step 1, below 1e-07: 0 (0)" in vanishing[0]
    exploding = [m.split(", above")[0] for m in warnings if "exploding" in m]
    assert exploding == [f"GradLogger: exploding gradients at step {step}" for step in (1, 2, 4, 8)]
    assert all(": 2 (" in m for m in warnings if "exploding" in m)


def test_unknown_layers_are_errors_before_training():
    with pytest.raises(BadArgument, match=r"'layers\.0'.*Did you mean 'layer\.0'"):
        fit(GradLogger(track_layers=["layers.0"]), task=MeanTask(Deep().double()))
    with pytest.raises(BadArgument, match="track_layers"):
        fit(GradLogger(track_layers=["layer.1.0"]), task=MeanTask(Deep().double()))


@pytest.mark.parametrize("options", [{"log_frequency": 0}, {"vanishing_threshold": 1.0, "exploding_threshold": 0.5}])
def test_grad_logger_rejects_invalid_arguments(options):
    with pytest.raises(BadArgument, match="GradLogger's"):
        GradLogger(**options)


# -- divergence --------------------------------------------------------------------------------------------


def flags_set(detector, values, start=1):
    """The record at which each flag was first set."""
    flags = {}
    for number, value in enumerate(values, start=start):
        control = TrainerControl()
        detector.on_log(None, TrainerState(global_step=number), control, logs={detector.metric: value})
        for name in ("should_training_stop", "should_abort_without_save"):
            if getattr(control, name):
                flags.setdefault(name, number)
    return flags


def reference(values, factor, patience, smoothing, min_rise, warmup):
    """A direct implementation over the whole list."""
    above, averages = 0, []
    for number in range(1, len(values) + 1):
        if not math.isfinite(values[number - 1]):
            return number
        shares = [smoothing ** (number - k) for k in range(1, number + 1)]
        average = sum(s * v for s, v in zip(shares, values[:number], strict=True)) / sum(shares)
        best = min(averages, default=math.inf)
        high = number > warmup and average > max(best + (factor - 1) * abs(best), best + min_rise)
        above = above + 1 if high else 0
        if above == patience:
            return number
        averages.append(average)
    return None


FALLING = [3.0, 2.5, 2.1, 1.8, 1.6, 1.5, 1.45, 1.4]
CURVES = {
    "fine": [*FALLING, 1.38, 1.36, 1.41, 1.37],
    "a spike": [*FALLING, 6.0, 1.4, 1.4, 1.4, 1.4],
    "away": [*FALLING, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0],
    "nan": [*FALLING, math.nan, 1.4],
    "small": [0.02, 0.01, 0.01, 0.01, 0.01, 0.01, 0.03, 0.04, 0.05, 0.04],
    "negative": [-3.0, -3.5, -4.0, -4.0, -4.0, -4.0, -4.0, 0.5, 1.0, 2.0, 3.0, 4.0, 8.0, 8.0, 8.0],
}


@pytest.mark.parametrize(
    "options", [{}, {"patience": 1, "smoothing": 0.0, "warmup": 0}, {"min_rise": 0.0, "warmup": 2}]
)
@pytest.mark.parametrize("curve", CURVES)
def test_divergence_is_detected_at_the_right_record(curve, options):
    rule = {"factor": 2.0, "patience": 3, "smoothing": 0.8, "min_rise": 0.1, "warmup": 5, **options}
    wanted = reference(CURVES[curve], **rule)
    assert flags_set(DivergenceDetector(**options), CURVES[curve]).get("should_abort_without_save") == wanted


def test_the_defaults_distinguish_divergence_from_noise():
    found = {name: bool(flags_set(DivergenceDetector(), values)) for name, values in CURVES.items()}
    assert found == {"fine": False, "a spike": False, "away": True, "nan": True, "small": False, "negative": True}


class Away(MeanTask):
    """Its loss grows from step 10 on."""

    steps = 0

    def train_step(self, batch):
        self.steps += 1
        return super().train_step(batch) * (10.0 ** max(0, self.steps - 10))


@pytest.mark.parametrize("action", ["abort", "stop"])
def test_a_diverging_run_ends_and_names_the_callback(action, caplog):
    detector = DivergenceDetector(action=action, patience=2)
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        trainer = fit(detector, task=Away(), max_steps=50, save_every=5, save_best=0)
    ended = trainer.state.step
    assert 10 < ended < 15
    assert trainer.control.stopped_by == "DivergenceDetector"
    assert len([r for r in caplog.records if "DivergenceDetector: the average of loss" in r.getMessage()]) == 1
    newest = max(int(path.name.removeprefix("step_")) for path in (trainer.run_folder / "checkpoints").glob("step_*"))
    assert newest == (10 if action == "abort" else ended)


def test_action_warn_continues_the_run(caplog):
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        trainer = fit(DivergenceDetector(action="warn"), task=Away(), max_steps=30)
    assert trainer.state.step == 30
    assert len([r for r in caplog.records if "DivergenceDetector" in r.getMessage()]) == 1


def test_the_state_of_the_detector_is_restored():
    values = CURVES["away"]
    for cut in range(1, len(values)):
        first, second = DivergenceDetector(), DivergenceDetector()
        before = flags_set(first, values[:cut])
        second.load_state_dict(first.state_dict())
        after = flags_set(second, values[cut:], start=cut + 1)
        assert before or after == flags_set(DivergenceDetector(), values)


def test_other_metrics():
    assert flags_set(DivergenceDetector("eval_loss"), [math.inf]) == {"should_abort_without_save": 1}
    control = TrainerControl()
    DivergenceDetector("eval_loss").on_log(None, TrainerState(), control, logs={"loss": math.nan})
    assert control == TrainerControl()


@pytest.mark.parametrize(
    "options",
    [{"action": "halt"}, {"factor": 1.0}, {"patience": 0}, {"smoothing": 1.0}, {"min_rise": -1}, {"warmup": -1}],
)
def test_divergence_detector_rejects_invalid_arguments(options):
    with pytest.raises(BadArgument, match=f"DivergenceDetector's {next(iter(options))}"):
        DivergenceDetector(**options)


# -- memory ------------------------------------------------------------------------------------------------


def test_peak_resident_memory_is_in_every_training_record():
    import resource

    class Greedy:
        def on_step_end(self, trainer, step, loss):
            if step == 2:
                torch.ones(2**26).sum()  # 256 MiB

    fit(PeakMemory("tb"), Greedy(), max_steps=3)
    peaks = [r["peak_memory_resident"] for r in read_jsonl("run/metrics.jsonl") if "train/loss" in r]
    assert len(peaks) == 3
    assert peaks == sorted(peaks)
    assert peaks[2] == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert [value for _, value in scalars("tb", "memory/peak_memory_resident")] == pytest.approx(peaks)


@pytest.mark.gpu
@pytest.mark.parametrize("reset", [True, False])
def test_peaks_on_a_gpu_are_reset_at_each_record(reset):
    class Greedy:
        def on_step_end(self, trainer, step, loss):
            if step == 2:
                torch.empty(2**28, device="cuda")  # 1 GiB

    shown = Shown()
    fit(PeakMemory(reset=reset), Greedy(), max_steps=4, device="cuda", log=[shown])
    peaks = [metrics["peak_memory_allocated"] for _, metrics in shown.numbers if "train/loss" in metrics]
    assert [peak >= 1 for peak in peaks] == [False, True, not reset, not reset]


@pytest.mark.gpu
def test_grad_logger_on_a_gpu_syncs_once_per_record():
    model = mlp().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, dtype=torch.float64, device="cuda")).sum().backward()
    callback = GradLogger(log_frequency=2, track_layers="all")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), model=model, optimizer=optimizer)
        torch.cuda.set_sync_debug_mode("warn")
        state = TrainerState(global_step=1)
        with pytest.warns(UserWarning, match="synchronizing") as waits:
            callback.on_pre_optimizer_step(None, state, TrainerControl(), model=model, optimizer=optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
