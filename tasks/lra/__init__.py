"""Long Range Arena (Tay et al. 2021): six sequence classification tasks of 1,024 to 16,384 positions."""
