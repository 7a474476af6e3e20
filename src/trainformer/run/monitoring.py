"""Whether what is monitored can be found, and is better in the direction that was chosen."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any, Literal

from trainformer.run.settings import CommonSettings

logger = logging.getLogger("trainformer")

_HIGHER = re.compile(
    r"(acc|accuracy|top|f|auc|auroc|auprc|roc|ap|map|recall|precision|iou|miou|dice|bleu|chrf|rouge|rougel|meteor|r|"
    r"psnr|ssim|ndcg|mrr|knn|kappa|mcc|nmi|ari|reward|return|margin|match)\d*"
)
_LOWER = re.compile(r"(loss|perplexity|ppl|error|err|mse|rmse|mae|mape|smape|wer|cer|fid|nll|ece|brier|bpb|bpc)\d*")
_SINGLE = {"f": "f1", "r": "r2"}  # letters that mean something only with their number


def better_mode(metric: str) -> Literal["min", "max"] | None:
    """Whether lower or higher values of a metric are better, by its name; None if that does not tell.

    >>> better_mode("val/accuracy"), better_mode("val/top5_error"), better_mode("val/energy")
    ('max', 'min', None)
    """
    words = re.split(r"[^a-z0-9]+", metric.rpartition("/")[2].lower())
    if any(_LOWER.fullmatch(word) for word in words):
        return "min"
    return "max" if any(_HIGHER.fullmatch(word) and word not in _SINGLE for word in words) else None


def adapt_monitor_mode(settings: CommonSettings, passed: frozenset[str]) -> dict[str, Any]:
    """Maximise a monitored accuracy unless the user chose a mode. Returns what was changed."""
    wanted = better_mode(settings.monitor_metric)
    if wanted in (None, settings.monitor_mode) or not passed & {"monitor_metric", "monitor_mode"}:
        return {}
    if "monitor_mode" in passed:
        _warn("monitor_metric", settings.monitor_metric, "monitor_mode", settings.monitor_mode)
        return {}
    settings.monitor_mode = wanted  # type: ignore[assignment]
    return {"monitor_mode": wanted}


def warn_about_callbacks(callbacks: Iterable[Any], has_validation: bool) -> None:
    """Warn of callbacks that monitor what is never measured, or in the wrong direction."""
    for callback in callbacks:
        metric, mode = getattr(callback, "monitor", None), getattr(callback, "mode", None)
        if not isinstance(metric, str):
            continue
        name = type(callback).__name__
        if not has_validation:
            logger.warning(
                "%s monitors %s, but there is no validation data: it will never act. Pass val_data or val_split.",
                name, metric,
            )  # fmt: skip
        if mode in ("min", "max") and better_mode(metric) not in (None, mode):
            _warn(f"{name} monitors", metric, "mode", mode)


def _warn(who: str, metric: str, setting: str, mode: str) -> None:
    other, worst = ("max", "lowest") if mode == "min" else ("min", "highest")
    logger.warning(
        "%s %s with %s=%r counts the %s value as the best. Did you mean %s=%r?",
        who, metric, setting, mode, worst, setting, other,
    )  # fmt: skip
