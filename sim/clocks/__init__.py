"""Predicts time: records what a functional run did, and replays it on a model of an SM."""
