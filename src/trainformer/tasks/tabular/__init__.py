"""Regression and classification of table rows."""
