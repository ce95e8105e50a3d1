"""What a quantization is worth, at a glance: groups, histograms, differences, and a page of HTML."""
