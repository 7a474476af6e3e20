"""Losses: margin softmax, contrastive, distillation, pairs, tokens and preferences."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.losses.margin": ["ArcFaceLoss", "CosFaceLoss", "NormFaceLoss", "SubCenterArcFaceLoss"],
        "trainformer.losses.contrastive": [
            "NTXentLoss",
            "cosine_similarity_loss",
            "infonce_with_queue",
            "moco_v3_loss",
            "multiple_negatives_loss",
            "nt_xent_loss",
        ],
        "trainformer.losses.distillation": [
            "Center",
            "byol_loss",
            "dino_kl",
            "dino_loss",
            "koleo_loss",
            "negative_cosine",
            "teacher_entropy",
        ],
        "trainformer.losses.divergence": ["DistillationLoss", "TeacherStates", "TopLogProbs", "distillation_loss"],
        "trainformer.losses.metric_learning": [
            "PairLoss",
            "make_metric_loss",
            "make_miner",
            "make_pair_loss",
            "metric_loss_names",
            "miner_names",
            "pair_loss_names",
        ],
        "trainformer.losses.preference": [
            "PreferenceRewards",
            "cpo_loss",
            "dpo_loss",
            "kto_loss",
            "orpo_loss",
            "preference_rewards",
            "reward_model_loss",
            "simpo_loss",
        ],
        "trainformer.losses.tokens": [
            "SequenceLogProbs",
            "TokenLoss",
            "linear_cross_entropy",
            "sequence_log_probs",
            "token_cross_entropy",
        ],
    },
)
