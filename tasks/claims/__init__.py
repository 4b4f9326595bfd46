"""What the papers claim, and what came out here: claims from configs/claims, numbers from records."""
