"""Predictions of trained runs on new shapes, reviews and sentences."""
