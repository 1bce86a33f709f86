"""What models need in memory, what there is, and who fits."""
