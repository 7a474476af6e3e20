"""The package itself: lazy imports, the public surface, and no look at the network."""

import importlib
import subprocess
import sys

import pytest

PUBLIC = {
    "trainformer": "DatasetInfo Loss Mixture OptimizerConfig PipelineConfig PipelineContext Task TaskBase Trainer "
    "load log_metric seed_everything",
    "trainformer.inference": "OnnxPredictor Predictor TextPredictor load",
    "trainformer.tasks": "CLIP CPO CausalLM DPO DatasetInfo Distillation GRPO ImageClassification KTO Loss MaskedLM "
    "MetricLearning ObjectDetection OnlineDPO OptimizerConfig RewardModel SSL SemanticSegmentation Seq2Seq "
    "TabularClassification TabularRegression Task TaskBase TextClassification TextEmbedding TimeSeriesForecasting "
    "TokenClassification VLM find_task save_teacher_logits task_names",
    "trainformer.callbacks": "Callback CallbackList CollapseMonitor EMA EarlyStopping GradientMonitor ImageSamples "
    "LMEval LRFinder LRMonitor ModelCheckpoint OnlineKNN OnlineLinear ProgressBar RolloutSamples TextSamples "
    "Throughput make_callback",
    "trainformer.losses": "ArcFaceLoss Center CosFaceLoss DistillationLoss NTXentLoss NormFaceLoss PairLoss "
    "PreferenceRewards SequenceLogProbs SubCenterArcFaceLoss TeacherStates TokenLoss TopLogProbs byol_loss "
    "cosine_similarity_loss cpo_loss dino_kl dino_loss distillation_loss dpo_loss infonce_with_queue koleo_loss "
    "kto_loss linear_cross_entropy make_metric_loss make_miner make_pair_loss metric_loss_names miner_names "
    "moco_v3_loss multiple_negatives_loss negative_cosine nt_xent_loss orpo_loss pair_loss_names preference_rewards "
    "reward_model_loss sequence_log_probs simpo_loss teacher_entropy token_cross_entropy",
    "trainformer.adapters": "Adapter LoRA PrefixTuning QLoRA adapted_model adapter_state_dict is_adapted load_adapter "
    "load_adapter_state_dict merge_and_export save_adapter",
    "trainformer.models": "AvgPool BNNeck ClassToken ClassificationHead DINOHead EmbeddingModel GeM MLPHead "
    "MaskedAutoencoder MaxPool MomentumCopy byol_predictor byol_projector cosine_momentum feature_width load_weights "
    "make_pooler moco_projector moco_v3_predictor moco_v3_projector simclr_projector",
    "trainformer.models.jax": "ConvNext ConvNextConfig Decoder DecoderConfig MoEConfig ResNet ResNetConfig ViT "
    "ViTConfig apply_lora constrain generate load_lora load_model merge_lora model_from_config save_lora save_model",
    "trainformer.data.augment": "BatchAugment MultiView byol classification dino fresh_keys mae moco moco_v3 simclr "
    "uniforms",
    "trainformer.hf": "AccelTrainer BaseTrainer BaseTrainingArguments BestRun DDPTrainer DivergenceDetector "
    "EvalLoopOutput EvalPrediction FSDPTrainer GradLogger HubUnavailable InfoCallback IntervalStrategy JsonLogger "
    "MinimalTrainingArguments PeakMemory PipelineTrainer PredictionOutput PrinterCallback ProgressCallback "
    "SaveStrategy Seq2SeqTrainer Seq2SeqTrainingArguments SharingPattern StateComponent TBLogger TPTrainer "
    "TextgenCallback TrainOutput Trainer TrainerCallback TrainerControl TrainerState TrainingArguments "
    "logits_from_outputs loss_and_logits_from_outputs loss_from_outputs "
    # Forgather
    "CausalLoss CheckpointConfig CheckpointInterface CheckpointManager DataCollatorForCausalLM DistributedEnvInterface "
    "DistributedEnvironment ExtensibleTrainer InfiniteLRScheduler Project RNGState StatefulProvider "
    "StaticDistributedEnvironment TrainerControlCallback TrainingScript build_rule dependency_list "
    "find_latest_checkpoint from_project load_from_config preprocess_dataset validate_checkpoint",
    "trainformer.mini": "BaseHook BaseTrainer CheckpointingHook CudaMaxMemoryHook EmaHook ImageFileLoggerHook "
    "LoggingHook LossNoneWarning NonFiniteGradients ProgressHook WandbHook key_average map_nested_tensor",
    "trainformer.jax": "AutoEasyDeLModelForCausalLM BaseTrainer BaseTrainerProtocol DPOConfig DPOTrainer "
    "DistillationConfig DistillationTrainer EasyDeLOptimizers EasyDeLSchedulers EasyDeLState "
    "ImageClassificationTrainer KTOConfig KTOTrainer LoRAConfig ORPOConfig ORPOTrainer RewardConfig RewardTrainer "
    "SFTConfig SFTTrainer TrainState Trainer TrainerConfigureDataloaderOutput TrainerConfigureFunctionOutput "
    "TrainerConfigureModelOutput TrainingArguments",
    "trainformer.config": "Call Config ConfigList ConfigTuple Place Project REGISTRY Registry Var build_from_cfg "
    "load_config materialize to_dot to_json to_python to_tree to_yaml",
    "trainformer.report": "write_report",
    "trainformer.sweep": "Choice Grid IntUniform PruneTrial Sweep SweepRecord Trial Uniform choice current_trial "
    "find_sweep grid int_uniform list_sweeps log_uniform read_sweep sweep uniform",
    "trainformer.live": "ControlError RunInfo ask describe list_runs",
    "trainformer.utils": "MemoryRecord count_parameters get_device move_to_device profile_memory seed_everything",
    "trainformer.context": "ConfigSource ConfigValue Lifecycle PipelineConfig PipelineContext ScopedContext "
    "StateEntry UnknownKey record_arguments",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_surface_is_frozen(module):
    package = importlib.import_module(module)
    assert sorted(package.__all__) == sorted(PUBLIC[module].split())
    for name in package.__all__:
        assert getattr(package, name) is not None
        assert name in dir(package)


@pytest.mark.parametrize(
    "module", ["trainformer.loggers", "trainformer.data", "trainformer.eval", "trainformer.engine"]
)
def test_every_listed_name_exists(module):
    package = importlib.import_module(module)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "module",
    [
        "trainformer",
        "trainformer.tasks",
        "trainformer.callbacks",
        "trainformer.loggers",
        "trainformer.engine",
        "trainformer.losses",
        "trainformer.models",
        "trainformer.eval",
        "trainformer.data",
        "trainformer.data.augment",
        "trainformer.cli",
        "trainformer.hf",
        "trainformer.mini",
        "trainformer.jax",
        "trainformer.config",
        "trainformer.live",
        "trainformer.report",
        "trainformer.sweep",
    ],
)
def test_importing_is_light(module):
    """Neither torch nor anything else that takes seconds is imported before it is used."""
    heavy = "torch", "transformers", "timm", "torchvision", "wandb", "mlflow", "jax", "sklearn"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_nothing_of_the_jax_side_imports_torch():
    """Every module of it, with torch made impossible to import."""
    code = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # importing it fails from now on
sides = ["jax", "backends.jax", "losses.jax", "models.jax", "run.jax"]
packages = [importlib.import_module("trainformer." + side) for side in sides]
names = [info.name for p in packages for info in pkgutil.walk_packages(getattr(p, "__path__", []), p.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(packages), len(names))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 30
