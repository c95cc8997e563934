"""The autotuner of ``compress(model, "auto")``: `tuner` decides, `measure` and `trials` measure, `consensus` agrees."""
