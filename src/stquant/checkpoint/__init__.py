"""What is written of an optimizer, and how it is read back.

`schema` fixes the names and checks every part of a file, `state_dict` turns live states into
plain tensors and back.
"""
