"""Pages that show attention: scores of a model, and the weights computed from them in the browser."""

from sinkformers.viewing.view import AttentionView, view_attention

__all__ = ["AttentionView", "view_attention"]
