"""Finished cells as tables, figures, sentences, and one page."""
