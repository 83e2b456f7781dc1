"""Trained runs put to use: shapes, reviews and sentences that no data set holds."""
