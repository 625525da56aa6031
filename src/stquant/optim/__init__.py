"""The optimizers: thin classes that declare their states and their rule, and one step loop."""
