"""Configs: read from Python, YAML, JSON or TOML, overridden from the command line, and built into objects.

`load_config` reads one, `build_from_cfg` builds one section, `materialize` builds everything in it. YAML may be a Jinja
template and may name objects by tags. Only `.py` files are executed when they are read, and only trusted packages are
imported when something is built.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.config.nodes": ["Call", "Config", "ConfigList", "ConfigTuple", "Place", "Var"],
        "trainformer.config.project": ["Project"],
        "trainformer.config.registry": ["REGISTRY", "Registry"],
        "trainformer.config.loading": ["load_config"],
        "trainformer.config.building": ["build_from_cfg", "materialize"],
        "trainformer.config.yaml_format": ["to_yaml"],
        "trainformer.config.rendering": ["to_dot", "to_json", "to_python", "to_tree"],
    },
)
