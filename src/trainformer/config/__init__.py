"""Configs: read from Python, YAML, JSON or TOML, changed from the command line, and built into objects.

Reading is `load_config`; building is `build_from_cfg` (one section, as registries do it) or `materialize` (whatever a
config holds). YAML may be a template and may name the objects by tags. Only `.py` files are executed when they are
read, and only packages that are trusted are imported when something is built.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.config.nodes": ["Call", "Config", "ConfigList", "Place"],
        "trainformer.config.registry": ["REGISTRY", "Registry"],
        "trainformer.config.loading": ["load_config"],
        "trainformer.config.building": ["build_from_cfg", "materialize"],
        "trainformer.config.yaml_format": ["to_yaml"],
        "trainformer.config.rendering": ["to_dot", "to_json", "to_python", "to_tree"],
    },
)
