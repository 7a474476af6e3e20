"""TextEmbedding: pooling and losses equal to those of sentence-transformers, equal texts, ranks of the whole set."""

import json
import math
import random
from itertools import combinations

import numpy as np
import pytest
import torch
from embedding_ranks import share
from peft import PeftModel
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer, losses
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import AutoModel

from ranks import on_ranks
from text_toys import (
    WORDS,
    bert,
    chat_tokenizer,
    check_resuming,
    checkpoint_of,
    gpt2,
    llama,
    masking_tokenizer,
    sentences,
    t5,
    trainer_for,
)
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.eval.classification import spearman
from trainformer.eval.retrieval import ranking_metrics
from trainformer.losses.contrastive import TextKeys, multiple_negatives_loss
from trainformer.run import run_of
from trainformer.tasks.language.embedding import TextEmbedding, pool

TEXTS = sentences()
PAIRS = [{"anchor": text, "positive": " ".join(reversed(text.split()[: 2 + i % 5]))} for i, text in enumerate(TEXTS)]
TRIPLETS = [{**pair, "negative": TEXTS[(i + 7) % 24] + " pies"} for i, pair in enumerate(PAIRS)]
SCORED = [{"sentence1": t, "sentence2": TEXTS[(i * 5 + 1) % 24], "score": i / 24} for i, t in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def tokenizer():
    return masking_tokenizer(TEXTS)


@pytest.fixture(scope="module")
def base(tokenizer, tmp_path_factory):
    """A tiny BERT in a folder, for both libraries."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("base")
    AutoModel.from_config(bert()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def task(base, tmp_path):
    def make(model=None, **options):
        defaults = {"max_length": 64, "cache_dir": tmp_path / "tokens"}
        return TextEmbedding(base if model is None else model, **{**defaults, **options})

    return make


def peer(folder, mode="mean"):
    """The same model in sentence-transformers."""
    return SentenceTransformer(modules=[Transformer(folder, max_seq_length=64), Pooling(32, mode)], device="cpu")


def all_of(trainer):
    """All records of a run in one batch, in their order."""
    data = run_of(trainer).train_source.dataset
    return trainer.task.collate_fn([data[i] for i in range(len(data))])


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -- against sentence-transformers -------------------------------------------------------------------------


@pytest.mark.parametrize(("mine", "theirs"), [("mean", "mean"), ("cls", "cls"), ("max", "max"), ("last", "lasttoken")])
def test_embeddings_are_those_of_sentence_transformers(task, base, mine, theirs):
    wanted = peer(base, theirs).encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(task(pooling=mine, normalize=False).embed(TEXTS), wanted, rtol=1e-5, atol=1e-6)
    unit = task(pooling=mine).embed(TEXTS)
    torch.testing.assert_close(unit, torch.nn.functional.normalize(wanted), rtol=1e-5, atol=1e-6)


CASES = {
    "pairs": (PAIRS, {}, lambda m: losses.MultipleNegativesRankingLoss(m)),
    "triplets": (TRIPLETS, {}, lambda m: losses.MultipleNegativesRankingLoss(m)),
    "symmetric": (
        PAIRS,
        {"symmetric": True, "temperature": 0.1},
        lambda m: losses.MultipleNegativesRankingLoss(
            m, scale=10, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
    ),
    "scores": (SCORED, {}, lambda m: losses.CosineSimilarityLoss(m)),
    "matryoshka": (
        PAIRS,
        {"matryoshka_dims": [32, 8]},
        lambda m: losses.MatryoshkaLoss(m, losses.MultipleNegativesRankingLoss(m), [32, 8]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_sentence_transformers(task, base, case):
    data, options, make = CASES[case]
    data = [
        r for i, r in enumerate(data) if r.get("positive") not in [o.get("positive") for o in data[:i]] or "score" in r
    ]
    made = task(**options)
    batch = all_of(trainer_for(made, data))
    loss = made.train_step(batch)
    (loss.sum / loss.weight).backward()
    other = peer(base)
    other.train()
    columns = [key for key in data[0] if key != "score"]
    features = [other.preprocess([record[key] for record in data]) for key in columns]
    scores = torch.tensor([record["score"] for record in data]) if "score" in data[0] else None
    theirs = make(other)(features, scores)
    theirs.backward()
    torch.testing.assert_close(loss.sum / loss.weight, theirs, rtol=1e-5, atol=1e-6)
    mine, wanted = gradients(made.model), gradients(other[0].auto_model)
    assert set(mine) == set(wanted)
    assert len(mine) > 20
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=2e-5)  # some reach 20


def test_metrics_are_those_of_sentence_transformers(task, base):
    made = task()
    found = trainer_for(made, PAIRS, val_data=PAIRS, eval_batch_size=7).evaluate()
    queries = sorted({pair["anchor"] for pair in PAIRS})
    passages = sorted({pair["positive"] for pair in PAIRS})
    right = {q: {str(passages.index(p["positive"])) for p in PAIRS if p["anchor"] == q} for q in queries}
    evaluator = InformationRetrievalEvaluator(
        {q: q for q in queries}, {str(i): p for i, p in enumerate(passages)}, right,
        mrr_at_k=[len(passages)], ndcg_at_k=[10], accuracy_at_k=[1, 5, 10], precision_recall_at_k=[1], map_at_k=[10],
        write_csv=False,
    )  # fmt: skip
    theirs = evaluator(peer(base))
    for k in (1, 5, 10):
        assert found[f"val/recall@{k}"] == pytest.approx(theirs[f"cosine_accuracy@{k}"])
    assert found["val/mrr"] == pytest.approx(theirs[f"cosine_mrr@{len(passages)}"])
    assert found["val/ndcg@10"] == pytest.approx(theirs["cosine_ndcg@10"])


# -- ranks and equal texts ---------------------------------------------------------------------------------


def test_ranks_are_counted_one_by_one():
    rng = np.random.default_rng(0)
    for _ in range(20):
        queries, gallery = (torch.from_numpy(rng.integers(-1, 2, (n, 3)).astype(np.float32)) for n in (6, 9))
        queries[:, 0], gallery[:, 0] = 1.0, 1.0
        pairs = {(int(rng.integers(6)), int(rng.integers(9))) for _ in range(9)}
        found = ranking_metrics(queries, gallery, torch.tensor([*pairs, *pairs][:12]), recall_at=(1, 3))
        pairs = {tuple(pair) for pair in [*pairs, *pairs][:12]}
        asked, recalls, mrr, gains, losses_ = {q for q, _ in pairs}, [0, 0], 0.0, 0.0, 0.0
        unit = [torch.nn.functional.normalize(rows, dim=1) for rows in (queries, gallery)]
        for query in asked:
            right = {g for q, g in pairs if q == query}
            similar = (unit[0][query] @ unit[1].T).tolist()
            # The wrong ones first among equals.
            order = sorted(range(9), key=lambda g: (-round(similar[g], 5), g in right))
            ranks = [order.index(g) + 1 for g in right]
            recalls = [recalls[0] + (min(ranks) <= 1), recalls[1] + (min(ranks) <= 3)]
            mrr += 1 / min(ranks)
            gains += sum(1 / math.log2(r + 1) for r in ranks) / sum(1 / math.log2(i + 2) for i in range(len(right)))
            wrong = [math.exp(similar[g] / 0.05) for g in range(9) if g not in right]
            losses_ -= sum(
                math.log(math.exp(similar[g] / 0.05) / (math.exp(similar[g] / 0.05) + sum(wrong))) for g in right
            )
        assert found["recall@1"] == pytest.approx(recalls[0] / len(asked))
        assert found["recall@3"] == pytest.approx(recalls[1] / len(asked))
        assert found["mrr"] == pytest.approx(mrr / len(asked))
        assert found["ndcg@10"] == pytest.approx(gains / len(asked))
        assert found["loss"] == pytest.approx(losses_ / len(pairs), rel=1e-4, abs=1e-5)
    collapsed = ranking_metrics(torch.ones(5, 4), torch.ones(5, 4), torch.arange(5)[:, None].expand(5, 2))
    assert collapsed["recall@1"] == 0.0
    assert collapsed["mrr"] == pytest.approx(0.2)


def test_rank_correlation_with_ties():
    rng = np.random.default_rng(1)
    for _ in range(20):
        a, b = rng.integers(0, 5, (2, 30)).astype(np.float32)
        assert spearman(torch.from_numpy(a), torch.from_numpy(b)).item() == pytest.approx(
            spearmanr(a, b).statistic, abs=1e-6
        )
    assert spearman(torch.ones(4), torch.arange(4.0)) == 0


def test_equal_texts_are_not_negatives():
    generator = torch.Generator().manual_seed(0)
    a, p, n = (torch.randn(4, 8, generator=generator) for _ in range(3))
    keys = TextKeys(torch.tensor([1, 2, 3, 1]), torch.tensor([11, 12, 12, 14]), torch.tensor([[21], [11], [23], [3]]))
    found = multiple_negatives_loss(a, p, n[:, None], keys=keys, temperature=0.5, reduction="none")
    unit = [torch.nn.functional.normalize(rows, dim=1) for rows in (a, p, n)]
    # Which candidates (four positives, four negatives) each anchor has beside its own positive.
    others = {
        0: [1, 2, 4, 6, 7],  # not 3, of an equal anchor, nor 5, which is its own positive again
        1: [0, 3, 4, 5, 6, 7],  # not 2: the same text as its own positive
        2: [0, 3, 4, 5, 6],  # not 7, which is the anchor itself
        3: [1, 2, 4, 5, 6, 7],
    }
    candidates = torch.cat(unit[1:])
    for row, rivals in others.items():
        scores = (unit[0][row] @ candidates.T) / 0.5
        wanted = scores[[row, *rivals]].logsumexp(0) - scores[row]
        torch.testing.assert_close(found[row], wanted)
    back = multiple_negatives_loss(a, p, keys=keys, temperature=0.5, symmetric=True, reduction="none")
    one_way = multiple_negatives_loss(a, p, keys=keys, temperature=0.5, reduction="none")
    for row, rivals in {0: [1, 2], 1: [0, 3], 2: [0, 3], 3: [1, 2]}.items():
        scores = (unit[1][row] @ unit[0].T) / 0.5
        torch.testing.assert_close(2 * back[row] - one_way[row], scores[[row, *rivals]].logsumexp(0) - scores[row])


def test_equal_texts_have_equal_keys(task):
    data = [{"anchor": "the dog", "positive": "a fox"}, {"anchor": "a fox", "positive": "the  dog"}]
    batch = all_of(trainer_for(task(), data))
    assert torch.equal(batch["key"], batch["positive_key"].flip(0))
    assert len(batch["key"].unique()) == 2


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    alone = share(0, 1)
    for found in on_ranks(share, 2, tmp_path):
        torch.testing.assert_close(found["loss"], alone["loss"])
        torch.testing.assert_close(found["gradient"], alone["gradient"])


# -- padding, decoders, prompts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "pooling"),
    [(None, "mean"), (None, "max"), (None, "cls"), (None, "last"), (llama, "last"), (llama, "mean"), (gpt2, "last")],
)
def test_padding_changes_nothing(task, config, pooling):
    options = {} if config is None else {"model": config(), "tokenizer": chat_tokenizer()}
    made = task(pooling=pooling, **options)
    together = made.embed(TEXTS, batch_size=24)
    for text, row in zip(TEXTS, together, strict=True):
        torch.testing.assert_close(made.embed(text)[0], row, rtol=1e-4, atol=1e-5)


def test_padding_may_be_on_either_side(task):
    made = task(llama(), tokenizer=chat_tokenizer(), pooling="last", normalize=False)
    wanted = made.embed(TEXTS)
    made.text_tokenizer.padding_side = "left"
    batch = made.text_tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert not bool(batch["attention_mask"][:, 0].all())
    with torch.no_grad():
        found = made._embed_role(batch)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert torch.equal(pool(hidden, mask, "last"), torch.stack([hidden[0, 3], hidden[1, 2]]))
    assert torch.equal(pool(hidden, mask, "cls"), torch.stack([hidden[0, 2], hidden[1, 0]]))
    torch.testing.assert_close(pool(hidden, mask, "mean")[0], hidden[0, 2:].mean(0))
    hidden[0, 0] = torch.nan
    assert bool(pool(hidden, mask, "mean").isfinite().all())


def test_prompts_and_widths(task):
    made = task(query_prompt="seven ", passage_prompt="the ")
    wanted = task().embed([f"seven {t}" for t in TEXTS[:3]]) @ task().embed([f"the {t}" for t in TEXTS[3:5]]).T
    torch.testing.assert_close(made.similarity(TEXTS[:3], TEXTS[3:5]), wanted)
    batch = all_of(trainer_for(made, TRIPLETS))
    for name, prompt, key in (
        ("", "seven ", "anchor"),
        ("positive_", "the ", "positive"),
        ("negative_", "the ", "negative"),
    ):
        ids = batch[f"{name}input_ids"].flatten(0, -2)[2].tolist()
        wanted_ids = made.text_tokenizer(prompt + TRIPLETS[2][key])["input_ids"]
        assert ids[: len(wanted_ids)] == wanted_ids
    short = made.embed(TEXTS, dim=8)
    assert short.shape == (24, 8)
    torch.testing.assert_close(short.norm(dim=1), torch.ones(24))


# -- data --------------------------------------------------------------------------------------------------


def test_forms_of_records(task):
    triplet = ("the dog", "a fox", "seven pies")
    forms = [
        dict(zip(("anchor", "positive", "negative"), triplet, strict=True)),
        dict(zip(("query", "positive", "negative_1"), triplet, strict=True)),
        {"question": triplet[0], "answer": triplet[1], "negatives": [triplet[2]]},
        triplet,
    ]
    batches = [all_of(trainer_for(task(), [form, form])) for form in forms]
    for batch in batches[1:]:
        assert all(torch.equal(batch[name], batches[0][name]) for name in batches[0])
    assert batches[0]["negative_input_ids"].shape[:2] == (2, 1)
    several = [{"anchor": "a", "positive": "b", "negative_2": "dog", "negative_10": "fox", "negative_1": "pies"}] * 2
    batch = all_of(trainer_for(task(), several))
    found = task().text_tokenizer.batch_decode(batch["negative_input_ids"][0], skip_special_tokens=True)
    assert found == ["pies", "dog", "fox"]


def test_scores_are_evaluated_over_the_whole_set(task):
    made = task()
    results = [trainer_for(made, SCORED, val_data=SCORED, eval_batch_size=size).evaluate() for size in (1, 24)]
    cosines = (made.embed([r["sentence1"] for r in SCORED]) * made.embed([r["sentence2"] for r in SCORED])).sum(1)
    wanted = [r["score"] for r in SCORED]
    for found in results:
        assert found["val/spearman"] == pytest.approx(spearmanr(cosines, wanted).statistic, abs=1e-5)
        assert found["val/loss"] == pytest.approx(np.mean((cosines.numpy() - wanted) ** 2), rel=1e-4)


def test_accumulation_changes_nothing_for_scores(task):
    found = []
    for size, accumulation in ((8, 1), (2, 4)):
        trainer = trainer_for(
            task(), SCORED, batch_size=size, accumulation_steps=accumulation, max_steps=3, optimizer="sgd",
            scheduler=None, gradient_clip=None,
        )  # fmt: skip
        found.append(trainer.fit().task.embed(TEXTS))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], task().embed(TEXTS), atol=1e-4)


def test_labelled_texts(task):
    data = [{"text": text, "label": "dog" if "dog" in text else "none"} for text in TEXTS]
    made = task(loss="supcon")
    trainer = trainer_for(made, data, val_data=data, sampler="pk:2", max_steps=4, save_best=1).fit()
    assert 0 < trainer.evaluate()["val/map@r"] <= 1
    batch = all_of(trainer)
    assert len(batch["labels"].unique()) == 2


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_a_checkpoint_opens_with_both_libraries(task, tmp_path, normalize):
    made = task(normalize=normalize, query_prompt="seven ")
    trainer = trainer_for(made, PAIRS, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    opened = SentenceTransformer(str(folder), device="cpu")
    torch.testing.assert_close(opened.encode(TEXTS, convert_to_tensor=True), made.embed(TEXTS))
    assert opened.max_seq_length == 64
    asked = opened.encode(TEXTS[:2], prompt_name="query", convert_to_tensor=True)
    torch.testing.assert_close(asked, made.embed(TEXTS[:2], prompt="seven "))
    plain = AutoModel.from_pretrained(folder).eval()
    ids = torch.arange(5, 17)[None]
    made.model.eval()
    torch.testing.assert_close(plain(ids).last_hidden_state, made.model(ids).last_hidden_state)
    again = task(str(folder), normalize=normalize)
    torch.testing.assert_close(again.embed(TEXTS), made.embed(TEXTS))


@pytest.mark.parametrize("adapter", [None, LoRA(r=4, dropout=0.0), PrefixTuning(3)])
def test_an_interrupted_run_ends_with_the_same_weights(task, tmp_path, base, adapter):
    def run(folder, **more):
        made = task(adapter=adapter)
        return trainer_for(made, PAIRS, run_dir=tmp_path / folder, save_every=2, save_last=5, **more)

    whole, again = check_resuming(run)
    torch.testing.assert_close(whole.task.embed(TEXTS), again.task.embed(TEXTS))
    if adapter is not None:
        opened = PeftModel.from_pretrained(AutoModel.from_pretrained(base), checkpoint_of(whole)).eval()
        ids = torch.arange(5, 17)[None]
        whole.task.model.eval()
        mine, theirs = (m(input_ids=ids, attention_mask=torch.ones_like(ids)) for m in (whole.task.model, opened))
        torch.testing.assert_close(mine.last_hidden_state, theirs.last_hidden_state)


def test_files_and_predictions(task, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(pair) for pair in PAIRS))
    made = task()
    trainer = trainer_for(made, str(path), val_split=0.25)
    rows = trainer.predict(TEXTS)
    torch.testing.assert_close(torch.stack([row["embedding"] for row in rows]), made.embed(TEXTS), rtol=1e-4, atol=1e-5)
    assert trainer.oom == "raise"  # a batch in pieces would have fewer negatives


def test_check_finds_nothing_wrong_and_something(task):
    assert trainer_for(task(), PAIRS, val_data=PAIRS).check().ok
    for data, size, words in (
        (PAIRS, 1, "no negatives"),
        ([{"anchor": t, "positive": "the dog"} for t in TEXTS], 4, "the same text: there are no negatives"),
    ):
        report = trainer_for(task(), data, batch_size=size).check(raise_on_failure=False)
        assert words in str(report).replace("\n", " ")


def test_wrong_data_and_arguments(task):
    with pytest.raises(DataError, match=r"Record 1: .*a score from -1 to 1.*divide"):
        trainer_for(task(), [SCORED[0], {**SCORED[1], "score": 4.5}])
    with pytest.raises(DataError, match=r"Record 1: .*1 negatives, as many as the first"):
        trainer_for(task(), [{**PAIRS[0], "negative": ["a"]}, {**PAIRS[1], "negative": ["a", "b"]}])
    with pytest.raises(DataError, match="records of two texts"):
        trainer_for(task(), [{"x": "a", "y": "b"}] * 4)
    with pytest.raises(DataError, match="a text and a label"):
        trainer_for(task(), TEXTS)
    with pytest.raises(DataError, match="two texts and a score"):
        trainer_for(task(loss="cosine"), PAIRS)
    with pytest.raises(BadArgument, match="pooling to be one of"):
        task(pooling="average")
    with pytest.raises(BadArgument, match="Did you mean 'cosine'"):
        task(loss="cosin")
    with pytest.raises(BadArgument, match="temperature"):
        task(temperature=0.0)
    with pytest.raises(BadArgument, match="at most 32"):
        trainer_for(task(matryoshka_dims=[64, 32]), PAIRS)
    with pytest.raises(BadArgument, match="encoder-only or decoder-only model"):
        trainer_for(task(t5(), tokenizer=chat_tokenizer()), PAIRS)
    with pytest.raises(BadArgument, match="negatives of shape"):
        multiple_negatives_loss(torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4))


@pytest.mark.slow
def test_it_learns(task):
    """A language of seven words, and its translation. Of 32 texts that were not trained on, most are found."""
    rng = random.Random(0)
    meanings = [words for size in (2, 3, 4, 5) for words in combinations(range(7), size)]
    rng.shuffle(meanings)
    pairs = [
        {"anchor": " ".join(WORDS[w] for w in rng.sample(m, len(m))), "positive": " ".join(WORDS[7 + w] for w in m)}
        for m in meanings
    ]
    trainer = trainer_for(
        task(), pairs[:80], val_data=pairs[80:], max_steps=150, batch_size=32, lr=3e-3, precision="no"
    )
    before = trainer.evaluate()
    after = trainer.fit().evaluate()
    assert before["val/recall@1"] < 0.2
    assert after["val/recall@1"] > 0.7
    assert after["val/mrr"] > before["val/mrr"] + 0.5
    assert after["val/loss"] < before["val/loss"] / 2
