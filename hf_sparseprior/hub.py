"""What a saved model has in addition to its weights and its code: an image processor and a model card."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .files import write_text
from .image_processor import PROCESSOR, image_processor_settings
from .model_card import CARD, model_card

AUTOMATIC = "<!-- written on saving, and again on every saving until this line is removed -->"


def complete_folder(folder: str | os.PathLike, config: Any) -> None:
    """Write the image processor of a saved model if there is none, and the model card unless somebody edited it."""
    folder = Path(folder)
    if not (folder / PROCESSOR).exists():
        write_text(folder / PROCESSOR, json.dumps(image_processor_settings(config), indent=2) + "\n")
    card = folder / CARD
    # A card that nobody has changed belongs to the model that it describes. Any other belongs to its author.
    if not card.exists() or AUTOMATIC in card.read_text(encoding="utf-8"):
        write_text(card, model_card(config) + AUTOMATIC + "\n")
