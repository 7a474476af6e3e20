"""Tests of the JAX side; the devices they run on are set up in the conftest.py at the root."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="needs trainformer[jax]")
pytest.importorskip("flax", reason="needs trainformer[jax]")
