"""Plans, requests and the backends that run them."""
