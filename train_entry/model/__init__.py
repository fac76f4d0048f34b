"""The trained model: its shape, its weights, and its division over ranks."""
