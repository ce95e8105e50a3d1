"""GGUF, llama.cpp's format: the container, the block types, and the way back to Hugging Face's names and files.

``container`` reads a file's header, ``names`` and ``architectures`` translate, ``config`` and
``tokenizer`` rebuild the files of a folder, ``weights`` decodes rows of a tensor (``ops.gguf`` has the operators).
"""
