"""Suites on fixed data sets: scikit-learn's digits and MNIST-1D."""
