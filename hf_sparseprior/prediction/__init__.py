"""What models see in images: `sparseprior predict`."""
