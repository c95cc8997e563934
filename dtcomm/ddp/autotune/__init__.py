"""The autotuner of ``compress(model, "auto")``: `tuner` decides, `measure` measures, `consensus` agrees."""
