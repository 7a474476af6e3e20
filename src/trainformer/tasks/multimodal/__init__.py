"""Tasks on images together with text."""
