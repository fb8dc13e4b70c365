"""Noise that is correlated over the steps: BandMF (arXiv:2306.08153), lambda-CGD (2601.22334), BISR (2505.12128)."""

from dpx.papers.correlated_noise.mechanism import correlated_noise
from dpx.papers.correlated_noise.methods import band_mf_sgd, lambda_cgd

__all__ = ["band_mf_sgd", "correlated_noise", "lambda_cgd"]
