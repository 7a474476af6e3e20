"""Uploads to the hub of HF, and model cards. Nothing is uploaded unless the user asks for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.core.optional import require
from trainformer.utils.files import write_atomically

logger = logging.getLogger("trainformer")

_SKIPPED = ["_*", ".*", "runs/*", "**/.*"]


class HubMixin:
    """Methods of the HF Trainer that talk to the hub."""

    hub_model_id: str | None = None

    def init_hf_repo(self: Any, token: str | None = None) -> None:
        """Create the repository that `hub_model_id` (default: the name of `output_dir`) names."""
        if not self.is_world_process_zero:
            return
        args = self.args
        name = args.hub_model_id or Path(args.output_dir).absolute().name
        hub = require("huggingface_hub", "hf", "to upload to the hub")
        url = self._ask_hub(
            lambda: hub.create_repo(
                repo_id=name, token=token or args.hub_token, private=args.hub_private_repo, exist_ok=True
            )
        )
        self.hub_model_id = url.repo_id

    def push_to_hub(
        self: Any,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write the model and a model card to `output_dir`, and upload them. `kwargs` are those of the model card.

        Returns the address of the commit; with ``blocking=False`` a future of it.
        """
        args = self.args
        name = kwargs.pop("model_name", None) or Path(args.output_dir).absolute().name
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero:
            return None
        self.create_model_card(model_name=name, **kwargs)
        self.callback_handler.on_push_begin(args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        return self._upload(args.output_dir, commit_message, blocking, token, revision, [*_SKIPPED, "checkpoint-*"])

    def _upload(
        self: Any,
        folder: str,
        message: str,
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        skipped: list[str] | None = None,
        path_in_repo: str | None = None,
    ) -> Any:
        hub = require("huggingface_hub", "hf", "to upload to the hub")
        return self._ask_hub(
            lambda: hub.upload_folder(
                repo_id=self.hub_model_id,
                folder_path=folder,
                path_in_repo=path_in_repo,
                commit_message=message,
                token=token or self.args.hub_token,
                revision=revision or self.args.hub_revision,
                run_as_future=not blocking,
                ignore_patterns=skipped,
            )
        )

    def _push_checkpoint(self: Any, path: str) -> None:
        """After a checkpoint was written: upload what `hub_strategy` says, in the background."""
        strategy, busy = str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)), self._push_in_progress
        if not self.args.push_to_hub or strategy == "end" or not self.is_world_process_zero:
            return
        if busy is not None and not busy.done() and not self.args.hub_always_push:
            return
        if busy is not None and busy.done():
            busy.result()  # raises if the last upload failed
        if self.hub_model_id is None:
            self.init_hf_repo()
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        state_files = ["optimizer.pt", "scheduler.pt", "rng*", "*.rank*.pt", "callback.*", "context.pt", "backend.pt"]
        self._push_in_progress = self._upload(path, message, False, skipped=[*_SKIPPED, *state_files])
        if strategy in ("checkpoint", "all_checkpoints"):
            place = "last-checkpoint" if strategy == "checkpoint" else Path(path).name
            self._push_in_progress = self._upload(path, message, False, path_in_repo=place)

    _push_in_progress: Any = None

    def _ask_hub(self: Any, request: Any) -> Any:
        """Send a request to the hub. Without a connection or permission the error says what is left undone."""
        try:
            return request()
        except (OSError, ValueError) as error:  # offline, no token, no permission
            raise HubUnavailable(
                f"Nothing was uploaded: the hub cannot be reached, or refused ({type(error).__name__}: {error}). The "
                f"files are in {os.path.abspath(self.args.output_dir)}. Log in with `hf auth login`, unset "
                "HF_HUB_OFFLINE, and call push_to_hub() again; or set push_to_hub=False."
            ) from error

    def create_model_card(
        self: Any,
        language: str | None = None,
        license: str | None = None,
        tags: Any = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: Any = None,
        dataset_tags: Any = None,
        dataset: Any = None,
        dataset_args: Any = None,
    ) -> None:
        """Write a model card, ``README.md``, with the hyperparameters and results of the run, to `output_dir`."""
        if not self.is_world_process_zero:
            return
        if model_name is not None and not isinstance(model_name, str):
            raise BadArgument(expected("model_name to be a text", model_name))
        summary = require("transformers.modelcard", "hf", "for model cards").TrainingSummary.from_trainer(
            self,
            language=language,
            license=license,
            tags=tags,
            model_name=model_name or Path(self.args.output_dir).absolute().name,
            finetuned_from=finetuned_from,
            tasks=tasks,
            dataset_tags=dataset_tags,
            dataset=dataset,
            dataset_args=dataset_args,
        )
        write_atomically(Path(self.args.output_dir) / "README.md", summary.to_model_card().encode())


class HubUnavailable(TrainformerError, OSError):
    """The hub cannot be reached, or refused a request."""
