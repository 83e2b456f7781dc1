"""Hugging Face transformers: importing this module makes `attn_implementation="sinkhorn"` known.

import sinkformers.hf
model = AutoModel.from_pretrained(path, attn_implementation="sinkhorn")  # settings from config.sinkhorn
"""

from sinkformers.conversion.registry import register

register()
