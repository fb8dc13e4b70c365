"""Noise that is correlated over the steps: BandMF (arXiv:2306.08153), lambda-CGD (2601.22334), BISR (2505.12128)."""

from dpx.papers.correlated_noise.mechanism import band_mf_sgd, correlated_noise, lambda_cgd

__all__ = ["band_mf_sgd", "correlated_noise", "lambda_cgd"]
