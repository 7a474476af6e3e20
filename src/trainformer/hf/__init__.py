"""The entry point for users of the HF `Trainer` and of Forgather: a model, arguments, datasets and callbacks.

>>> from trainformer.hf import Trainer, TrainingArguments
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.hf.arguments": [
            "BaseTrainingArguments",
            "MinimalTrainingArguments",
            "Seq2SeqTrainingArguments",
            "TrainingArguments",
        ],
        "trainformer.hf.base_trainer": ["BaseTrainer"],
        "trainformer.hf.hub": ["HubUnavailable"],
        "trainformer.hf.search": ["BestRun"],
        "trainformer.hf.trainer": [
            "AccelTrainer",
            "DDPTrainer",
            "FSDPTrainer",
            "PipelineTrainer",
            "TPTrainer",
            "Trainer",
        ],
        "trainformer.hf.seq2seq": ["Seq2SeqTrainer"],
        "trainformer.hf.outputs": [
            "EvalLoopOutput",
            "EvalPrediction",
            "PredictionOutput",
            "TrainOutput",
            "logits_from_outputs",
            "loss_and_logits_from_outputs",
            "loss_from_outputs",
        ],
        "trainformer.hf.causal": ["CausalLoss", "DataCollatorForCausalLM", "preprocess_dataset"],
        "trainformer.hf.checkpoint_manager": [
            "CheckpointConfig",
            "CheckpointInterface",
            "CheckpointManager",
            "ExtensibleTrainer",
            "RNGState",
            "StatefulProvider",
            "find_latest_checkpoint",
            "validate_checkpoint",
        ],
        "trainformer.hf.projects": [
            "DistributedEnvInterface",
            "DistributedEnvironment",
            "StaticDistributedEnvironment",
            "TrainingScript",
            "build_rule",
            "dependency_list",
            "from_project",
            "load_from_config",
        ],
        "trainformer.hf.schedules": ["InfiniteLRScheduler"],
        "trainformer.config.project": ["Project"],
        "trainformer.hf.callbacks": [
            "DivergenceDetector",
            "GradLogger",
            "InfoCallback",
            "JsonLogger",
            "PeakMemory",
            "PrinterCallback",
            "ProgressCallback",
            "TBLogger",
            "TextgenCallback",
            "TrainerControlCallback",
        ],
        "trainformer.callbacks.compat.huggingface_types": [
            "IntervalStrategy",
            "SaveStrategy",
            "TrainerCallback",
            "TrainerControl",
            "TrainerState",
        ],
        "trainformer.checkpointing": ["SharingPattern", "StateComponent"],
    },
)
