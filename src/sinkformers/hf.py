"""Support for Hugging Face transformers: importing this module registers `attn_implementation="sinkhorn"`.

    import sinkformers.hf
    model = AutoModel.from_pretrained(path, attn_implementation="sinkhorn")  # settings from config.sinkhorn

`AnnealTau` is a callback for the Trainer.
"""

from sinkformers.conversion.hugging_face_registry import register
from sinkformers.conversion.trainer_callback import AnnealTau

__all__ = ["AnnealTau"]

register()
