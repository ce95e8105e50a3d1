"""The model card: the README.md of a quantized folder, made from its ledger, its config and the source's README.md.

Nothing here reads a file or needs the Hub's client, so that ``quantize`` writes a card as it writes the ledger.
"""

from kbitq.card.card import Subject, model_card
from kbitq.card.command import command_of, is_repository, source_in
from kbitq.card.front_matter import source_text

__all__ = ["Subject", "command_of", "is_repository", "model_card", "source_in", "source_text"]
