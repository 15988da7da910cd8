"""Decoding streams beside long prompts: one engine that does both, and the same engine split over two instances."""
