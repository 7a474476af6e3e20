"""Runs on torch: settings, set-up, data, evaluation, pre-flight check, dry runs."""
