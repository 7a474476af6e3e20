"""Trust: what is imported for a config, checked before the import, and attacks that must fail."""

import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import trainformer
from trainformer.config import REGISTRY, build_from_cfg, load_config, materialize
from trainformer.config.allowed import ALLOWED, CLASSES, DENIED, FUNCTIONS, may_be_asked
from trainformer.config.own_code import find_code
from trainformer.config.trust import Importer
from trainformer.core.errors import BadArgument

TRACE = "open('imported', 'w').close()\nclass Thing: pass\n"


@pytest.fixture
def foreign(tmp_path_factory, monkeypatch):
    """A package outside the project that leaves a trace when it is imported."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "foreign").mkdir()
    (folder / "foreign" / "__init__.py").write_text(TRACE)
    (folder / "foreign" / "sub.py").write_text("class Other: pass\n")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("foreign", "foreign.sub"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["foreign.Thing", "foreign:Thing", "foreign.sub.Other", "foreign.sub:Other"])
def test_a_foreign_package_is_not_imported_unless_trusted(foreign, write, path):
    config = load_config(write(f"a: {{type: '{path}'}}\nb: !singleton:{path}\n"))
    for key in "ab":
        with pytest.raises(BadArgument, match=rf"run.yaml:.*{path}.*--trust foreign, or trust=\('foreign',\)"):
            build_from_cfg(config[key])
    assert not Path("imported").exists()
    assert "foreign" not in sys.modules
    built = build_from_cfg(config["a"], trust=("foreign",))
    assert type(built).__module__.startswith("foreign")
    assert Path("imported").exists()
    assert type(materialize(config["b"], trust="foreign")) is type(built)


def test_a_config_carries_the_trust_it_was_read_with(foreign, write):
    config = load_config(write("a: {b: {type: foreign.Thing}}"), trust=["foreign"])
    assert type(build_from_cfg(config["a"]["b"])).__name__ == "Thing"
    Path("other.yaml").write_text("trust: [foreign]\na: {type: foreign.Thing}")
    with pytest.raises(BadArgument, match="--trust foreign"):
        build_from_cfg(load_config("other.yaml")["a"])


def test_trust_in_a_part_of_a_package(foreign):
    assert build_from_cfg({"type": "foreign.sub.Other"}, trust=("foreign.sub",)) is not None
    for less in ("foreign.sub", "foreig", "foreign.Th"):
        with pytest.raises(BadArgument, match="--trust foreign"):
            build_from_cfg({"type": "foreign.Thing"}, trust=(less,))


ESCAPES = [
    "os.system",
    "subprocess.run",
    "builtins.eval",
    "builtins:exec",
    "importlib.import_module",
    "pickle.loads",
    "torch.os.system",
    "torch.serialization.os.system",
    "torch.nn.modules.module.functools.partial",
    "torch.sys.exit",
    "torch:os.system",
    "torch.nn:functional.torch.os.system",
    "trainformer.config.trust.importlib.import_module",
    "trainformer.config.loading.runpy.run_path",
    "trainformer.config.load_config",
    "trainformer.config.build_from_cfg",
    "trainformer.config:materialize",
    "trainformer.core.optional.require",
    "trainformer.core.lazy:lazy_exports",
    "trainformer.cli.main",
    "trainformer.eval.neighbours.find_spec",
    "torch.nn.Linear.__class__",
    "torch.nn.Linear.__init__.__globals__",
    "torch.nn.Linear.__subclasses__",
    "torch.__builtins__.eval",
    "torch._dynamo.eval_frame",
    "torch.nn.Module._call_impl",
    "lab._private",
    "lab.system",
    "lab.os.system",
    "lab.subprocess.run",
    "lab.eval",
    "lab:eval",
    "lab:os.system",
    "lab.Net.wide.x",
    "torch.hub.load",
    "torch.nn.functional.torch.hub.load",
    "torch.nn.functional.torch.ops.load_library",
    "torch.nn.functional.torch.from_file",
    "torchvision.torch.ops.load_library",
    "lab.torch.classes.load_library",
    "lab.torch.hub.load",
    "torch.hub:load_state_dict_from_url",
    "torch.utils.model_zoo.load_url",
    "torch.utils.cpp_extension.load_inline",
    "torch.package.PackageImporter",
    "torch.jit.load",
    "torch.fx.GraphModule",
    "torch.utils.benchmark.Timer",
    "torch.utils.collect_env.run",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.multiprocessing.Process",
    "torch.multiprocessing.spawn",
    "torch.from_file",
    "torch.FloatStorage.from_file",
    "torch.cuda.CUDAPluggableAllocator",
    "torch.serialization.add_safe_globals",
    "torch.distributed.run.main",
    "torchvision.io.write_file",
    "torchvision.datasets.utils.download_url",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "transformers.utils.import_utils.direct_transformers_import",
    "transformers.utils.direct_transformers_import",
    # Two harmless functions, one of which gets attributes and one of which calls: together they are all of Python.
    "transformers.models.auto.auto_factory.getattribute_from_module",
    "torch.utils.checkpoint.checkpoint",
    "torch.nn.utils.stateless.functional_call",
    "torch.func.functional_call",
    "torch.autograd.Function.apply",
    "torch.overrides.handle_torch_function",
    "torch.nn.functional.handle_torch_function",
    "torch.nn.functional.boolean_dispatch",
    "torch.nn.Module.apply",
    "torch.nn.Module.register_forward_hook",
    "torch.Tensor.map_",
    "torch.save",
    "torch.compile",
    "torch.UntypedStorage",
    "lab.torch.futures.Future",
    "torch.utils.data.datapipes.iter.FileOpener",
    "torch.utils.data.datapipes.utils.decoder.basichandlers",
    "torch.distributed.TCPStore",
    "torch.distributed.FileStore",
    "torch.profiler.tensorboard_trace_handler",
    "torch.testing.make_tensor",
    "torchvision.utils.save_image",
    "torchvision.io.write_png",
    "torchvision.datasets.LSUN",
    "torchvision.datasets.lsun.LSUNClass",
    "torchvision.models.feature_extraction.DualGraphModule",
    "timm.optim.create_optimizer_v2",
    "timm.models.load_checkpoint",
    "timm.utils.CheckpointSaver",
    "transformers.PreTrainedConfig.to_json_file",
    "transformers.PreTrainedModel.save_pretrained",
    "transformers.GenerationConfig.push_to_hub",
    "transformers.AutoModel.register",
    "transformers.AttentionInterface.register",
    "transformers.CompileConfig",
    "transformers.utils.generic.maybe_replace_from_package",
    "transformers.processing_utils.transformers_module",
    "transformers.models.marian.convert_marian_to_pytorch.OpusState",
    "transformers.models.rag.retrieval_rag.LegacyIndex",
    "peft.save_as_lora",
    "peft.tuners.lora.tp_layer.dispatch_megatron",
    "trainformer.adapters.save_adapter",
    "trainformer.checkpoint.export_weights",
    "trainformer.live.server.ControlServer",
    "trainformer.run.folder.RunFolder",
    "trainformer.checkpointing.store.CheckpointStore",
    "trainformer.loggers.JsonlLogger.log",
    "lab.Net.wide.x",
    "lab.Pretrained.save_pretrained",
    "lab.Pretrained.register",
    "lab.torch.save",
    "lab.torch.utils.checkpoint.checkpoint",
]


@pytest.mark.parametrize("path", ESCAPES)
def test_attacks_are_refused(lab, path):
    for target in (path, path.replace(":", "."), ":".join(path.replace(":", ".").rsplit(".", 1))):
        with pytest.raises(BadArgument):  # by its name alone: a call without arguments would fail anyway
            Importer(REGISTRY).find(target)


ATTACK = """\
init: &init !factory:transformers.models.auto.auto_factory:getattribute_from_module
  - !factory:torch.nn:Linear [1, 1]
  - __init__
names: &names !factory:transformers.models.auto.auto_factory:getattribute_from_module [*init, __globals__]
get: &get !factory:transformers.models.auto.auto_factory:getattribute_from_module [*names, get]
builtins: &builtins !factory:torch.utils.checkpoint:checkpoint
  args: [*get, __builtins__]
  kwargs: {use_reentrant: false}
"""


def test_an_attack_by_harmless_functions(write):
    """Without the rule that functions are listed, this is the way to `eval`."""
    config = load_config(write(ATTACK))
    with pytest.raises(BadArgument, match=r"for configs \(run.yaml:6\), received 'torch\.utils\.checkpoint:"):
        materialize(config["builtins"])
    with pytest.raises(BadArgument, match=r"for configs \(run.yaml:5\), received 'transformers\.models\.auto.*--trust"):
        materialize(config["builtins"], trust=["torch.utils.checkpoint"])
    found = materialize(config["builtins"], trust=["transformers", "torch.utils.checkpoint"])
    assert found["eval"] is eval


def test_class_methods_that_build_are_inherited(lab):
    assert build_from_cfg({"type": "lab.Pretrained.from_pretrained", "name": "x"}) == (lab.Pretrained, "x")
    with pytest.raises(BadArgument, match=r"of transformers that is for configs, received 'lab\.Pretrained\.save"):
        build_from_cfg({"type": "lab.Pretrained.save_pretrained"})


def test_trust_in_one_function(lab):
    one = Importer(REGISTRY, ("torch.save", "lab.torch.save", "torch.hub.load", "torch.os"))
    assert one.find("torch.save") is torch.save
    assert one.find("torch.hub:load") is torch.hub.load
    for other in ("torch.hub.list", "torch.os.system", "lab.torch.save", "torch.saves"):
        with pytest.raises(BadArgument):
            one.find(other)


def test_every_package_of_ours_is_either_for_configs_or_internal():
    """A new package goes into CLASSES or into this list."""
    parts = "backends checkpoint checkpointing cli config context core distributed engine inference live report run "
    internal = {*parts.split(), "sweep", "utils"}
    for_configs = {path.split(".")[1] for path in CLASSES if path.startswith("trainformer.")}
    packages = {found.name for found in pkgutil.iter_modules(trainformer.__path__) if not found.name.startswith("_")}
    assert for_configs & internal == set()
    assert for_configs | internal == packages
    for path in FUNCTIONS:
        assert may_be_asked(f"{path}.anything")
        assert pkgutil.resolve_name(path) is not None


def test_a_path_leads_only_through_modules_and_classes(lab):
    with pytest.raises(BadArgument, match=r"received 'lab\.sly\.door'"):
        build_from_cfg({"type": "lab.sly.door"})
    assert lab.BUILT == []


@pytest.mark.slow
def test_every_denied_name_exists_and_matters():
    for path in DENIED:
        assert path.split(".")[0] in ALLOWED
        assert pkgutil.resolve_name(path) is not None
        with pytest.raises(BadArgument, match=rf"{path} .*--trust {path.split('.')[0]}"):
            build_from_cfg({"type": f"{path}.anything"})


def test_trusting_a_package_allows_all_of_it():
    assert build_from_cfg({"type": "torch.jit.Attribute", "value": 1}, trust=("torch",), type=int).value == 1
    with pytest.raises(BadArgument, match=r"torch.jit loads and compiles programs"):
        build_from_cfg({"type": "torch.jit.Attribute"})


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"type": "torch.load", "f": "x.pt", "weights_only": False}, "no weights_only=False.*--trust torch"),
        ({"type": "torch.load", "f": "x.pt", "weights_only": 0}, "weights_only"),
        ({"type": "torch.load", "f": "x.pt", "pickle_module": "pickle"}, "pickle_module"),
        ({"type": "transformers.AutoModel.from_pretrained", "trust_remote_code": True}, "--trust transformers"),
        ({"type": "transformers.pipeline", "model_kwargs": {"a": [{"trust_remote_code": "yes"}]}}, "trust_remote_code"),
        ({"type": "lab.Thing", "trust_remote_code": True}, "--trust lab"),
        ({"type": "lab.Thing", "trust_remote_code": 0}, "trust_remote_code=0"),
        ({"type": "lab.Thing", "trust_remote_code": {"type": "lab.job"}}, "trust_remote_code"),
        ({"type": "lab.Thing", "attn_implementation": "evil/kernel"}, "attn_implementation='evil/kernel'"),
        ({"type": "lab.Thing", "attn_implementation": {"text": "sdpa", "vision": "evil/kernel"}}, "repository's code"),
        ({"type": "lab.Thing", "x": {"_attn_implementation": "a/b"}}, "_attn_implementation"),
        ({"type": "lab.Thing", "use_kernels": True}, "use_kernels"),
        ({"type": "peft.LoraConfig", "megatron_core": "antigravity"}, "megatron_core='antigravity'.*any module"),
        ({"type": "trainformer.Trainer", "task": 1, "data": 2, "compile": {"options": {"cpp.cxx": ["x"]}}}, "compile"),
        ({"type": "transformers.GenerationConfig", "compile_config": {"options": {}}}, "compile_config"),
    ],
)
def test_arguments_that_run_loaded_code(lab, section, match):
    with pytest.raises(BadArgument, match=match):
        build_from_cfg(section)
    assert lab.BUILT == []


def test_dangerous_arguments_with_safe_values(lab):
    good = {"trust_remote_code": False, "attn_implementation": {"": "sdpa"}, "_attn_implementation": None}
    good |= {
        "use_kernels": None,
        "compile": {"mode": "default"},
        "megatron_core": "megatron.core",
        "weights_only": True,
    }
    assert build_from_cfg({"type": "lab.Thing", **good}).kwargs == good
    assert build_from_cfg({"type": "lab.Thing", "compile": True}).kwargs == {"compile": True}


def test_dangerous_arguments_by_position_and_in_tags(lab, write):
    Path("lab/loads.py").write_text("def load(file, weights_only=True): return weights_only\n")
    config = load_config(
        write(
            "a: !factory:lab.loads:load [x, false]\nb: !factory:lab.loads:load [x, true]\n"
            "c: !list [{weights_only: no}]\n"
        )
    )
    with pytest.raises(BadArgument, match=r"weights_only=False in a config \(run.yaml:1\)"):
        build_from_cfg(config["a"])
    assert build_from_cfg(config["b"]) is True
    assert build_from_cfg(config["a"], trust=("lab",)) is False
    assert build_from_cfg(config["b"], weights_only=False) is False  # the program may: it is no config
    inner = {"type": "lab.Thing", "trust_remote_code": True}
    assert build_from_cfg({"type": "torch.nn.Identity", "x": inner}, trust=("lab",)) is not None  # each is asked alone
    with pytest.raises(BadArgument, match="trust_remote_code"):
        build_from_cfg({"type": "torch.nn.Identity", "x": inner})
    assert materialize(config["c"]) == [{"weights_only": False}]  # plain data that nobody is called with


def test_a_checkpoint_is_read_safely_by_default(write):
    torch.save({"a": torch.ones(2)}, "x.pt")
    assert build_from_cfg({"type": "torch.load", "f": "x.pt"})["a"].sum() == 2
    assert build_from_cfg({"type": "torch.load", "f": "x.pt", "weights_only": True})["a"].sum() == 2


@pytest.mark.parametrize(
    "path",
    [
        "torch.zeros",
        "torch.device",
        "torch.nn.functional.gelu",
        "torch.nn.functional.max_pool2d",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.utils.data.DataLoader",
        "torch.utils.tensorboard.SummaryWriter",
        "torchvision.models.resnet18",
        "torchvision.transforms.v2.Resize",
        "timm.create_model",
        "transformers.AutoModel.from_pretrained",
        "transformers.TrainingArguments",
        "transformers.EarlyStoppingCallback",
        "peft.LoraConfig",
        "trainformer.Trainer",
        "trainformer.tasks.ImageClassification",
        "trainformer.callbacks:EMA",
        "torch.load",
        "torch.Generator",
        "torch.nn.init.kaiming_normal_",
        "torch.nn.Embedding.from_pretrained",
        "torch.optim.Muon",
        "torchvision.datasets.FakeData",
        "torchvision.models.get_model",
        "torchvision.models.detection.fasterrcnn_resnet50_fpn",
        "timm.data.create_transform",
        "timm.loss.LabelSmoothingCrossEntropy",
        "transformers.models.bert.modeling_bert.BertModel",
        "transformers.BitsAndBytesConfig",
        "transformers.get_scheduler",
        "transformers.DataCollatorWithPadding",
        "peft.get_peft_model",
        "trainformer.tasks.SSL.dino",
        "trainformer.data.load_images",
        "trainformer.losses.nt_xent_loss",
        "trainformer.hf.Trainer",
        "trainformer.mini:EmaHook",
    ],
)
def test_common_targets_are_allowed(path):
    assert callable(materialize({"x": load_partial(path)})["x"])


def load_partial(path):
    Path("p.yaml").write_text(f"p: !partial:{path}\n")
    return load_config("p.yaml")["p"]


def is_local(package):
    code = find_code(package)
    return code is not None and code.is_local


def test_which_code_is_that_of_the_working_directory(lab, foreign, monkeypatch):
    assert is_local("lab")
    assert not is_local("foreign")
    assert not is_local("no_such_package")
    assert not is_local("sys")
    monkeypatch.chdir("/")
    assert not is_local("os")  # all files are below /
    assert not is_local("subprocess")
    assert not is_local("yaml")
    assert not is_local("_io")


@pytest.mark.parametrize("inside", ["venv/lib/python3/site-packages", "env/lib", "usr/dist-packages"])
def test_packages_installed_in_the_project_are_not_its_own(tmp_path, monkeypatch, inside):
    folder = tmp_path / inside
    folder.mkdir(parents=True)
    (folder / "guest.py").write_text(TRACE)
    (tmp_path / "env").mkdir(exist_ok=True)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    monkeypatch.syspath_prepend(str(folder))
    assert importlib.util.find_spec("guest") is not None
    assert not is_local("guest")
    with pytest.raises(BadArgument, match="--trust guest"):
        build_from_cfg({"type": "guest.Thing"})
    assert not Path("imported").exists()


def test_a_symlink_does_not_make_a_package_own(foreign, tmp_path, monkeypatch):
    Path("linked").symlink_to(foreign / "foreign")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not is_local("linked")


def test_an_import_that_fails_says_so(tmp_path, monkeypatch):
    Path("ailing.py").write_text("import no_such_package_at_all\n")
    Path("worse.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadArgument, match=r"to import 'ailing'.*ModuleNotFoundError.*no_such_package_at_all"):
        build_from_cfg({"type": "ailing.Thing"}, trust="ailing")
    with pytest.raises(BadArgument, match=r"to import 'worse'.*ZeroDivisionError"):
        build_from_cfg({"type": "worse.Thing"}, trust="worse")
    with pytest.raises(BadArgument, match=r"received 'torhc\.nn\.Linear'\. Did you mean 'torch'"):
        build_from_cfg({"type": "torhc.nn.Linear"})
    with pytest.raises(BadArgument, match=r"received 'trainformer.tasks.nowhere', which does not exist"):
        build_from_cfg({"type": "trainformer.tasks.nowhere:Thing"})
    with pytest.raises(BadArgument, match=r"received 'torch.optm.AdamW'. There are classes of torch.nn, torch.optim,"):
        build_from_cfg({"type": "torch.optm.AdamW"})


def test_refusing_imports_nothing(write):
    """Neither torch nor the named package is imported."""
    code = (
        "import sys\nfrom trainformer.config import build_from_cfg\n"
        "for path in ('wave.open', 'torch.hub.load', 'torch.jit.load'):\n"
        "    try: build_from_cfg({'type': path})\n"
        "    except ValueError: print(path.split('.')[0] in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False"] * 3
