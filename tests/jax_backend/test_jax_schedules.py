"""Schedules on JAX against torch, transformers and hand-written formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.optimization import get_inverse_sqrt_schedule

from trainformer.backends.jax.schedules import NAMES, make_schedule
from trainformer.backends.torch.schedules import make_schedule as make_torch_schedule
from trainformer.core.errors import BadArgument

LR = 0.3


def torch_rates(name, total, ratio):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = make_torch_schedule(name, optimizer, total, ratio)
    return [schedule.apply(step) for step in range(total + 5)]


def traced(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)))


@pytest.mark.parametrize(("total", "ratio"), [(40, 0.1), (37, 0.25), (1, 0.0), (5, 1.0)])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "onecycle"])
def test_every_step_matches_torch(name, total, ratio):
    schedule = make_schedule(name, LR, total, warmup_ratio=ratio)
    wanted = torch_rates(name, total, ratio)
    assert np.allclose([schedule(step) for step in range(total + 5)], wanted, rtol=1e-12, atol=1e-12)
    assert np.allclose(traced(schedule, total + 5), wanted, rtol=0, atol=1e-6 * LR)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warmup_steps_and_warmup_ratio_are_equivalent(name):
    by_steps, by_share = (make_schedule(name, LR, 40, **warm) for warm in ({"warmup_steps": 8}, {"warmup_ratio": 0.2}))
    rates = [by_steps(step) for step in range(45)]
    assert rates == [by_share(step) for step in range(45)]
    assert rates[0] == LR / 8
    assert rates[7] == LR


@pytest.mark.parametrize(("warmup", "timescale"), [(5, None), (0, None), (3, 50)])
def test_inverse_sqrt_matches_transformers_after_the_warmup(warmup, timescale):
    options = {} if timescale is None else {"timescale": timescale}
    schedule = make_schedule("inverse_sqrt", LR, None, warmup_steps=warmup, options=options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    theirs = get_inverse_sqrt_schedule(optimizer, warmup, timescale)
    for step in range(60):
        if step >= warmup:
            assert schedule(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_wsd_is_constant_until_the_decay():
    schedule = make_schedule("wsd", LR, 20, warmup_steps=4, end=0.1, options={"decay_ratio": 0.25})
    assert [schedule(step) for step in range(4)] == pytest.approx([LR / 4, LR / 2, LR * 3 / 4, LR])
    assert [schedule(step) for step in range(4, 16)] == pytest.approx([LR] * 12)
    assert [schedule(step) for step in (16, 18, 20, 99)] == pytest.approx([0.26, 0.18, 0.1, 0.1])
    assert np.allclose(traced(schedule, 25), [schedule(step) for step in range(25)], atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine", "onecycle"])
def test_learning_rate_end(name):
    schedule = make_schedule(name, LR, 20, warmup_steps=4, end=0.03)
    last = 19 if name == "onecycle" else 20
    assert schedule(last) == pytest.approx(0.03)
    assert schedule(1000) == pytest.approx(0.03)
    if name == "cosine":
        assert schedule(12) == pytest.approx(0.03 + (LR - 0.03) * 0.5 * (1 + math.cos(math.pi / 2)))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_on_the_host_uses_no_device(name):
    schedule = make_schedule(name, LR, 10, warmup_steps=2)
    assert not isinstance(schedule(3), jax.Array)
    assert isinstance(schedule(jnp.int32(3)), jax.Array)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("warm_up_cosine", "cosine"),
        ("warmup_linear", "linear"),
        ("constant_with_warmup", "constant"),
        ("one_cycle", "onecycle"),
        ("warmup_stable_decay", "wsd"),
        ("Cosine", "cosine"),
        (None, "constant"),
    ],
)
def test_aliases(spelled, name):
    one, other = (make_schedule(each, LR, 12, warmup_steps=3) for each in (spelled, name))
    assert [one(step) for step in range(12)] == [other(step) for step in range(12)]


def test_a_function_of_the_step_is_used_as_it_is():
    def mine(step):
        return 0.1 / (step + 1)

    assert make_schedule(mine, LR) is mine
    with pytest.raises(BadArgument, match="Put them into the function"):
        make_schedule(mine, LR, warmup_steps=5)


def test_unknown_length_allows_schedules_without_an_end_only():
    assert make_schedule("constant", LR, None, warmup_steps=4)(1) == LR / 2
    for name in ("linear", "cosine", "onecycle", "wsd"):
        with pytest.raises(BadArgument, match=f"{name}.*needs the number of steps.*max_steps"):
            make_schedule(name, LR, None)
    with pytest.raises(BadArgument, match="needs the number of steps"):
        make_schedule("constant", LR, None, warmup_ratio=0.1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"spec": "cosin"}, "Did you mean 'cosine'"),
        ({"spec": 3}, "a function of the step, received 3"),
        ({"spec": "linear", "warmup_steps": 2, "warmup_ratio": 0.1}, "received both"),
        ({"spec": "constant", "end": 0.1}, "a schedule that has an end"),
        ({"spec": "linear", "options": {"power": 2}}, "'linear' takes, received 'power'. It takes none"),
        ({"spec": "wsd", "options": {"decay_ratio": 1.5}}, "decay_ratio"),
    ],
)
def test_invalid_arguments_are_refused(arguments, words):
    with pytest.raises(BadArgument, match=words):
        make_schedule(lr=LR, total_steps=10, **arguments)
