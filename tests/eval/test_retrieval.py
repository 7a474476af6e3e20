"""Neighbours, retrieval metrics, kNN and clustering against PML, lightly, scikit-learn, faiss and plain loops."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import sklearn.cluster
import sklearn.metrics
import sklearn.neighbors
import torch
from lightly.utils.benchmarking import knn_predict as lightly_knn
from lightly.utils.debug import std_of_l2_normalized
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from pytorch_metric_learning.utils.inference import CustomKNN
from torch import Tensor
from torch.nn import functional as F

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import MissingDependency
from trainformer.eval import (
    NeighbourIndex,
    faiss_retrieval_metrics,
    feature_statistics,
    kmeans,
    knn_accuracy,
    knn_predict,
    nearest,
    neighbours,
    nmi,
    normalized_mutual_info,
    retrieval,
    retrieval_metrics,
)

EXACT = ["torch", "exact"]


def clustered(n: int, classes: int, dim: int = 16, seed: int = 0, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rows around one centre per class; class sizes are very different, and the last class is a singleton."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.linspace(0, 1, n).pow(2.5)
    labels = (share * (classes - 1)).long()
    labels[-1] = classes - 1
    labels = labels[torch.randperm(n, generator=generator)]
    centers = torch.randn(classes, dim, generator=generator)
    return centers[labels] + noise * torch.randn(n, dim, generator=generator), labels * 7 + 3


def by_hand(queries: Tensor, gallery: Tensor, k: int, exclude_self: bool) -> list[list[int]]:
    """All similarities of one query, sorted by (-similarity, index) in Python."""
    q, g = F.normalize(queries.double(), dim=1), F.normalize(gallery.double(), dim=1)
    found = []
    for i, row in enumerate((q @ g.T).tolist()):
        order = sorted((-round(s, 9), j) for j, s in enumerate(row) if not (exclude_self and i == j))
        found.append([j for _, j in order[:k]])
    return found


@pytest.mark.parametrize("index", EXACT)
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("k", [1, 5, 99])
def test_nearest_matches_a_full_sort(index: str, exclude_self: bool, k: int) -> None:
    rows, _ = clustered(100, 5)
    found = nearest(rows, rows, k, exclude_self=exclude_self, index=index)  # type: ignore[arg-type]
    assert found.indices.tolist() == by_hand(rows, rows, k, exclude_self)
    units = F.normalize(rows, dim=1)
    torch.testing.assert_close(found.similarities, (units @ units.T).gather(1, found.indices))


@pytest.mark.parametrize("index", EXACT)
@pytest.mark.parametrize("exclude_self", [False, True])
@pytest.mark.parametrize("k", [1, 3, 20, 63])
def test_ties_are_ordered_by_index(index: str, exclude_self: bool, k: int) -> None:
    """Rows of 0 and 1 in 4 dimensions: most are duplicates, also across the end of the list, and some are zero."""
    rows = torch.randint(0, 2, (64, 4), generator=torch.Generator().manual_seed(1)).float()
    found = nearest(rows, rows, k, exclude_self=exclude_self, index=index)  # type: ignore[arg-type]
    assert found.indices.tolist() == by_hand(rows, rows, k, exclude_self)


@pytest.mark.parametrize("index", EXACT)
def test_collapsed_embeddings_have_the_first_rows_as_neighbours(index: str) -> None:
    found = nearest(torch.ones(50, 3), torch.ones(50, 3), 2, exclude_self=True, index=index)  # type: ignore[arg-type]
    assert found.indices[:3].tolist() == [[1, 2], [0, 2], [0, 1]]
    assert set(map(tuple, found.indices[3:].tolist())) == {(0, 1)}


@pytest.mark.parametrize("index", EXACT)
@pytest.mark.parametrize("k", [1, 7, 40])
def test_blocks_do_not_change_the_result(index: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = clustered(500, 5)
    rows[100:130] = rows[0]  # ties over several blocks
    want = nearest(rows, rows, k, exclude_self=True, index="torch")
    monkeypatch.setattr(neighbours, "_COLUMNS", 64)
    monkeypatch.setattr(neighbours, "_CELLS", 1000)
    got = nearest(rows, rows, k, exclude_self=True, index=index)  # type: ignore[arg-type]
    torch.testing.assert_close(got.similarities, want.similarities)
    assert (got.indices == want.indices).float().mean() > 0.999  # the last bit of a product may depend on its place


@pytest.mark.parametrize("columns", [16 * 40, 16 * 40 + 5, 4096])
@pytest.mark.parametrize("k", [1, 2, 9])
def test_grouped_topk_matches_topk(columns: int, k: int) -> None:
    values = torch.randn(20, columns)
    got, place = neighbours._largest(values, k)
    assert torch.equal(got, values.topk(k, dim=1).values)
    assert torch.equal(values.gather(1, place), got)


def test_the_full_similarity_matrix_never_exists() -> None:
    """200,000 rows would need 160 GB. Counted are the sizes of what torch makes on the way."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple | list) else (out,):
                if isinstance(one, Tensor):
                    self.bytes = max(self.bytes, one.untyped_storage().nbytes())
            return out

    gallery = torch.randn(200_000, 2)
    with Largest() as seen:
        nearest(gallery[:300], gallery, 10, index="torch")
    assert seen.bytes <= 64 * 2**20


def test_ivf_finds_98_percent_on_clustered_data() -> None:
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(200, 32, generator=generator)
    rows = centers.repeat(100, 1) + 0.5 * torch.randn(20_000, 32, generator=generator)
    index = NeighbourIndex(rows, "ivf")
    queries, own = rows[:2000], torch.arange(2000)
    got = index.search(queries, 10, exclude=own)
    want = NeighbourIndex(rows, "torch").search(queries, 10, exclude=own)
    hits = (got.indices.unsqueeze(2) == want.indices.unsqueeze(1)).any(2).float().mean().item()
    assert hits > 0.98
    assert not (got.indices == own.unsqueeze(1)).any()
    assert index._faiss.nprobe < index._faiss.nlist / 2  # it is not exact by looking everywhere
    assert not index.is_exact


def test_ivf_searches_exactly_without_clusters() -> None:
    rows = torch.randn(3000, 64)
    index = NeighbourIndex(rows, "ivf")
    got = index.search(rows[:100], 10)
    assert torch.equal(got.indices, nearest(rows[:100], rows, 10, index="torch").indices)
    assert index.is_exact


def test_ivf_fills_lists_longer_than_what_it_probes() -> None:
    """Classes larger than a list: the recall asked for is kept for long lists too."""
    rows, labels = clustered(2000, 4, noise=0.3)
    got = retrieval_metrics(rows, labels, index="ivf")
    want = retrieval_metrics(rows, labels, index="torch")
    assert got == pytest.approx(want, abs=0.02)


def test_auto_is_torch_for_small_sets_and_ivf_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(100, 4)
    assert NeighbourIndex(rows).kind == "torch"
    monkeypatch.setattr(neighbours, "_IVF_ROWS", 100)
    monkeypatch.setattr(neighbours, "_IVF_QUERIES", 50)
    assert NeighbourIndex(rows).kind == "ivf"
    assert NeighbourIndex(rows, num_queries=10).kind == "torch"
    monkeypatch.setattr(neighbours, "find_spec", lambda name: None)
    assert NeighbourIndex(rows).kind == "torch"


def test_without_faiss_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(MissingDependency, match=r"index='exact'.*trainformer\[retrieval\]"):
        nearest(torch.eye(3), torch.eye(3), 1, index="exact")
    assert nearest(torch.eye(3), torch.eye(3), 1).indices.flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_scale_and_dtype_do_not_matter(scale: float) -> None:
    rows, _ = clustered(60, 3)
    want = nearest(rows, rows, 3, exclude_self=True).indices
    assert torch.equal(nearest(rows * scale, rows * scale, 3, exclude_self=True).indices, want)
    assert torch.equal(nearest(rows.double(), rows, 3, exclude_self=True).indices, want)


def test_autocast_does_not_reach_the_similarities() -> None:
    rows, _ = clustered(60, 3)
    want = nearest(rows, rows, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = nearest(rows, rows, 3)
    assert torch.equal(got.similarities, want.similarities)


def oracle(rows: Tensor, labels: Tensor, gallery: Tensor | None = None, others: Tensor | None = None) -> dict:
    """PML with its own exact neighbours by cosine similarity; labels made small, since it compares them as floats."""
    search = CustomKNN(CosineSimilarity(), batch_size=None)
    calculator = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
        knn_func=search,
    )
    found = calculator.get_accuracy(rows, labels, gallery, others)
    return {
        "precision@1": found["precision_at_1"],
        "r_precision": found["r_precision"],
        "map@r": found["mean_average_precision_at_r"],
    }


@pytest.mark.parametrize("index", [*EXACT, "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_metrics_of_one_set_match_pml(index: str, seed: int) -> None:
    rows, labels = clustered(400, 9, seed=seed, noise=1.5)
    got = retrieval_metrics(rows, labels, index=index)  # type: ignore[arg-type]
    for name, value in oracle(rows, labels).items():
        assert got[name] == pytest.approx(value, abs=1e-6)
    assert got["recall@1"] == got["precision@1"]
    assert got["queries_without_match"] == 1
    if index == "exact":
        assert faiss_retrieval_metrics(rows, labels) == got


@pytest.mark.parametrize("index", EXACT)
def test_metrics_of_queries_in_a_gallery_match_pml(index: str) -> None:
    rows, labels = clustered(500, 9, noise=1.5)
    queries, gallery = slice(0, 150), slice(150, None)
    labels[:3] = 1000  # a class the gallery does not have
    got = retrieval_metrics(
        rows[queries],
        labels[queries],
        gallery=rows[gallery],
        gallery_labels=labels[gallery],
        index=index,  # type: ignore[arg-type]
    )
    for name, value in oracle(rows[queries], labels[queries], rows[gallery], labels[gallery]).items():
        assert got[name] == pytest.approx(value, abs=1e-6)
    lost = ~(labels[queries].unsqueeze(1) == labels[gallery]).any(1)
    assert got["queries_without_match"] == lost.sum().item() >= 3


def test_recall_counts_queries_with_a_hit() -> None:
    rows, labels = clustered(200, 30, noise=2.5)
    lists = by_hand(rows, rows, 199, exclude_self=True)
    answerable = [i for i in range(200) if (labels == labels[i]).sum() > 1]
    got = retrieval_metrics(rows, labels, recall_at=(1, 4, 50, 1000))
    for k in (1, 4, 50, 1000):
        hits = [any(labels[j] == labels[i] for j in lists[i][:k]) for i in answerable]
        assert got[f"recall@{k}"] == pytest.approx(sum(hits) / len(hits))
    assert got["recall@1000"] == 1.0
    assert got["recall@1"] < 0.9


def test_small_chunks_do_not_change_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = clustered(400, 9, noise=1.5)
    want = retrieval_metrics(rows, labels)
    monkeypatch.setattr(retrieval, "_CELLS", 300)
    assert retrieval_metrics(rows, labels) == pytest.approx(want, abs=1e-12)


def test_every_query_is_in_one_chunk_with_enough_neighbours() -> None:
    relevant = torch.tensor([1, 1, 2, 3, 9, 50, 51, 4000, 900_000])
    rows = torch.arange(len(relevant)) + 5
    parts = list(retrieval._query_chunks(rows, relevant, least=3))
    assert torch.equal(torch.cat([p for p, _ in parts]), rows)
    assert all(k >= max(3, relevant[part - 5].max()) for part, k in parts)
    assert all(len(part) == 1 or len(part) * k <= retrieval._CELLS for part, k in parts)
    assert parts[0][1] == 3  # the short lists are not made as long as the longest


def test_duplicates_are_found_and_the_query_is_not() -> None:
    """Two copies of each image: dropping the first hit would drop the copy, every second time."""
    rows = torch.randn(20, 8).repeat_interleave(2, dim=0)
    labels = torch.arange(20).repeat_interleave(2)
    for index in EXACT:
        assert retrieval_metrics(rows, labels, index=index)["recall@1"] == 1.0  # type: ignore[arg-type]


def test_knn_accuracy_matches_sklearn() -> None:
    """Two classes and an odd k: there are no ties, which scikit-learn breaks otherwise."""
    rows, _ = clustered(300, 2, noise=2.0)
    labels = (rows[:, 0] + torch.randn(300) > 0).long()
    judge = sklearn.neighbors.KNeighborsClassifier(5, metric="cosine", algorithm="brute")
    judge.fit(rows[:200], labels[:200])
    want = judge.score(rows[200:], labels[200:])
    got = knn_accuracy(rows[200:], labels[200:], 5, gallery=rows[:200], gallery_labels=labels[:200])
    assert got == pytest.approx(want)
    assert 0.6 < got < 1


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_matches_a_loop(weighted: bool) -> None:
    rows, labels = clustered(120, 6, noise=2.0)
    units = F.normalize(rows.double(), dim=1)
    right = 0
    for i, best in enumerate(by_hand(rows, rows, 4, exclude_self=True)):
        votes: dict[int, float] = {}
        for j in best:
            weight = math.exp((units[i] @ units[j]).item() / 0.1) if weighted else 1.0
            votes[labels[j].item()] = votes.get(labels[j].item(), 0.0) + weight  # type: ignore[index, arg-type]
        right += max(votes, key=lambda name: votes[name]) == labels[i].item()  # of equal ones the first: the nearest
    got = knn_accuracy(rows, labels, 4, weighted=weighted, temperature=0.1)
    assert got == pytest.approx(right / 120)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_knn_predict_matches_lightly(temperature: float) -> None:
    rows, labels = clustered(400, 9, noise=2.0)
    labels = (labels - 3) // 7
    units = F.normalize(rows, dim=1)
    want = lightly_knn(units[300:], units[:300].T, labels[:300], num_classes=9, knn_k=20, knn_t=temperature)[:, 0]
    got = knn_predict(rows[300:], rows[:300], labels[:300], k=20, temperature=temperature, num_classes=9)
    assert torch.equal(got, want)
    assert len(got.unique()) > 3


def test_a_small_temperature_does_not_overflow() -> None:
    """exp(1 / 0.001) is beyond float32; the nearest row alone then decides."""
    rows, labels = clustered(200, 5)
    got = knn_predict(rows[100:], rows[:100], labels[:100], k=20, temperature=1e-3)
    assert torch.equal(got, labels[nearest(rows[100:], rows[:100], 1).indices.squeeze(1)])


def test_more_neighbours_than_rows_takes_all() -> None:
    rows, labels = torch.randn(4, 3), torch.tensor([1, 1, 1, 0])
    assert knn_predict(rows, rows, labels, k=50, temperature=100.0).tolist() == [1, 1, 1, 1]
    assert knn_accuracy(rows, labels, 50) == 0.75


@pytest.mark.parametrize("seed", range(4))
def test_mutual_information_matches_sklearn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 6, 300), rng.integers(0, 4, 300)
    b = np.where(rng.random(300) < 0.25 * seed, a, b)
    want = sklearn.metrics.normalized_mutual_info_score(a, b)
    assert normalized_mutual_info(torch.from_numpy(a), torch.from_numpy(b) + 10**6) == pytest.approx(want, abs=1e-12)


def test_mutual_information_of_equal_and_independent_labels() -> None:
    ones = torch.ones(5, dtype=torch.long)
    assert normalized_mutual_info(ones, ones) == sklearn.metrics.normalized_mutual_info_score(ones, ones) == 1.0
    assert normalized_mutual_info(ones, torch.arange(5)) == 0.0


@pytest.mark.parametrize("clusters", [3, 20])
def test_kmeans_is_as_good_as_sklearn(clusters: int) -> None:
    rows, _ = clustered(600, 15, noise=0.7)
    rows = rows + 100.0
    got = kmeans(rows, clusters, seed=1)
    want = sklearn.cluster.KMeans(clusters, n_init=3, random_state=0).fit(rows.double())
    assert got.inertia < 1.05 * want.inertia_
    # The inertia is that of the assignment and centres returned, and every row has its nearest centre.
    distances = torch.cdist(rows.double(), got.centers.double()).square()
    assert got.inertia == pytest.approx(distances.min(1).values.sum().item(), rel=1e-4)
    assert torch.equal(distances.argmin(1), got.assignment)
    assert torch.equal(kmeans(rows, clusters, seed=1).assignment, got.assignment)


def test_kmeans_of_duplicates_and_of_many_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.eye(4).repeat(10, 1)
    for limit in (512, 2):  # k-means++, and rows at random: two of which may be the same
        monkeypatch.setattr("trainformer.eval.clustering._PLUSPLUS_CLUSTERS", limit)
        assert kmeans(rows, 4).inertia == pytest.approx(0, abs=1e-8)
        assert math.isfinite(kmeans(rows, 7).inertia)  # more clusters than different rows
    assert kmeans(rows, 40).assignment.shape == (40,)


def test_nmi_is_1_for_clear_classes_and_small_for_noise() -> None:
    rows, labels = clustered(400, 6, dim=32, noise=0.1)
    large = torch.isin(labels, labels[labels.bincount()[labels] > 20])
    assert nmi(rows[large], labels[large]) == pytest.approx(1.0)
    assert nmi(torch.randn(400, 32), labels) < 0.1
    assert nmi(rows, labels, seed=3) == nmi(rows, labels, seed=3)


def test_feature_std_matches_lightly_and_detects_collapse() -> None:
    rows = torch.randn(4000, 64)
    got = feature_statistics(rows)
    assert got["feature_std"] == pytest.approx(std_of_l2_normalized(rows).item() * 8, rel=1e-5)
    assert got["feature_std"] == pytest.approx(1.0, abs=0.01)
    assert feature_statistics(torch.ones(50, 8)) == pytest.approx({"feature_std": 0.0, "effective_rank": 1.0}, abs=1e-5)
    assert feature_statistics(torch.zeros(50, 8)) == {"feature_std": 0.0, "effective_rank": 0.0}


@pytest.mark.parametrize("shape", [(300, 20), (20, 300)])
def test_effective_rank_is_that_of_the_singular_values(shape: tuple[int, int]) -> None:
    rows = torch.randn(*shape) @ torch.diag(torch.linspace(1, 0, shape[1]))
    values = torch.linalg.svdvals(rows.double())
    share = values / values.sum()
    want = math.exp(-sum(p * math.log(p) for p in share.tolist() if p > 0))
    assert feature_statistics(rows)["effective_rank"] == pytest.approx(want, rel=1e-6)


def test_low_rank_is_detected() -> None:
    rows = torch.randn(500, 3) @ torch.linalg.qr(torch.randn(64, 3)).Q.T
    assert feature_statistics(rows)["effective_rank"] == pytest.approx(3.0, abs=0.05)


def test_bad_embeddings_and_labels_are_rejected() -> None:
    rows, labels = torch.randn(10, 4), torch.arange(10) % 2
    broken = rows.clone()
    broken[2:5, 1] = math.nan
    for function in (retrieval_metrics, knn_accuracy, nmi):
        with pytest.raises(DataError, match="NaN or infinity in 3 of 10 rows"):
            function(broken, labels)
        with pytest.raises(DataError, match=r"one per row of the embeddings \(10\), received 9"):
            function(rows, labels[:9])
        with pytest.raises(BadArgument, match="integers of shape"):
            function(rows, labels.float())
        with pytest.raises(BadArgument, match=r"floats of shape \(N, D\)"):
            function(rows.long(), labels)
        with pytest.raises(DataError, match="at least"):
            function(rows[:1], labels[:1])
        with pytest.raises(DataError, match="at least"):
            function(rows[:0], labels[:0])
    with pytest.raises(DataError, match="at least 2 rows, received 1"):
        feature_statistics(rows[:1])


def test_bad_arguments_are_rejected() -> None:
    rows, labels = torch.randn(10, 4), torch.arange(10) % 2
    with pytest.raises(BadArgument, match="Did you mean 'exact'"):
        nearest(rows, rows, 1, index="exat")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match="k from 1 to 9"):
        nearest(rows, rows, 10, exclude_self=True)
    with pytest.raises(BadArgument, match="k from 1 to 10"):
        nearest(rows, rows, 0)
    with pytest.raises(BadArgument, match="of one width, received '3 and 4'"):
        nearest(rows[:, :3], rows, 1)
    with pytest.raises(BadArgument, match="the queries as the gallery"):
        nearest(rows[:5], rows, 1, exclude_self=True)
    with pytest.raises(BadArgument, match="one excluded row per query"):
        NeighbourIndex(rows).search(rows, 1, exclude=torch.arange(3))
    with pytest.raises(BadArgument, match="recall to be a share"):
        NeighbourIndex(rows, recall=0.0)
    with pytest.raises(BadArgument, match="together, received 'no gallery_labels'"):
        retrieval_metrics(rows, labels, gallery=rows)
    with pytest.raises(BadArgument, match="recall_at"):
        retrieval_metrics(rows, labels, recall_at=(0, 1))
    with pytest.raises(BadArgument, match="temperature"):
        knn_predict(rows, rows, labels, temperature=0.0)
    with pytest.raises(BadArgument, match="from 0 to 1, received 5"):
        knn_predict(rows, rows, labels + 4, num_classes=2)
    with pytest.raises(BadArgument, match="k to be a positive integer"):
        knn_accuracy(rows, labels, 0)
    with pytest.raises(BadArgument, match="clusters from 1 to 10"):
        kmeans(rows, 11)


def test_queries_that_cannot_be_answered_are_an_error_not_nan() -> None:
    rows = torch.randn(5, 3)
    with pytest.raises(DataError, match="Every label occurs once"):
        retrieval_metrics(rows, torch.arange(5))
    with pytest.raises(DataError, match="name the same classes"):
        retrieval_metrics(rows, torch.arange(5), gallery=rows, gallery_labels=torch.arange(5) + 5)


@pytest.mark.gpu
def test_results_do_not_depend_on_the_device() -> None:
    rows, labels = clustered(500, 9, noise=1.5)
    there, names = rows.cuda(), labels.cuda()
    assert retrieval_metrics(there, names) == pytest.approx(retrieval_metrics(rows, labels), abs=1e-3)
    assert knn_accuracy(there, names) == pytest.approx(knn_accuracy(rows, labels), abs=0.01)
    assert nearest(there, there, 3, index="exact").indices.is_cuda
    assert nmi(there, names) == pytest.approx(nmi(rows, labels), abs=0.05)
