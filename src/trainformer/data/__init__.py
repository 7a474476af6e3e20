"""Data: datasets, metadata, splits, samplers and resumable loading."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.core.types": ["DataSource", "HostBatch"],
        "trainformer.data.metadata": ["DatasetInfo", "extract_info"],
        "trainformer.data.labels": ["labels_of"],
        "trainformer.data.folder": ["ImageFiles", "ImageFolder", "find_corrupt_images"],
        "trainformer.data.image": ["ImageDataset", "load_images"],
        "trainformer.data.lists": ["ImageList"],
        "trainformer.data.loader": ["DatasetSource", "LoaderSource"],
        "trainformer.data.mixture.mixture": ["Mixture"],
        "trainformer.data.multimodal": ["ImageTextDataset"],
        "trainformer.data.numpy_loader": ["NumpySource", "numpy_source"],
        "trainformer.data.order": ["sample_rng"],
        "trainformer.data.samplers": [
            "ClassBalancedSampler",
            "EpochSampler",
            "PKSampler",
            "RepeatedAugmentSampler",
            "make_sampler",
        ],
        "trainformer.data.split": ["split_dataset"],
        "trainformer.data.webdataset": ["MappedStream", "WebDataset"],
        "trainformer.data.text.collate": ["LengthGroupedSampler"],
        "trainformer.data.text.tables": ["JSONLDataset"],
        "trainformer.data.text.records": ["ChatDataset", "TextDataset", "TextFileDataset"],
        "trainformer.data.text.sources": ["load_text"],
        "trainformer.data.text.tokenizer": ["train_tokenizer"],
    },
)
