"""Text: documents, records and conversations from files, read when asked for, and the tokens that are made of them."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.text.batches": ["LengthGroupedSampler", "collate_packed", "pad"],
        "trainformer.data.text.corpus": ["corpus_names", "load_corpus"],
        "trainformer.data.text.encode": ["Encoded", "Encoder", "Report"],
        "trainformer.data.text.files": ["LineIndex", "cache_dir"],
        "trainformer.data.text.schemas": ["FORMS", "Form", "detect", "form_of"],
        "trainformer.data.text.jsonl": ["JSONLDataset"],
        "trainformer.data.text.packing": ["PackedDataset", "pack"],
        "trainformer.data.text.preferences": ["PairEncoder"],
        "trainformer.data.text.prepare": ["causal_tokens", "preference_tokens"],
        "trainformer.data.text.records": ["ChatDataset", "StandardRecords", "TextDataset", "TextFileDataset"],
        "trainformer.data.text.rows": ["pair_batch", "token_batch"],
        "trainformer.data.text.sources": ["load_text"],
        "trainformer.data.text.store": ["TokenStore", "tokenize"],
        "trainformer.data.text.tokenizer": ["open_tokenizer"],
    },
)
