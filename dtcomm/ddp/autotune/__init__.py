"""The autotuner of ``compress(model, "auto")``: `measure` measures, `tuner` decides."""
