"""Text to tokens and back, as transformers does it, without importing transformers or torch.

Begin with `tokenizer.py`; `text_stream.py` makes text of tokens as soon as it is certain.
"""
