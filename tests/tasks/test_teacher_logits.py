"""Teacher logits on disk: trained on like a teacher in memory, complete after a kill, and nobody else's."""

import json
import os

import distillation_runs as runs
import numpy as np
import pytest
import torch
from distillation_runs import CHATS, model, store_logits, task, teacher, trainer

import text_toys as toys
from forking import SERVER
from toys import weights
from trainformer.cli import app
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.logits_store import LogitsInfo, LogitsStore, sequence_key
from trainformer.run import run_of


def stored(folder, **options):
    """A task that trains on what is stored in a folder."""
    return trainer(folder, teacher=str(folder / "logits"), lmbda=0.0, **options)


@pytest.mark.parametrize(("beta", "packing"), [(0.0, True), (0.5, False), (1.0, False)])
def test_all_tokens_on_disk_are_the_teacher_in_memory(tmp_path, beta, packing):
    """k = V in float32, at another temperature: the same weights after some steps as with the teacher's model."""
    store_logits(tmp_path, k=10**6, temperature=2.0, stored_dtype="fp32")
    options = {"beta": beta, "packing": packing, "temperature": 2.0, "max_steps": 3, "val_data": CHATS[:4]}
    # The store has no rows beyond the tokenizer; a teacher with as many has none, either.
    live = trainer(tmp_path, teacher=teacher(vocab_size=319), lmbda=0.0, **options)
    with torch.no_grad():
        for mine, full in zip(live.task._reference.parameters(), teacher().parameters(), strict=True):
            mine.copy_(full[: len(mine)])
    live.task._reference_digest = None
    ours = stored(tmp_path, **options).fit()
    assert ours.task._reference is None
    before = weights(live.task)
    live.fit()
    wanted = weights(live.task)
    for name, value in weights(ours.task).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, before[name])
    found, expected = ours.evaluate(), live.evaluate()
    assert found == pytest.approx(expected, rel=1e-4)


def test_what_is_stored_is_the_top_of_the_teacher(tmp_path):
    for dtype, tolerance in (("fp16", 1e-3), ("bf16", 1e-2)):
        found = store_logits(tmp_path / dtype, k=5, stored_dtype=dtype)
        batches = toys.batches_of(trainer(tmp_path / dtype, teacher=str(tmp_path / dtype / "logits"), lmbda=0.0))
        for batch in batches:
            with torch.no_grad():
                logs = teacher()(batch["input_ids"]).logits[..., :319].log_softmax(-1)
            values, ids = logs.topk(5, -1)
            valid = torch.nn.functional.pad(batch["labels"][:, 1:] != -100, (0, 1))
            torch.testing.assert_close(
                batch["teacher_log_probs"][valid], values[valid].float(), rtol=tolerance, atol=tolerance
            )
            assert torch.equal(batch["teacher_ids"][valid][:, 0], ids[valid][:, 0])
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        size = sum(path.stat().st_size for path in found.folder.glob("part-*"))
        assert found.info.bytes_per_token == 20
        assert tokens * 20 <= size < tokens * 20 + 2000
    large = LogitsInfo("", "", 150_000, 64, 1.0, "fp16")
    assert large.bytes_per_token == 64 * 6


def test_a_killed_command_goes_on_where_it_was(tmp_path):
    whole = store_logits(tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    process = SERVER.Process(target=runs.logits_victim, args=(str(tmp_path / "cut"), 6))
    process.start()
    process.join(280)
    assert process.exitcode == -9
    (tmp_path / "cut" / "logits" / f".part-0.safetensors.{process.pid}.tmp").write_text("half of a part")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cut" / "logits").glob("part-*")}
    assert before
    assert 0 < len(LogitsStore(tmp_path / "cut" / "logits")) < len(whole)
    with pytest.raises(DataError, match=r"none for \d+ of 18 sequences"):
        stored(tmp_path / "cut")
    calls = []
    made = teacher()
    made.register_forward_pre_hook(lambda *_: calls.append(1))
    again = store_logits(tmp_path / "cut", made)
    assert len(again) == len(whole) == 18
    assert len(calls) < 9
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cut" / "logits").glob("part-*")}
    assert before.items() <= after.items()
    assert not list((tmp_path / "cut" / "logits").glob(".*"))
    for item in (run_of(stored(tmp_path / "cut")).train_source.dataset[i] for i in range(18)):
        mine, theirs = again.find(item["input_ids"], item["labels"]), whole.find(item["input_ids"], item["labels"])
        assert np.array_equal(mine.ids, theirs.ids)
        np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=2e-3)


def test_processes_share_the_work(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    sizes = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        sizes.append(len(store_logits(tmp_path)))
    assert sizes == [9, 18]
    monkeypatch.setenv("RANK", "0")
    assert len(store_logits(tmp_path / "one", data=CHATS[:1])) == 1
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "one" / "logits" / "logits.json").unlink()
    (tmp_path / "one" / "logits").rename(tmp_path / "one" / "before")
    assert len(store_logits(tmp_path / "one", data=CHATS[:1])) == 0


def test_damage_is_found_and_mended(tmp_path):
    store_logits(tmp_path)
    (part,) = (tmp_path / "logits").glob("part-*")
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    with pytest.raises(DataError, match=r"does not match its digest\. Run `trainformer teacher-logits` again"):
        stored(tmp_path)
    assert len(store_logits(tmp_path)) == 18
    assert stored(tmp_path, max_steps=1).fit().state.step == 1
    part = next((tmp_path / "logits").glob("part-*"))
    part.write_bytes(b"no tensors")
    with pytest.raises(DataError, match="is damaged"):
        stored(tmp_path)
    part.unlink()
    with pytest.raises(DataError, match="Run `trainformer teacher-logits` first"):
        stored(tmp_path)
    (tmp_path / "logits" / "logits.json").write_text("{}")
    with pytest.raises(DataError, match="a folder of teacher logits"):
        stored(tmp_path)


def test_mismatches_are_errors(tmp_path):
    store_logits(tmp_path)
    for options, message in [
        ({"made": model(3)}, "the same teacher as that of the logits"),
        ({"k": 6}, "k=5"),
        ({"temperature": 2.0}, "temperature=1.0"),
        ({"stored_dtype": "bf16"}, "dtype='fp16'"),
    ]:
        with pytest.raises(BadArgument, match=message):
            store_logits(tmp_path, **options)
    with pytest.raises(BadArgument, match="temperature=1, as stored"):
        stored(tmp_path, temperature=2.0)
    with pytest.raises(DataError, match="They were stored with max_length=48"):
        stored(tmp_path, max_length=16)
    with pytest.raises(DataError, match="trainformer teacher-logits TEACHER DATA --out"):
        stored(tmp_path, val_data=toys.conversations(turns=3)[:4])
    with pytest.raises(BadArgument, match="a teacher in memory, to judge generated tokens"):
        task(tmp_path, teacher=str(tmp_path / "logits"))
    with pytest.raises(BadArgument, match="Leave out teacher_dtype"):
        task(tmp_path, teacher=str(tmp_path / "logits"), lmbda=0.0, teacher_dtype="bf16")
    with pytest.raises(BadArgument, match="the tokenizer that the teacher logits were stored with"):
        stored(tmp_path, tokenizer=toys.reading_tokenizer(), model=model(vocab_size=400))
    (tmp_path / "other" / "logits" / "mine").mkdir(parents=True)
    with pytest.raises(BadArgument, match="an empty folder"):
        store_logits(tmp_path / "other")

    # A run that is resumed with the logits of another teacher.
    stored(tmp_path, max_steps=2, run_dir=tmp_path / "run", save_every=2).fit()
    store_logits(tmp_path / "another", model(3))
    with pytest.raises(DataError, match="the teacher that the run started with"):
        trainer(
            tmp_path, teacher=str(tmp_path / "another" / "logits"), lmbda=0.0, max_steps=4, run_dir=tmp_path / "run"
        ).fit()


def test_the_commands(tmp_path, capsys):
    """Store, add, train and generate, as a user of the command line does."""
    teacher().float().save_pretrained(tmp_path / "teacher")
    model().float().save_pretrained(tmp_path / "student")
    for name in ("teacher", "student"):
        toys.chat_tokenizer().save_pretrained(tmp_path / name)
    for name, part in (("train", CHATS[:12]), ("more", CHATS[12:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    os.chdir(tmp_path)
    alike = ["--max-length=48", "--cache-dir=tokens"]
    for files in (["train.jsonl"], ["train.jsonl", "more.jsonl"]):
        assert app.main(["teacher-logits", "teacher", *files, "--out=logits", "--k=8", *alike, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out.splitlines()[-1])
    assert (found["sequences"], found["k"]) == (18, 8)
    assert found["tokens"] * 8 * 4 <= found["bytes"]
    assert "0 of 12 sequences to compute" in err
    assert "MB on disk" in err
    assert app.main(["teacher-logits", "student", "train.jsonl", "--out=logits", "--k=8", *alike]) == 1
    assert "the same teacher" in " ".join(capsys.readouterr().err.split())
    command = ["train", "--task=Distillation", "--model=student", "--teacher=logits", "--data=train.jsonl"]
    settings = ["--val-data=more.jsonl", "--max-steps=2", "--batch-size=4", "--run-dir=run", "--log=none"]
    assert app.main([*command, *settings, *alike, "--alpha=0.5"]) == 0
    capsys.readouterr()
    assert app.main(["evaluate", "run", "--json"]) == 0
    assert "kl" in capsys.readouterr().out


def test_a_key_is_that_of_tokens_and_supervision():
    keys = [
        sequence_key([1, 2, 3], [-100, 2, 3]), sequence_key([1, 2, 4], [-100, 2, 4]),
        sequence_key([1, 2, 3], [-100, -100, 3]), sequence_key([1, 2], [-100, 2]),
    ]  # fmt: skip
    assert len({key.tobytes() for key in keys}) == 4
