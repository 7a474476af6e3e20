"""Files from strangers: every library call that reads one. Each row of the table in `docs/security.md` has a test."""

import collections
import json
import pickle
import re
import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainformer.adapters import load_adapter
from trainformer.config import build_from_cfg, load_config
from trainformer.core.errors import BadArgument, DataError
from trainformer.data import load_images, load_text
from trainformer.data.folder import decode_image
from trainformer.data.text.store import TokenStore
from trainformer.models.backbones import build_backbone, load_weights
from trainformer.models.language import load_model, load_tokenizer
from trainformer.utils.tensor_files import read_tensors
from trainformer.utils.tree_files import read_tree, write_tree


class Payload:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


class Odd:
    """A tensor that `weights_only=True` cannot read, with a TypeError, but that reads as a pickle."""

    def __reduce__(self):
        function, arguments = torch.zeros(1).__reduce_ex__(2)[:2]
        return function, arguments, (torch.ones(1), 0, collections.OrderedDict(), False, False)


@pytest.fixture(autouse=True)
def _nothing_is_executed(monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(Path("torch_home").absolute()))
    yield
    assert not list(Path().rglob("executed"))


@pytest.fixture
def weights():
    torch.save([Odd(), Payload()], "weights.pth")
    return str(Path("weights.pth").absolute())


def test_the_payload_works(weights):
    torch.load(weights, weights_only=False)
    assert Path("executed").exists()
    Path("executed").unlink()


@pytest.mark.parametrize("kind", ["checkpoint_path", "file", "url", "cfg", "class"])
def test_timm(weights, kind):
    url = f"file://{weights}"
    arguments = {
        "checkpoint_path": {"checkpoint_path": weights},
        "file": {"pretrained": True, "pretrained_cfg_overlay": {"file": weights}},
        "url": {"pretrained": True, "pretrained_cfg_overlay": {"url": url, "hf_hub_id": None}},
        "cfg": {"pretrained": True, "pretrained_cfg": {"url": url}},
        "class": {"pretrained": True, "pretrained_cfg": {"type": "timm.models.PretrainedCfg", "url": url}},
    }[kind]
    with pytest.raises(BadArgument):
        build_from_cfg({"type": "timm.create_model", "model_name": "resnet10t", **arguments})
    if kind in ("url", "cfg", "class"):
        with pytest.raises(BadArgument, match="pretrained_cfg"):
            build_from_cfg({"type": "trainformer.tasks.ImageClassification", "model_kwargs": arguments})
    if kind != "class":
        pretrained = arguments.pop("pretrained", False)
        with pytest.raises((BadArgument, RuntimeError)):
            build_backbone("resnet10t", num_classes=2, in_chans=3, pretrained=pretrained, options=arguments)


def test_timm_from_a_tag(weights):
    text = f"""\
a: !factory:timm:create_model
  model_name: resnet10t
  pretrained: true
  pretrained_cfg: !factory:timm.models:PretrainedCfg {{url: 'file://{weights}'}}
"""
    Path("run.yaml").write_text(text)
    with pytest.raises(BadArgument, match="pretrained_cfg"):
        build_from_cfg(load_config("run.yaml")["a"])


def test_the_lower_bounds_are_those_of_the_table():
    """timm before 1.0.26 unpickles files, and datasets before 4 runs scripts."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert set(re.findall(r'"timm>=([\d.]+)"', text)) == {"1.0.26"}
    assert set(re.findall(r'"datasets>=([\d.]+)"', text)) == {"4.0"}
    assert set(re.findall(r'"torch>=([\d.]+)"', text)) == {"2.8"}


@pytest.mark.parametrize("name", ["weights.pth", "weights.bin", "weights.safetensors", "folder"])
def test_torch_load(weights, name):
    refused = (BadArgument, DataError, TypeError, SafetensorError, pickle.UnpicklingError)
    if name == "folder":
        Path(name).mkdir()
        Path(weights).rename("folder/model.safetensors")
    elif name != "weights.pth":
        Path(weights).rename(name)
    with pytest.raises(refused):
        build_backbone("resnet10t", num_classes=2, in_chans=3, checkpoint=name)
    with pytest.raises(BadArgument):
        build_from_cfg({"type": "torch.load", "f": name})


def test_torch_hub_is_refused():
    Path("repo").mkdir()
    Path("repo/hubconf.py").write_text("open('executed', 'w')\ndef model(): ...\n")
    with pytest.raises(BadArgument, match=r"hubconf\.py"):
        build_from_cfg({"type": "torch.hub.load", "repo_or_dir": "repo", "model": "model", "source": "local"})


def test_files_of_checkpoints(weights):
    with pytest.raises(DataError):
        read_tensors(Path(weights))
    np.savez("tree.npz", **{"0": np.array([Payload()], dtype=object)})
    array = json.loads(Path(write_tree(Path(), "other", {"a": np.zeros(2)})[0]).read_text())
    Path("tree.json").write_text(json.dumps(array))
    with pytest.raises(DataError, match="allow_pickle=False"):
        read_tree(Path(), ["tree.json", "tree.npz"])


def test_numpy_arrays():
    poisoned = np.array([Payload()], dtype=object)
    for write in (lambda f: np.save(f, poisoned, allow_pickle=True), lambda f: f.write(pickle.dumps(Payload()))):
        Path("store").mkdir(exist_ok=True)
        for name in ("offsets.npy", "supervised.npy"):
            with Path("store", name).open("wb") as file:
                write(file)
        for name in ("tokens.bin", "labels.bin"):
            Path("store", name).write_bytes(b"")
        report = {"records": 0, "sequences": 0, "dropped": 0, "truncated": 0}
        sizes = {path.name: path.stat().st_size for path in Path("store").iterdir() if path.suffix != ".json"}
        Path("store/manifest.json").write_text(json.dumps({"report": {}, "sizes": sizes, **report}))
        with pytest.raises((DataError, ValueError, TypeError, KeyError)):
            TokenStore("store")
        with Path("table.npy").open("wb") as file:
            write(file)
        with pytest.raises((BadArgument, DataError, ValueError)):
            load_text("table.npy")
        with pytest.raises(ValueError, match="pickle"):
            np.load("table.npy")  # what jax/reference.py calls on its cache


@pytest.mark.parametrize("name", ["hf:pandas", "stream:hf:pandas", "hf:webdataset"])
def test_formats_are_no_datasets(name):
    Path("train.pkl").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(DataError, match="It is that of a format"):
        load_text(name)


def test_datasets_with_a_script():
    Path("data").mkdir()
    Path("data/data.py").write_text("open('executed', 'w')\n")
    Path("data/train.pkl").write_bytes(pickle.dumps(Payload()))
    for name in ("hf:./data", "hf:./data/data.py", "stream:hf:./data", "stream:hf:./data/data.py"):
        with pytest.raises((BadArgument, DataError)):
            list(load_text(name))
    for name in ("data", "data/data.py", "data/train.pkl"):
        for load in (load_text, load_images):
            with suppress(BadArgument, DataError):  # text, at most
                list(load(name))


@pytest.fixture
def repository():
    """A model with code of its own, weights that are pickles, and a tokenizer with code."""
    Path("model").mkdir()
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")
    own = {name: "evil.Evil" if name != "AutoTokenizer" else ["evil.Evil", None] for name in names}
    config = {"model_type": "evil", "auto_map": own, "architectures": ["Evil"]}
    for name in ("config", "tokenizer_config", "processor_config", "preprocessor_config"):
        Path(f"model/{name}.json").write_text(json.dumps(config))
    Path("model/evil.py").write_text("open('executed', 'w')\nclass Evil: ...\n")
    return "model"


def test_transformers_with_code_of_a_repository(repository, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("the user was asked"))
    from trainformer.tasks.multimodal.processor import load_processor

    loads = (lambda name: load_model(name, "causal_lm"), load_tokenizer, load_processor)
    for load in loads:
        with pytest.raises(BadArgument):
            load(repository)
    for kind in ("AutoModel", "AutoTokenizer", "AutoConfig"):
        section = {"type": f"transformers.{kind}.from_pretrained", "pretrained_model_name_or_path": repository}
        with pytest.raises(BadArgument):
            build_from_cfg({**section, "trust_remote_code": True})


def test_transformers_with_pickled_weights():
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    config.save_pretrained("tiny")
    torch.save([Odd(), Payload()], "tiny/pytorch_model.bin")
    with pytest.raises(BadArgument):
        load_model("tiny", "causal_lm")


def test_peft_imports_no_module():
    import peft

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    config = peft.LoraConfig(target_modules=["0"], megatron_config={"a": 1}, megatron_core="antigravity")
    config.save_pretrained("adapter")
    save_file({"a": torch.zeros(1)}, "adapter/adapter_model.safetensors")
    with pytest.raises(DataError, match="megatron_config"):
        load_adapter(model, "adapter")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pt"])
def test_damaged_weights_of_a_backbone_or_an_adapter(name):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    Path(name).write_bytes(b"\x10" * 40)
    with pytest.raises(DataError, match=r"damaged|not loaded"):
        load_weights(model, name)
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text("{}")
    Path("adapter/adapter_model.safetensors").write_bytes(b"\x10" * 40)
    with pytest.raises(DataError, match="damaged"):
        load_adapter(model, "adapter")


def png(width, height):
    """The head of a picture of that size, and too few pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def test_pictures_that_would_fill_the_memory():
    with pytest.raises(DataError, match=r"decompression bomb|exceeds limit"):
        decode_image(png(100_000, 100_000), 3, "the picture")
    with pytest.raises(DataError):
        decode_image(pickle.dumps(Payload()), 3, "the picture")


def test_parquet_has_no_extension_types_of_python():
    """pyarrow reads unknown extension types as their storage, and unpickles none."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    payload = pickle.dumps(Payload())
    metadata = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    field = pa.field("text", pa.string(), metadata=metadata)
    table = pa.table([pa.array(["a", "b"])], schema=pa.schema([field]))
    parquet.write_table(table, "x.parquet")
    assert [record["text"] for record in load_text("x.parquet")] == ["a", "b"]


def test_yaml_builds_nothing():
    for text in ("a: !!python/object/apply:os.system [touch executed]", "a: !!python/name:os.system"):
        Path("x.yaml").write_text(text)
        with pytest.raises(BadArgument):
            load_config("x.yaml")


def test_every_row_of_the_table_has_a_test():
    page = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = list(Path(__file__).parent.rglob("test_*.py"))
    text = "".join(path.read_text() for path in files)
    assert len(named) > 20
    assert {name for name in named if f"def {name}(" not in text} <= {path.stem for path in files}
