"""The paper's models and a language model, each a Transformer at `n_iters=1`."""

from sinkformers.models.beam import Hypothesis, beam_search
from sinkformers.models.language_model import LanguageModel
from sinkformers.models.point_cloud_transformer import PointCloudTransformer
from sinkformers.models.set_transformer import SetTransformer
from sinkformers.models.text_encoder import TextEncoder
from sinkformers.models.translation_transformer import TranslationTransformer
from sinkformers.models.vit import ViT

__all__ = [
    "Hypothesis",
    "LanguageModel",
    "PointCloudTransformer",
    "SetTransformer",
    "TextEncoder",
    "TranslationTransformer",
    "ViT",
    "beam_search",
]
