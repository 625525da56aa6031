"""Number formats and bit layout: data and arithmetic.

The lowest floor. A format is a record (`format`, `catalog`); its levels and the arithmetic
between values and codes are in `curves`; codes become bytes in `packing`; `blocks` says which
elements share a scale; `rounding` holds the random numbers and `residual` the bits that a
half-precision weight cannot hold. Knows torch and the standard library only.
"""
