"""Independent references in float64: formulas written plainly, over whole tensors, with no care for speed."""
