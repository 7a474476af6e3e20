"""Tables of what a config may name without being trusted, and how they are read.

Of the allowed packages mostly classes may be built, and only those for models, data, optimizers and callbacks. A
function can do anything, so the few useful ones are listed by name: with two harmless ones, one that gets an attribute
and one that calls a function, all of Python is in reach.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

ALLOWED = ("trainformer", "torch", "torchvision", "timm", "transformers", "peft")

# Modules whose classes may be built, also where they re-export them from private modules.
_PARTS = {
    "torch": "nn optim utils.data utils.tensorboard distributions amp",
    "torchvision": "models transforms datasets ops tv_tensors",
    "timm": "models layers loss optim scheduler data",
    "trainformer": "adapters callbacks data eval hf jax loggers losses mini models tasks trainer",
}
CLASSES = (
    *(f"{package}.{part}" for package, parts in _PARTS.items() for part in parts.split()),
    "transformers",
    "peft",
)

# Packages of which only top-level classes may be built: their modules have many internal ones.
AT_THE_TOP = ("transformers", "peft")

# Functions and single classes by the module that exports them; None: all that it defines.
FUNCTIONS: dict[str, str | None] = {
    "torch": "Generator Size Tensor arange as_tensor device empty eye from_numpy full linspace load logspace ones rand "
    "randint randn randperm tensor zeros",
    "torch.nn.functional": None,
    "torch.nn.init": None,
    "torchvision.models": None,
    "torchvision.models.detection": None,
    "torchvision.models.optical_flow": None,
    "torchvision.models.quantization": None,
    "torchvision.models.segmentation": None,
    "torchvision.models.video": None,
    "timm": "create_model",
    "timm.data": "create_transform",
    "transformers": "default_data_collator get_constant_schedule get_constant_schedule_with_warmup "
    "get_cosine_schedule_with_warmup get_cosine_with_hard_restarts_schedule_with_warmup get_inverse_sqrt_schedule "
    "get_linear_schedule_with_warmup get_polynomial_decay_schedule_with_warmup get_scheduler get_wsd_schedule pipeline "
    "set_seed",
    "peft": "get_peft_model prepare_model_for_kbit_training",
    "trainformer.adapters": "load_adapter",
    "trainformer.data": "extract_info load_images load_text make_sampler split_dataset",
    "trainformer.eval": None,
    "trainformer.hf": "build_rule dependency_list from_project load_from_config logits_from_outputs "
    "loss_and_logits_from_outputs loss_from_outputs preprocess_dataset",
    "trainformer.losses": None,
    "trainformer.models": None,
    "trainformer.utils": "count_parameters get_device seed_everything",
}

# Class methods that build; of our own classes all of them.
METHODS = ("from_pretrained", "from_config")

# Denied inside of what is allowed, with the reason; nothing is imported to find out.
DENIED = {
    "torch.hub": "runs a repository's hubconf.py",
    "torch.utils.cpp_extension": "compiles and loads C++",
    "torch.utils.data.datapipes": "reads pickles and opens any file",
    "torch.package": "runs code packed with a model",
    "torch.fx": "makes functions from text",
    "torch.jit": "loads and compiles programs",
    "torch.ops": "loads shared libraries",
    "torch.classes": "loads shared libraries",
    "torch.multiprocessing": "starts processes",
    "torch.distributed": "starts processes and runs what others send",
    "torch.serialization.add_safe_globals": "lets checkpoints run code",
    "torchvision.datasets.LSUN": "reads pickles",
    "torchvision.datasets.lsun": "reads pickles",
    "torchvision.datasets.utils": "downloads and unpacks files",
    "torchvision.models.feature_extraction": "makes functions from text",
    "transformers.dynamic_module_utils": "runs a repository's code",
    "transformers.testing_utils": "runs commands",
    "transformers.utils.import_utils": "imports any module",
    "transformers.cli": "runs commands",
    "transformers.CompileConfig": "chooses the programs that compile",
    "transformers.RagRetriever": "reads pickles",
    "trainformer.cli": "runs commands",
    "trainformer.config": "could trust other packages",
    "trainformer.core": "imports any module",
}


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(good) and value == good for good in values)


def _names_no_repository(value: Any) -> bool:
    """Attention may be the name of a repository, whose code would run; also for parts of a model."""
    if isinstance(value, Mapping):
        return all(map(_names_no_repository, value.values()))
    return value is None or (isinstance(value, str) and "/" not in value)


def _has_no_options(value: Any) -> bool:
    return value is None or isinstance(value, bool | str) or (isinstance(value, Mapping) and "options" not in value)


def _names_no_url(value: Any) -> bool:
    """timm reads what a URL leads to safely first, but unpickles it if that fails with a TypeError (as of 1.0.30)."""
    return value is None or isinstance(value, str) or (isinstance(value, Mapping) and not {"url", "type"} & set(value))


# Arguments of any call: which values they may have, and why not others.
ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "trust_remote_code": (_only(False, None), "runs a repository's code"),
    "allow_all_kernels": (_only(False, None), "runs a repository's code"),
    "use_kernels": (_only(False, None), "runs a repository's code"),
    "kernel_config": (_only(None), "runs a repository's code"),
    "custom_generate": (_only(None), "runs a repository's code"),
    "attn_implementation": (_names_no_repository, "runs a repository's code"),
    "_attn_implementation": (_names_no_repository, "runs a repository's code"),
    "_attn_implementation_internal": (_names_no_repository, "runs a repository's code"),
    "megatron_core": (_only("megatron.core"), "imports any module"),
    "import_allowlist": (_only(None), "imports any module"),
    "compile": (_has_no_options, "chooses the programs that compile"),
    "compile_config": (_has_no_options, "chooses the programs that compile"),
    "pretrained_cfg": (_names_no_url, "would let a file run code"),
    "pretrained_cfg_overlay": (_names_no_url, "would let a file run code"),
    "weights_only": (_only(True), "would let a checkpoint run code"),
    "pickle_module": (_only(), "chooses what reads pickles"),
    "allow_pickle": (_only(False), "would let a file run code"),
}


def lies_in(path: str, parts: Any) -> bool:
    """Whether a dotted path is one of the parts, or leads into one."""
    return any(path == part or path.startswith(f"{part}.") for part in parts)


def may_be_asked(path: str) -> bool:
    """Whether a path of an allowed package can lead to something that may be built, without importing it."""
    words = path.split(".")
    if any(word.startswith("convert_") for word in words[1:-1]):  # scripts of transformers
        return False
    parts = (*CLASSES, *(module for module in FUNCTIONS if module not in ALLOWED))
    return len(words) == 2 or words[1][:1].isupper() or lies_in(path, parts)


def may_be_built(thing: Any, home: str) -> bool:
    """Whether something that an allowed package defines in the module `home` may be built."""
    if _is_listed(thing, home):
        return True
    if isinstance(thing, type):
        package = home.split(".")[0]
        at_top = package not in AT_THE_TOP or getattr(sys.modules.get(package), thing.__name__, None) is thing
        return at_top and lies_in(home, CLASSES)
    owner = class_of_method(thing)
    if owner is None or not may_be_built(owner, owner.__module__):
        return False
    return thing.__name__ in METHODS or home.startswith("trainformer.")


def class_of_method(thing: Any) -> type | None:
    """The class of a class method."""
    owner = getattr(thing, "__self__", None)
    return owner if inspect.ismethod(thing) and isinstance(owner, type) else None


def _is_listed(thing: Any, home: str) -> bool:
    name = getattr(thing, "__name__", "_")
    for module, names in FUNCTIONS.items():
        offered = sys.modules.get(module)
        if offered is None or name.startswith("_"):
            continue
        if names is not None:
            listed = name in names.split()
        else:  # what is written in C names torch, or a private part, as its module
            its_own = home == "torch" or lies_in(home, (module, "torch._C"))
            listed = its_own and name in getattr(offered, "__all__", (name,))
        if listed and getattr(offered, name, None) is thing:
            return True
    return False


def offers(package: str) -> str:
    """What a config may name of an allowed package, for an error message."""
    classes = [part for part in CLASSES if lies_in(part, (package,))]
    functions = [part for part in FUNCTIONS if lies_in(part, (package,))]
    return f"There are classes of {', '.join(classes)}, and some functions of {', '.join(functions)}."
