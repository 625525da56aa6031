"""Optional parts for trainers: what a callback adds to their logs."""
