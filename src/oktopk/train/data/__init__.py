"""Data to train on: speech, the CMU AN4 corpus or a synthetic one like it, as wav files with manifests; and text."""
