"""What a saved model has in addition to its weights and its code: an image processor and a model card."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from hf_sparseprior.base.files import write_text
from hf_sparseprior.saving.card import CARD, model_card
from hf_sparseprior.saving.processor import PROCESSOR, own_processor_settings

# Of the card that transformers makes for a repository that has none.
EMPTY = "This model card has been automatically generated."
AUTOMATIC = "<!-- written on saving, and again on every saving until this line is removed -->"


def complete_folder(folder: str | os.PathLike, config: Any) -> None:
    """Write the image processor of a saved model if there is none, and the model card unless somebody edited it."""
    folder = Path(folder)
    if not (folder / PROCESSOR).exists():
        write_text(folder / PROCESSOR, json.dumps(own_processor_settings(config), indent=2) + "\n")
    card = folder / CARD
    # A card that nobody has changed belongs to the model that it describes. Any other belongs to its author.
    text = card.read_text(encoding="utf-8") if card.exists() else EMPTY
    if AUTOMATIC in text or EMPTY in text:
        write_text(card, model_card(config, tags=_tags(text)) + AUTOMATIC + "\n")


def _tags(card: str) -> list[str]:
    """The tags in the header of a card of transformers, one a line."""
    match = re.search(r"^tags:\n((?:- .*\n)+)", card.partition("\n---")[0] + "\n", re.MULTILINE)
    return [line.removeprefix("- ").strip("'\"") for line in match[1].splitlines()] if match else []
