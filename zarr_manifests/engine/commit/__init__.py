"""How changes reach a branch: described, rebased or relocated, uploaded, swapped in."""
