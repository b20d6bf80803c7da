"""Long Range Arena (Tay et al. 2021): six tasks of sequence classification with 1,024 to 16,384 positions."""
