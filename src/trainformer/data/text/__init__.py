"""Text: documents, records and conversations, read lazily, and their tokens."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.text.collate": ["LengthGroupedSampler", "collate_packed", "pad", "pair_batch", "token_batch"],
        "trainformer.data.builtin": ["corpus_names", "load_corpus"],
        "trainformer.data.text.encode": ["Encoded", "Encoder", "EncodingReport"],
        "trainformer.data.text.files": ["LineIndex", "cache_dir"],
        "trainformer.data.text.schemas": ["SCHEMAS", "Schema", "detect_schema"],
        "trainformer.data.text.tables": ["JSONLDataset"],
        "trainformer.data.text.packing": ["PackedDataset", "pack"],
        "trainformer.data.text.prepare": ["PairEncoder", "causal_tokens", "preference_tokens"],
        "trainformer.data.text.records": ["ChatDataset", "StandardRecords", "TextDataset", "TextFileDataset"],
        "trainformer.data.text.sources": ["load_text"],
        "trainformer.data.text.store": ["TokenStore", "tokenize"],
        "trainformer.data.text.tokenizer": ["open_tokenizer"],
    },
)
