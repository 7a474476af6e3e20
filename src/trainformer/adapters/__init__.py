"""Adapters: parameter-efficient fine-tuning of a frozen model (LoRA, QLoRA, prefix tuning), through peft."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.adapters.base": ["Adapter", "adapted_model", "is_adapted"],
        "trainformer.adapters.export": ["merge_and_export"],
        "trainformer.adapters.lora": ["LoRA"],
        "trainformer.adapters.prefix": ["PrefixTuning"],
        "trainformer.adapters.qlora": ["QLoRA"],
        "trainformer.adapters.state": ["adapter_state_dict", "load_adapter", "load_adapter_state_dict", "save_adapter"],
    },
)
