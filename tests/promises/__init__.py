"""`make promises`: every figure of the promises P1 to P22, in one run, beside its target."""
