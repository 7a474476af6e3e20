"""Two processes on one GPU make the same run as one."""

from functools import partial

import pytest
from cuda_ranks import SPECS, trainings

from ranks import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize("name", SPECS)
def test_the_number_of_ranks_changes_nothing_on_a_gpu(tmp_path_factory, name):
    runs = partial(trainings, names=(name,))
    found = {world: on_ranks(runs, world, tmp_path_factory.mktemp(f"cuda{world}")) for world in (1, 2)}
    alone = {key: value for key, value in found[1][0].items() if key.startswith(f"{name} ")}
    assert len(alone) > 6
    tolerance = 2e-2 if "bf16" in name else 1e-8
    for rank in found[2]:
        for key, value in alone.items():
            assert (rank[key] - value).abs().max().item() <= tolerance, key
