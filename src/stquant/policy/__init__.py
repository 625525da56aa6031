"""Which format a state gets.

A policy sees shapes, dtypes and numbers; it never touches a parameter or a state.
"""
