"""Finished runs as tables, figures, sentences, and one page."""
