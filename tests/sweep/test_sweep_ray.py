"""Trials as Ray tasks, on a cluster of two nodes that loses one. Most of the time goes into starting Ray."""

import os
import threading
import time
from pathlib import Path

import pytest
from sweep_victims import trials_of

from trainformer.core.errors import BadArgument
from trainformer.sweep import current_trial, grid, sweep


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pytest.importorskip("ray")
    made = retry_start(make_cluster)
    yield made
    made.shutdown()


def make_cluster():
    from ray.cluster_utils import Cluster

    return Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})


def retry_start(start, attempts=5):
    """Ray allows its processes 30 s to start, which is not always enough on a busy machine."""
    while True:
        try:
            return start()
        except Exception as error:
            attempts -= 1
            if "timed out during startup" not in str(error) or not attempts:
                raise


@pytest.mark.slow
def test_trial_of_a_lost_node_is_retried_on_another(cluster, tmp_path):
    import ray

    # Before the second node exists: a driver connects to any node, and would die with it.
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    second = retry_start(lambda: cluster.add_node(num_cpus=1))

    @sweep(x=grid(0, 1, 2, 3))
    def experiment(x):
        trial = current_trial()
        with trial.folder_for(None, "attempts").open("a") as file:  # a run would have its checkpoints there
            file.write(str(trial.attempt))
        (tmp_path / f"{x}-{trial.attempt}").write_text(ray.get_runtime_context().get_node_id())
        trial.report(x)
        if x == 3:
            if not trial.should_stop:
                raise RuntimeError("not pruned")
            return -1
        deadline = time.monotonic() + 300
        while x < 2 and trial.attempt == 1 and not (tmp_path / "lost").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if x == 2:
            os.kill(os.getpid(), 9)
        return 10 + x

    def lose():
        deadline = time.monotonic() + 300
        while not all((tmp_path / f"{x}-1").exists() for x in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.05)
        cluster.remove_node(second)
        (tmp_path / "lost").touch()

    thread = threading.Thread(target=lose)
    thread.start()
    import optuna

    options = {"backend": "ray", "address": cluster.address, "pruner": optuna.pruners.ThresholdPruner(upper=2.5)}
    results = experiment.run(method="grid", n_parallel=2, log="none", **options)
    thread.join()
    assert ray.is_initialized()  # the sweep only shuts down a Ray that it started
    ray.shutdown()

    found = {row["config"]["x"]: row for row in results}
    assert {x: row["status"] for x, row in found.items()} == {0: "completed", 1: "completed", 2: "failed", 3: "pruned"}
    assert sorted(found[x]["attempt"] for x in (0, 1)) == [1, 2]
    assert found[2]["attempt"] == 2  # killed each time
    assert "WorkerCrashedError" in found[2]["error"]
    assert [row["metric"] for row in results] == [11, 10, 3, None]
    (lost,) = [x for x in (0, 1) if found[x]["attempt"] == 2]
    nodes = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
    assert nodes[f"{lost}-1"] == second.node_id
    assert nodes[f"{lost}-2"] == nodes[f"{1 - lost}-1"] == cluster.head_node.node_id
    (trial,) = [t for t in trials_of("experiment") if t.number == lost]
    assert "NodeDiedError" in trial.earlier[0]
    assert Path(trial.run).read_text() == "12"  # a retry has the same run folder, so a run resumes

    with pytest.raises(BadArgument, match="a trial to fit on a node"):
        experiment.run(method="grid", name="large", gpus_per_trial=8, log="none", **options)
    assert not ray.is_initialized()
    assert not list(Path("sweeps/large").glob("trials/*"))
