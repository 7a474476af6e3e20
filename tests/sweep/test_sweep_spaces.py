"""Search spaces: ranges, values, and the parameters of the function."""

import functools
import itertools

import pytest

from trainformer.core.errors import BadArgument
from trainformer.sweep import Choice, Grid, IntUniform, Sweep, Uniform, choice, grid, int_uniform, log_uniform, sweep
from trainformer.sweep import uniform as uniform_space
from trainformer.sweep.spaces import combinations, describe_spaces
from trainformer.sweep.study import total_trials


def test_constructors_are_those_of_the_plan():
    assert grid(1, 2) == Grid([1, 2])
    assert choice("a", None) == Choice(["a", None])
    assert uniform_space(0, 1) == Uniform(0, 1, log=False)
    assert log_uniform(1e-5, 1e-3) == Uniform(1e-5, 1e-3, log=True)
    assert int_uniform(1, 4) == IntUniform(1, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: choice(), "at least one value"),
        (lambda: choice(4, 8, 4), "4 is repeated"),
        (lambda: grid(1, True), "True is repeated"),
        (lambda: uniform_space(1, 0), r"Write uniform\(0, 1\)"),
        (lambda: uniform_space(1.0, 1.0), "constant"),
        (lambda: uniform_space(0, float("inf")), "finite"),
        (lambda: uniform_space("0", 1), "finite numbers"),
        (lambda: log_uniform(0, 1), "above 0"),
        (lambda: int_uniform(1, 2.5), "integers"),
    ],
)
def test_bad_spaces_are_refused(make, words):
    with pytest.raises(BadArgument, match=words):
        make()


def objective(lr, r=8, *, alpha=1):
    return lr


def test_names_must_be_parameters_of_the_function():
    with pytest.raises(BadArgument, match=r"a parameter of objective\(\), received 'learning'.*has lr, r, alpha"):
        sweep(learning=choice(1), lr=1)(objective)
    with pytest.raises(BadArgument, match="Did you mean 'alpha'"):
        sweep(lr=1, alfa=choice(1))(objective)
    with pytest.raises(BadArgument, match="a value for 'lr'"):
        sweep(r=choice(1))(objective)
    with pytest.raises(BadArgument, match="a function to sweep"):
        Sweep(3, {})
    assert sweep(lr=1, anything=choice(1, 2))(lambda lr, **rest: lr)(lr=5) == 5
    assert Sweep(functools.partial(objective, r=3), {"lr": 1}).name == "partial"


def test_a_sweep_is_still_callable_as_its_function():
    made = sweep(lr=uniform_space(0, 1), r=8)(objective)
    assert made(0.25) == 0.25
    assert made.__name__ == made.name == "objective"
    assert repr(made) == "Sweep(objective: lr=uniform(0, 1), r=8)"
    assert repr(sweep(lr=2)(made)) == "Sweep(objective: lr=2)"


def test_combinations_are_the_cartesian_product():
    spaces = {"a": grid(1, 2, 3), "x": uniform_space(0, 1), "b": choice("p", "q"), "c": 7}
    product = [{"a": a, "b": b} for a, b in itertools.product((1, 2, 3), ("p", "q"))]
    assert combinations(spaces) == product
    assert total_trials("grid", None, spaces) == 6
    assert total_trials("grid", 4, spaces) == 4
    assert total_trials("grid", 99, spaces) == 6
    assert total_trials("random", None, spaces) == 10
    with pytest.raises(BadArgument, match="method='random'"):
        total_trials("grid", None, {"x": uniform_space(0, 1)})
    with pytest.raises(BadArgument, match="n_trials"):
        total_trials("random", 0, spaces)


def test_descriptions_do_not_depend_on_the_process():
    class Adapter:
        pass

    spaces = {"kind": choice(Adapter, objective, Adapter()), "rates": (0.1, [2]), "options": {"a": None}}
    text = describe_spaces(spaces)
    assert text["kind"].count("Adapter") == 2
    assert "0x" not in text["kind"]
    assert text["rates"] == "(0.1, [2])"
    assert text["options"] == "{'a': None}"
