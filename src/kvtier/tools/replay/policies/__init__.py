"""Policies for replays: the shipped ones, published policies to compare with, and bounds."""
