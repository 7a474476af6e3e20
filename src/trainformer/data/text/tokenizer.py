"""Opening a tokenizer without torch.

Owns that alone. `AutoTokenizer` reads the model's configuration first, and with it all that `transformers` can do with
torch; the class that reads `tokenizer.json` does not need either. Every fast tokenizer is saved in that file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require


def open_tokenizer(source: Any) -> Any:
    """The tokenizer of a folder or name, from its `tokenizer.json`; one that is a tokenizer already as it is.

    One without a padding token keeps it so: batches are padded with anything (`rows.token_batch`).
    """
    if hasattr(source, "encode") and hasattr(source, "decode"):
        return source
    if not isinstance(source, str | Path) or not str(source):
        raise BadArgument(expected("a tokenizer, or the folder or name of one", source))
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / "tokenizer.json").is_file():
        do = "Save it as a fast tokenizer: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        raise BadArgument(
            expected(f"a tokenizer.json in '{folder}'", sorted(p.name for p in folder.iterdir())[:20], do)
        )
    transformers = require("transformers", "text", "to load tokenizers")
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder) if folder.is_dir() else str(source))
    except Exception as error:  # of the hub, the network, or a file that is no tokenizer: many types
        beside = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        close = did_you_mean(folder.name, beside)
        raise BadArgument(expected(f"a tokenizer called '{source}', or a folder with one", reason, close)) from error
