"""Changes onto a branch: described, rebased or relocated, uploaded, swapped in."""
