"""What a training would hold in memory, before there is any: models without memory, and what they cost.

`sources` finds the parameters, `presets` names models whose sizes are public, `plan` lets the real
optimizers make their states of them. Activations are not part of a plan: they depend on the batch.
"""
