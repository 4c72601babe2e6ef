"""SDRM: distil a judge from itself, with human feedback in the teacher's prompt."""
