"""HF configs and weight names of the families of models. Import names from the submodules, each read on first use."""
