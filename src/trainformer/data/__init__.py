"""Data: sets, their metadata, splits, and resumable loading."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.metadata": ["DatasetInfo", "extract_info", "labels_of"],
        "trainformer.data.folder": ["ImageFiles", "ImageFolder"],
        "trainformer.data.image": ["ImageDataset", "find_corrupt_images", "load_images"],
        "trainformer.data.lists": ["ImageList"],
        "trainformer.data.loader": ["DatasetSource", "LoaderSource"],
        "trainformer.data.multimodal": ["ImageTextDataset"],
        "trainformer.data.numpy_inputs": ["numpy_source"],
        "trainformer.data.numpy_loader": ["NumpySource"],
        "trainformer.data.order": ["sample_rng"],
        "trainformer.data.samplers": [
            "ClassBalancedSampler",
            "EpochSampler",
            "PKSampler",
            "RepeatedAugmentSampler",
        ],
        "trainformer.data.sampler_names": ["make_sampler"],
        "trainformer.data.split": ["split_dataset"],
        "trainformer.data.webdataset": ["MappedStream", "WebDataset"],
        "trainformer.data.text.batches": ["LengthGroupedSampler"],
        "trainformer.data.text.jsonl": ["JSONLDataset"],
        "trainformer.data.text.records": ["ChatDataset", "TextDataset", "TextFileDataset"],
        "trainformer.data.text.sources": ["load_text"],
        "trainformer.data.text.vocabulary": ["train_tokenizer"],
    },
)
