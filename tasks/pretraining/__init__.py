"""Self-supervised pretraining: DINO."""
