"""New weights for inference engines: a trainer sends what changed in its weights, without loss."""
